"""Compressed updates: the optimizer steps on each worker, and what it changed is sent."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import deepreduce as dr
from deepreduce.tensorflow import DistributedOptimizer

from .jobs import adam, batches, compressed, fitted, flat, network, sgd
from .workers import run_workers

SPARSE = "topr:0.05/rice/qsgd"


def trained(rank, strategy):
    optimizers = sgd, compressed("none/all/raw", sends="updates"), compressed(SPARSE, adam, sends="updates")
    plain, dense, sparse = (fitted(strategy, optimizer, steps=20) for optimizer in optimizers)
    return [flat(model) for model in (plain, dense, sparse)], sparse.optimizer.stats().last.ratio


def test_updates_of_two_workers():
    (mine, ratio), (other, _) = run_workers(trained, 2)
    np.testing.assert_allclose(mine[1], mine[0], rtol=0, atol=1e-6)  # momentum is linear: the mean of updates is the update of the mean
    for one, two in zip(mine, other, strict=True):
        assert one.tobytes() == two.tobytes()
        assert np.isfinite(one).all()
    assert not np.array_equal(mine[2], flat(network(sgd)))
    assert ratio > 10


def losses(optimizer):
    model = network(optimizer)
    return model.fit(batches(count=150), verbose=0, shuffle=False).history["loss"][-1]


def test_updates_of_adam_train_better_than_its_gradients():
    by_updates, by_gradients = (losses(compressed("topr:0.01/rice/qsgd", adam, sends=sends)) for sends in ("updates", "gradients"))
    assert by_updates < by_gradients


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_what_was_not_sent_of_an_update_is_sent_later():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", sends="updates", small_tensor_numel=0)
    weight, unused = keras.Variable(np.zeros(3, np.float32)), keras.Variable(np.ones(2, np.float32))
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant([4.0, 3.0, 1.0]), weight), (None, unused)])
    np.testing.assert_array_equal(weight.numpy(), [-12, -6, 0])
    np.testing.assert_array_equal(unused.numpy(), [1, 1])
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()


def test_constraints_hold_for_what_the_mean_gives():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", sends="updates", small_tensor_numel=0)
    weight = keras.Variable(np.ones(2, np.float32))
    weight.constraint = keras.constraints.NonNeg()
    for gradient in ([3.0, 2.0], [0.0, 0.5]):  # the second step sends the residual of the first too: 1 + 0.5 in all
        optimizer.apply([tf.constant(gradient)], [weight])
    np.testing.assert_array_equal(weight.numpy(), [0, 0])


def test_rows_of_an_embedding_are_updated():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "none/all/raw", sends="updates")
    table = keras.Variable(np.zeros((4, 2), np.float32))
    optimizer.apply([tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 3]))], [table])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-1, -1], [0, 0], [-1, -1]])


@pytest.mark.parametrize(
    ("inner", "sends", "why"),
    [
        (sgd, "weights", "'gradients' or 'updates'"),
        (lambda: keras.optimizers.LossScaleOptimizer(sgd()), "updates", "loss scale of its own"),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True), "updates", "average weights of its own"),
    ],
)
def test_wrong_settings_are_refused(inner, sends, why):
    with pytest.raises(dr.ConfigError, match=why):
        DistributedOptimizer(inner(), SPARSE, sends=sends)
