"""One process, no strategy: what a user of Keras relies on."""

import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import deepreduce as dr
from deepreduce.cores import usable_cores
from deepreduce.step.frame import Failure, FrameTag, read_frames, write_frame
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import Reducer
from deepreduce.step.worker import Worker
from deepreduce.tensorflow import AllGather, DistributedOptimizer, PeerError, Sharded, private
from deepreduce.tensorflow.host import HostSteps
from deepreduce.tensorflow.transport import HostStep, Replicas, from_words, to_words
from deepreduce.tensorflow.views import Slot

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


def test_small_tensors_have_no_residual():
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


def test_rows_are_summed_and_their_residual_waits_for_them():
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
    optimizer = DistributedOptimizer(
        keras.optimizers.Adam(0.5), SPEC, memory="none", small_tensor_numel=7, topology=Sharded(budget=2.5), seed=3, threads=2
    )
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert isinstance(again.inner_optimizer, keras.optimizers.Adam)
    assert again._steps.reducer.topology == Sharded(budget=2.5)
    assert len(again._steps.reducer.threads) == len(optimizer._steps.reducer.threads) == min(2, len(usable_cores()))
    again.learning_rate = 0.25
    assert float(again.inner_optimizer.learning_rate) == 0.25


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of Keras
def test_names_survive_the_loading_of_a_model(tmp_path):
    model = network(compressed(SPEC))
    model.fit(batches(count=1), verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(batches(count=1), verbose=0, shuffle=False)
    assert list(loaded.optimizer.stats().last.parameters) == list(model.optimizer.stats().last.parameters)
    assert "network/hidden0/kernel" in loaded.optimizer.stats().last.parameters
    with pytest.raises(dr.ConfigError, match="1 parameter names were given for 6 variables"):
        network(compressed(SPEC, parameter_names=["w"])).fit(batches(count=1), verbose=0, shuffle=False)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_variables_of_one_name_have_residuals_of_their_own(sizes):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", small_tensor_numel=0)
    one, other = (tf.Variable(tf.zeros(size)) for size in sizes)
    assert one.name == other.name
    gradients = [tf.constant(([3.0, 2.0, 0.0])[: sizes[0]]), tf.constant(([30.0, 20.0, 0.0])[: sizes[1]])]
    for _ in range(2):
        optimizer.apply(list(gradients), [one, other])
    np.testing.assert_array_equal(one.numpy()[:2], [-3, -4])
    np.testing.assert_array_equal(other.numpy()[:2], [-30, -40])
    assert list(optimizer.stats().last.parameters) == ["Variable:0", "Variable:0#2"]
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    again.build([one, other])
    assert again.get_config() == optimizer.get_config()


def test_given_names_are_all_different():
    optimizer = DistributedOptimizer(sgd(), SPEC, parameter_names=["a", "b", "a"])
    with pytest.raises(dr.ConfigError, match="a parameter name of its own, got 'a' 2 times"):
        optimizer.build([keras.Variable(np.zeros(2)) for _ in range(3)])


def test_a_policy_is_saved_too_if_it_is_one_of_ours():
    policy = dr.BySize(10, dr.parse("dense"), dr.parse("topr:1/raw/raw"))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(DistributedOptimizer(sgd(), policy)))
    assert again._steps.reducer.policy == policy

    class Mine:
        def codec_for(self, name, source):
            return dr.parse("dense")

    with pytest.raises(dr.ConfigError, match=r"saved with a spec, a DeepReduce, a Schedule or a BySize .* got .*Mine"):
        DistributedOptimizer(sgd(), Mine()).get_config()


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "both"},
        {"seed": -1},
        {"spec": "topr/raw"},
        {"optimizer": object()},
        {"history": "a"},
        {"history": 0},
        {"topology": "dense"},
    ],
)
def test_wrong_settings_are_refused(options):
    with pytest.raises(dr.ConfigError):
        DistributedOptimizer(**{"optimizer": sgd(), "spec": SPEC} | options)


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_alone_every_topology_sends_what_allgather_does(topology):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), "topr:1/raw/raw", small_tensor_numel=0, topology=topology)
    weight, table = keras.Variable(np.zeros(3, np.float32), name="weight"), keras.Variable(np.zeros((4, 2), np.float32), name="table")
    for _ in range(3):
        rows = tf.IndexedSlices(tf.constant([[1.0, 0.0], [3.0, 0.0]]), tf.constant([3, 1]))
        optimizer.apply([tf.constant([4.0, 3.0, 1.0]), rows], [weight, table])
    np.testing.assert_array_equal(weight.numpy(), [-12, -6, 0])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-9, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(optimizer._residuals[1].numpy()[3], [3, 0])
    assert sum("owned" in variable.path for variable in optimizer.variables) == (0 if topology == "allgather" else 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_a_bug_in_a_policy_comes_out_as_itself(compiled, topology):
    class Broken:
        def codec_for(self, name, source):
            return {}["the key that is missing"]

    optimizer = DistributedOptimizer(sgd(), Broken(), topology=topology)
    weight = keras.Variable(np.zeros(3, np.float32), name="weight")
    optimizer.build([weight])

    def step():
        optimizer.apply([tf.constant([1.0, 2.0, 3.0])], [weight])

    with pytest.raises(tf.errors.OpError if compiled else KeyError, match="the key that is missing") as caught:
        (tf.function(step) if compiled else step)()
    assert "codec_for" in "".join(traceback.format_exception(caught.value))
    assert "PeerError" not in str(caught.value)


def test_what_is_sent_of_an_embedding_stays_in_proportion_to_what_is_touched():
    optimizer, draw, sizes = DistributedOptimizer(keras.optimizers.SGD(1.0), "nonzero/auto/qsgd"), np.random.default_rng(0), []
    table, total = keras.Variable(np.zeros((20_000, 16), np.float32), name="table"), np.zeros((20_000, 16))
    optimizer.build([table])

    @tf.function
    def step(values, rows):
        optimizer.apply([tf.IndexedSlices(values, rows)], [table])

    for _ in range(100):
        rows, values = draw.choice(20_000, 200, replace=False), draw.standard_normal((200, 16)).astype(np.float32)
        step(tf.constant(values), tf.constant(rows))
        total[rows] += values
        sizes.append(optimizer.stats().last.message_bytes)
    assert max(sizes) < 1.2 * sizes[0]
    np.testing.assert_allclose(optimizer._residuals[0].numpy() - table.numpy(), total, atol=1e-4)  # nothing is lost


def test_the_replicas_of_a_worker_are_counted_together():
    steps = HostSteps(Reducer(policy_of("topr:1/raw/raw", 0), AllGather(), average=False), feedback=False, history=2)
    slot = Slot("weight", (3,), np.dtype(np.float32), sliced=False, has_residual=False, has_owned=False)
    for step in range(3):
        frames = [steps.begin([slot], 2, step, 1, rank, 1.0, np.float32([1, 2, 3]))[0] for rank in range(2)]
        for rank in range(2):
            np.testing.assert_array_equal(steps.finish(rank, np.concatenate(frames))[0], [0, 0, 6])
    stats = steps.stats
    assert [(each.step, each.dense_bytes) for each in stats.steps] == [(1, 24), (2, 24)]
    assert stats.sent_bytes == 3 * stats.last.sent_bytes
    assert stats.message_bytes == 3 * stats.last.message_bytes
    assert stats.last.parameters["weight"].nnz == 2
    assert stats.last.parameters["weight"].dense_bytes == 24


def test_words_carry_frames_and_reasons():
    tag = FrameTag("weight", 7, 0, 100)
    gathered = np.concatenate([to_words(write_frame(b"fine", tag)), to_words(write_frame(Failure(MemoryError("no memory")), tag))])
    with pytest.raises(PeerError, match="rank 1 failed: MemoryError: no memory"):
        read_frames(from_words(gathered, 2, tag), tag, rank=0)
    with pytest.raises(dr.CorruptError, match="rank 1 for weight: a frame has a header"):
        from_words(to_words(write_frame(b"12345", tag)), 2, tag)
    with pytest.raises(dr.CorruptError, match="bytes came after the frames of 1 replicas"):
        from_words(gathered, 1, tag)


def test_a_step_that_ends_too_early_still_takes_part_in_every_exchange():
    def work(transport):
        transport.all_gather(write_frame(b"first", tag), tag)
        raise KeyError("bug")

    tag, worker = FrameTag("weight", 7, 0, 100), Worker("test")
    step = HostStep(worker, Replicas(0, 1), 2, work)
    second = step.following(step.first())
    with pytest.raises(PeerError, match="rank 0 failed: KeyError: 'bug'"):
        read_frames(from_words(second, 1, tag), tag, rank=0)
    with pytest.raises(KeyError, match="bug"):
        step.last(second)
    worker.close()


def test_a_step_that_was_given_up_frees_its_thread():
    tag, worker = FrameTag("weight", 7, 0, 100), Worker("test")
    interrupted = HostStep(worker, Replicas(0, 1), 1, lambda transport: transport.all_gather(write_frame(b"", tag), tag))
    interrupted.first()
    interrupted.give_up()
    assert worker.submit(lambda: "free").result(timeout=10) == "free"
    worker.close()


def test_a_keras_that_sums_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(keras.optimizers.Optimizer, "_backend_update_step", lambda self, grads, variables, rate: None)
    with pytest.raises(dr.ConfigError, match=f"cannot keep SGD from summing .* found Keras {keras.__version__} on tensorflow"):
        DistributedOptimizer(sgd(), SPEC)


def test_a_keras_that_builds_otherwise_is_refused():
    with pytest.raises(dr.ConfigError, match=f"enable_fit needs Keras 3 .* found Keras {keras.__version__}"):
        private.build_alone(object(), None)
