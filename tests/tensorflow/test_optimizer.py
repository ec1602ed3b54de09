"""One process, no strategy: what a user of Keras relies on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import deepreduce as dr
from deepreduce.tensorflow import DistributedOptimizer, PeerError
from deepreduce.tensorflow.messages import from_words, to_words

from .jobs import batches, compressed, flat, network, sgd

SPEC = "topr:0.05/raw/raw"


def test_one_worker_alone():
    model = network(compressed("none/all/raw"))
    plain = network(sgd)
    for each in (model, plain):
        each.fit(batches(count=5), verbose=0, shuffle=False)
    np.testing.assert_array_equal(flat(model), flat(plain))
    assert model.optimizer.stats().last.sent_bytes == 0
    assert [step.step for step in model.optimizer.stats().steps] == list(range(5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_residual_is_what_was_not_sent(dtype):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", small_tensor_numel=0)
    weight = keras.Variable(np.zeros(3), dtype=dtype)
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant([4.0, 3.0, 1.0], dtype), weight)])
    np.testing.assert_array_equal(np.float64(weight.numpy()), [-12, -6, 0])
    (residual,) = optimizer._residuals
    np.testing.assert_array_equal(np.float64(residual.numpy()) - np.float64(weight.numpy()), [12, 9, 3])
    assert residual.dtype == ("float64" if dtype == "float64" else "float32")


def test_small_tensors_owe_nothing():
    optimizer = DistributedOptimizer(sgd(), SPEC, small_tensor_numel=10)
    optimizer.build([keras.Variable(np.zeros(20), name="large"), keras.Variable(np.zeros(5), name="small")])
    assert [residual is not None for residual in optimizer._residuals] == [True, False]
    assert sum("residual" in variable.path for variable in optimizer.variables) == 1


def test_without_memory():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", memory="none", small_tensor_numel=0)
    weight = keras.Variable(np.zeros(2, np.float32))
    for _ in range(2):
        optimizer.apply([tf.constant([2.0, 1.5])], [weight])
    np.testing.assert_array_equal(weight.numpy(), [-4, 0])


def test_a_variable_without_gradient_is_left_alone():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), SPEC, small_tensor_numel=0)
    used, unused = keras.Variable(np.zeros(2, np.float32), name="used"), keras.Variable(np.zeros(2, np.float32), name="unused")
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.constant([1.0, 0.0]), None], [used, unused])
    np.testing.assert_array_equal(used.numpy(), [-1, 0])
    assert list(optimizer.stats().last.parameters) == ["used"]


def test_rows_are_summed_and_their_debt_waits_for_them():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", small_tensor_numel=0)
    table = keras.Variable(np.zeros((4, 2), np.float32), name="table")

    def step(rows, values):
        optimizer.apply([tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows))], [table])

    step([3, 1, 3], [[1, 0], [3, 0], [1, 1]])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-3, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(optimizer._residuals[0].numpy()[3], [2, 1])
    step([0], [[1, 0]])
    np.testing.assert_array_equal(table.numpy()[0], [-1, 0])
    step([3], [[0, 0.5]])
    np.testing.assert_array_equal(table.numpy()[3], [-2, 0])
    np.testing.assert_array_equal(optimizer._residuals[0].numpy()[3], [0, 1.5])


def test_it_is_saved_by_its_settings():
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.5), SPEC, memory="none", small_tensor_numel=7, seed=3)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert isinstance(again.inner_optimizer, keras.optimizers.Adam)
    again.learning_rate = 0.25
    assert float(again.inner_optimizer.learning_rate) == 0.25


def test_a_policy_is_saved_too_if_it_is_one_of_ours():
    policy = dr.BySize(10, dr.parse("dense"), dr.parse("topr:1/raw/raw"))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(DistributedOptimizer(sgd(), policy)))
    assert again._messenger.policy == policy

    class Mine:
        def choose(self, name, source):
            return dr.parse("dense")

    with pytest.raises(dr.ConfigError, match=r"saved with a spec, a DeepReduce or a BySize .* got .*Mine"):
        DistributedOptimizer(sgd(), Mine()).get_config()


@pytest.mark.parametrize("options", [{"memory": "both"}, {"seed": -1}, {"spec": "topr/raw"}, {"optimizer": object()}])
def test_wrong_settings_are_refused(options):
    with pytest.raises(dr.ConfigError):
        DistributedOptimizer(**{"optimizer": sgd(), "spec": SPEC} | options)


def test_words_carry_messages_and_reasons():
    with pytest.raises(PeerError, match="worker 1 could not send its gradients: no memory"):
        from_words(np.concatenate([to_words(b"fine"), to_words(b"no memory", failed=True)]))
    with pytest.raises(dr.CorruptError, match="worker 0 announces"):
        from_words(to_words(b"12345")[:-1])
