"""All workers end with the same bits; without compression they are those of Keras' own all-reduce."""

import numpy as np
import pytest
import tensorflow as tf

from deepreduce.tensorflow import DistributedOptimizer

from .jobs import compressed, flat, network, sgd, trained_together
from .workers import run_workers

OWNERS = ["server", "sharded"]
SPECS = ["none/all/raw", "topr:0.01/rice/qsgd", "topr:0.05/bloom:p2/raw"]


def trained(rank, strategy, specs):
    optimizers = [sgd, *(compressed(spec) for spec in specs)]
    optimizers += [compressed(spec, topology=topology) for spec in ("none/all/raw", "topr:0.05/rice/qsgd") for topology in OWNERS]
    models = trained_together(rank, strategy, optimizers)
    return [flat(model) for model in models], [model.optimizer.stats().last for model in models[1:]], known_gradients(rank, strategy)


def known_gradients(rank, strategy):
    """The weights after a step with known gradients, taken eagerly, and after another in a `tf.function`; the dense bytes of both."""
    with strategy.scope():
        optimizer = DistributedOptimizer(sgd(), "topr:2/raw/raw", small_tensor_numel=0)
        weight = tf.Variable([0.0, 0.0, 0.0, 0.0])
        optimizer.build([weight])
    gradient = tf.constant([[4.0, 0.5, 3.0, 0.25], [0.0, 8.0, 0.5, 2.0]][rank])

    def step():
        optimizer.apply_gradients([(gradient, weight)])

    strategy.run(step)
    eager = weight.numpy()
    strategy.run(tf.function(step))
    return eager, weight.numpy(), optimizer.stats().dense_bytes


@pytest.fixture(scope="module")
def two_workers():
    return run_workers(trained, 2, SPECS)


def test_without_compression_it_is_the_all_reduce_of_keras(two_workers):
    for (plain, uncompressed, _, _, by_server, by_owners, _, _), *_ in two_workers:
        for ours in (uncompressed, by_server, by_owners):
            np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6)


def test_all_workers_hold_the_same_bits(two_workers):
    start = flat(network(sgd))
    for mine, other in zip(*(weights for weights, *_ in two_workers), strict=True):
        assert mine.tobytes() == other.tobytes()
        assert np.isfinite(mine).all()
        assert not np.array_equal(mine, start)


def test_the_bytes_are_counted(two_workers):
    for _, (identity, rice, bloom, *_), _ in two_workers:
        assert identity.dense_bytes == rice.dense_bytes == bloom.dense_bytes == 4 * (20 * 48 + 48 + 48 * 48 + 48 + 48 * 5 + 5)
        assert identity.message_bytes > identity.dense_bytes
        assert rice.ratio > 50
        assert bloom.ratio > 10
        assert rice.parameters["network/hidden1/kernel"].nnz == 23
        assert rice.sent_bytes >= rice.message_bytes > sum(part.message_bytes for part in rice.parameters.values())
        assert min(rice.encode_seconds, rice.exchange_seconds, rice.decode_seconds) > 0


def test_a_loop_of_ones_own_sums_what_the_workers_send(two_workers):
    for *_, (eager, compiled, dense_bytes) in two_workers:
        first = np.float32([4, 8, 3, 2])
        np.testing.assert_allclose(eager, -0.1 * first, rtol=1e-6)
        np.testing.assert_allclose(compiled, -0.1 * (1.9 * first + first), rtol=1e-6)
        assert dense_bytes == 2 * 16
