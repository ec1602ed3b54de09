"""One error feedback for every framework: the same contract over numpy arrays, tensors of torch, and host arrays of TensorFlow and JAX."""

from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest

import deepreduce as dr
from deepreduce.step.arrays import accumulation_dtype, arrays_of
from deepreduce.tensor import FLOAT_DTYPES

from .tensors import same_bits


def from_torch(array):
    from deepreduce.torch import arrays  # noqa: F401  (registers the operations for tensors)
    from deepreduce.torch.convert import to_torch

    return to_torch(array.copy())


def from_tensorflow(array):
    import tensorflow as tf

    return tf.constant(array).numpy()


def from_jax(array):
    import jax.numpy as jnp

    return np.asarray(jnp.asarray(array))


MAKERS = {"numpy": np.array, "torch": from_torch, "tensorflow": from_tensorflow, "jax": from_jax}


@pytest.fixture(params=MAKERS)
def make(request):
    """Makes an array into a gradient as the adapter of a framework gives it to the step."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return MAKERS[request.param]


def back(tensor):
    """A tensor of any framework as a numpy array."""
    if isinstance(tensor, np.ndarray):
        return tensor
    from deepreduce.torch.convert import to_numpy

    return to_numpy(tensor)


def run(memory, gradients, spec):
    """What is sent for a row of gradients, in their dtype."""
    codec, sent = dr.parse(spec), []
    for step, gradient in enumerate(gradients):
        arrays, compensated = arrays_of(gradient), memory.compensate("w", gradient)
        content = arrays.cast_saturating(compensated, arrays.dtype(gradient))
        part = dr.decode_sparse(codec.encode(arrays.source(content), seed=step))
        memory.update("w", compensated, part)
        sent.append(part.to_dense())
    return sent


def random_gradients(count=20, shape=(30, 10)):
    rng = np.random.default_rng(5)
    return [rng.integers(-64, 64, shape).astype(np.float32) for _ in range(count)]


def residual_of(memory, table="residuals"):
    return back(memory.state_dict()[table]["w"])


# The contract, over all frameworks


def test_nothing_is_lost_what_was_not_sent_is_the_residual(make):
    gradients, memory = random_gradients(), dr.ResidualMemory()
    sent = run(memory, map(make, gradients), "topr:0.05/raw/raw")
    assert np.array_equal(sum(sent) + residual_of(memory), sum(gradients))  # integers: exact in float32


def test_every_framework_has_the_same_bits(make):
    for options in ({}, {"decay": 0.9}, {"momentum": 0.9}, {"decay": 0.5, "momentum": 0.5}):
        ours, plain = dr.ResidualMemory(**options), dr.ResidualMemory(**options)
        sent = run(ours, map(make, random_gradients()), "topr:0.05/raw/fp16")
        expected = run(plain, random_gradients(), "topr:0.05/raw/fp16")
        assert all(same_bits(a, b) for a, b in zip(sent, expected, strict=True))
        assert same_bits(residual_of(ours), residual_of(plain))


def test_rounding_of_a_lossy_codec_is_in_the_residual_too(make):
    memory = dr.ResidualMemory()
    sent = run(memory, [make(np.full(4, 0.1, np.float32))] * 50, "none/all/bf16")
    np.testing.assert_allclose(sum(sent) + residual_of(memory), 5.0, rtol=1e-5)


def test_momentum_correction_follows_deep_gradient_compression(make):
    gradients, momentum = random_gradients(8, (40,)), 0.5
    sent = run(dr.ResidualMemory(momentum=momentum), map(make, gradients), "topr:4/raw/raw")
    velocity, residual = np.zeros(40, np.float32), np.zeros(40, np.float32)
    for gradient, got in zip(gradients, sent, strict=True):
        velocity = momentum * velocity + gradient
        residual = residual + velocity
        top = np.sort(np.argsort(-np.abs(residual), kind="stable")[:4])
        assert np.array_equal(np.flatnonzero(got), top)
        np.testing.assert_allclose(got[top], residual[top], rtol=1e-5)
        velocity[top] = 0
        residual[top] = 0


def test_momentum_of_a_tensor_that_is_sent_whole_is_that_of_sgd(make):
    gradients, velocity = random_gradients(8, (40,)), np.zeros(40, np.float32)
    for gradient, got in zip(gradients, run(dr.ResidualMemory(momentum=0.5), map(make, gradients), "none/all/raw"), strict=True):
        velocity = 0.5 * velocity + gradient
        np.testing.assert_allclose(got, velocity, rtol=1e-5, atol=1e-5)


def test_resume_gives_the_same_bits(make):
    gradients = list(map(make, random_gradients()))
    whole = run(dr.ResidualMemory(decay=0.9, momentum=0.9), gradients, "topr:0.05/raw/fp16")
    memory = dr.ResidualMemory(decay=0.9, momentum=0.9)
    first = run(memory, gradients[:9], "topr:0.05/raw/fp16")
    resumed = dr.ResidualMemory(decay=0.9, momentum=0.9)
    resumed.load_state_dict(memory.state_dict())
    rest = run(resumed, gradients[9:], "topr:0.05/raw/fp16")
    assert all(np.array_equal(a, b) for a, b in zip(whole, first + rest, strict=True))


def test_a_step_with_nan_leaves_no_trace(make):
    memory = dr.ResidualMemory(momentum=0.9)
    gradients = random_gradients(4)
    run(memory, map(make, gradients[:2]), "topr:0.1/raw/raw")
    before = {table: residual_of(memory, table) for table in ("residuals", "velocities")}
    spoiled = gradients[2].copy()
    spoiled[0, 0] = np.nan
    (sent,) = run(memory, [make(spoiled)], "topr:0.1/raw/raw")
    assert np.isnan(sent[0, 0])
    assert all(same_bits(residual_of(memory, table), held) for table, held in before.items())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_finite_gradients_never_have_an_infinite_residual(make, dtype, momentum):
    if make is from_jax and dtype == np.float64:
        pytest.skip("JAX has no float64 unless jax_enable_x64 is set")
    largest = np.array(ml_dtypes.finfo(dtype).max, dtype)
    gradients = [np.array([largest, -largest, 1], dtype)] * 6
    memory = dr.ResidualMemory(momentum=momentum)
    for dense in run(memory, map(make, gradients), "topr:1/raw/raw"):
        assert np.all(np.isfinite(dense))
    residual = residual_of(memory)
    assert residual.dtype == accumulation_dtype(dtype)
    assert np.all(np.isfinite(residual))
    assert np.any(residual != gradients[0])  # it did not stop


def test_half_precision_is_added_up_in_float32(make):
    memory = dr.ResidualMemory()
    sent = run(memory, map(make, [np.float16([60000, 60001])] * 4), "topr:1/raw/raw")
    assert sent[0].dtype == np.float16
    assert [dense.tolist() for dense in sent[:3]] == [[60000, 0], [0, 65504], [65504, 0]]
    np.testing.assert_array_equal(sum(map(np.float64, sent)) + residual_of(memory), [240000, 240000])


def test_infinity_of_the_gradient_stays(make):
    memory = dr.ResidualMemory()
    memory.update("w", make(np.float16([60000, 1])), dr.SparseTensor([], np.float16([]), (2,)))
    compensated = back(memory.compensate("w", make(np.float16([60000, np.inf]))))
    assert compensated.dtype == np.float32
    assert compensated.tolist() == [120000, np.inf]


def test_a_loss_scale_is_followed(make):
    memory = dr.ResidualMemory()
    run(memory, [make(np.float32([3, 2]))], "topr:1/raw/raw")
    memory.rescale(8.0)
    assert residual_of(memory).tolist() == [0, 16]
    memory.rescale(2.0)
    assert residual_of(memory).tolist() == [0, 4]


def test_a_flush_adds_everything_and_then_it_is_forgotten(make):
    memory, gradient = dr.ResidualMemory(decay=0.5), make(np.float32([3, 2]))
    run(memory, [gradient], "topr:1/raw/raw")
    assert back(memory.flush_into("w", gradient)).tolist() == [3, 4]
    memory.drop("w")
    assert memory.flush_into("w", gradient) is gradient


def test_compensate_changes_nothing_and_update_checks_shapes(make):
    memory, gradient = dr.ResidualMemory(), make(np.float32([1, 2]))
    compensated = memory.compensate("w", gradient)
    assert compensated is not gradient
    assert memory.state_dict()["residuals"] == {}
    with pytest.raises(dr.InputError, match=r"shape \(2,\), but shape \(3,\)"):
        memory.update("w", compensated, dr.SparseTensor([], np.float32([]), (3,)))
    memory.update("w", compensated, dr.SparseTensor([], np.float32([]), (2,)))
    with pytest.raises(dr.InputError, match=r"'w' is float32 of shape \(1, 3\), but its residual is float32 of shape \(2,\)"):
        memory.compensate("w", make(np.float32([[1, 2, 3]])))
    if make is not from_jax:
        with pytest.raises(dr.InputError, match=r"'w' is float64 of shape \(2,\), but its residual is float32"):
            memory.compensate("w", make(np.float64([1, 2])))
    assert back(memory.compensate("w", gradient)).tolist() == [2, 4]
    assert back(gradient).tolist() == [1, 2]


def test_what_is_no_gradient_is_refused(make):
    memory, sent = dr.ResidualMemory(), dr.SparseTensor([], np.float32([]), (3,))
    integers = make(np.arange(3, dtype=np.int32))
    with pytest.raises(dr.InputError, match=r"gradient 'w': .*float16.* got .*int32"):
        memory.compensate("w", integers)
    with pytest.raises(dr.InputError, match=r"gradient 'w': .*float16.* got .*int32"):
        memory.update("w", integers, sent)
    with pytest.raises(dr.InputError, match="'w' is a SparseTensor, got"):
        memory.update("w", make(np.ones(3, np.float32)), make(np.ones(3, np.float32)))


# Sparse gradients, which are host arrays in every framework


def sparse(positions, values, numel=10):
    return dr.SparseTensor(positions, np.float32(values), (numel,))


def test_a_sparse_gradient_meets_its_residual_where_it_has_one():
    memory = dr.ResidualMemory()
    memory.update("w", sparse([1, 5], [3, 2]), sparse([1], [3]))
    compensated = memory.compensate("w", sparse([1, 5, 7], [1, 1, 1]))
    assert (compensated.indices.tolist(), compensated.values.tolist()) == ([1, 5, 7], [1, 3, 1])
    with pytest.raises(dr.InputError, match="was sparse and now is dense"):
        memory.compensate("w", np.ones(10, np.float32))


def test_momentum_counts_for_sparse_gradients_as_for_dense_ones():
    dense, thin = dr.ResidualMemory(decay=0.9, momentum=0.5), dr.ResidualMemory(decay=0.9, momentum=0.5)
    rng, codec = np.random.default_rng(0), dr.parse("topr:2/raw/raw")
    for step in range(12):
        gradient = np.where(rng.random(40) < 0.2, rng.standard_normal(40), 0).astype(np.float32)
        whole = dense.compensate("w", gradient)
        sent = dr.decode_sparse(codec.encode(whole, seed=step))
        dense.update("w", whole, sent)
        part = thin.compensate("w", sparse(np.flatnonzero(gradient), gradient[gradient != 0], 40))
        np.testing.assert_allclose(part.to_dense(), whole, rtol=1e-5, atol=1e-6)
        thin.update("w", part, dr.SparseTensor(sent.indices, part.to_dense()[sent.indices], (40,)))


def test_a_sparse_residual_goes_through_a_checkpoint():
    memory, resumed = dr.ResidualMemory(), dr.ResidualMemory()
    memory.update("w", sparse([1, 5], [3, 2]), sparse([1], [3]))
    resumed.load_state_dict(memory.state_dict())
    resumed.rescale(2.0)
    assert resumed.compensate("w", sparse([], [])).to_dense().tolist() == [0, 0, 0, 0, 0, 4, 0, 0, 0, 0]


# Options and states


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"decay": 0}, "decay"), ({"decay": 1.5}, "decay"), ({"momentum": 1}, "momentum"), ({"momentum": -0.1}, "momentum")],
)
def test_settings_are_checked(settings, complaint):
    with pytest.raises(dr.ConfigError, match=complaint):
        dr.ResidualMemory(**settings)


def test_a_memory_begins_with_what_it_is_given():
    residual = np.float32([1, 0])
    memory = dr.ResidualMemory.of({"w": residual})
    assert memory.compensate("w", np.float32([1, 1])).tolist() == [2, 1]
    memory.update("w", np.float32([2, 1]), dr.SparseTensor([0], np.float32([2]), (2,)))
    assert residual.tolist() == [1, 0]


def test_byte_order_and_lists_do_not_matter():
    memory = dr.ResidualMemory(momentum=0.5)
    swapped = [memory.compensate("w", gradient.astype(">f4")) for gradient in random_gradients(1)]
    assert same_bits(swapped[0], random_gradients(1)[0])
    run(memory, random_gradients(4), "topr:0.1/raw/raw")
    state = memory.state_dict()
    resumed = dr.ResidualMemory(momentum=0.5)
    resumed.load_state_dict({key: {"w": state[key]["w"].astype(">f4")} for key in ("residuals", "velocities")})
    again = resumed.compensate("w", random_gradients(1)[0].astype(">f4"))
    assert same_bits(again, memory.compensate("w", random_gradients(1)[0]))
    memory = dr.ResidualMemory()
    assert memory.compensate("list", [1.0, 2.0]).tolist() == [1, 2]
    memory.update("list", [1.0, 2.0], dr.SparseTensor([1], np.float64([2]), (2,)))
    assert memory.compensate("list", [0.0, 0.0]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (None, "a memory state is a dict of residuals, velocities and scale, got NoneType"),
        ({"other": {}}, r"residuals, velocities and scale, got \['other'\]"),
        ({"residuals": None, "velocities": {}}, "are dicts"),
        ({"residuals": {"w": np.arange(3)}, "velocities": {}}, "residual of 'w': .*float16.* got int64"),
        ({"residuals": {"w": {"indices": [1]}}, "velocities": {}}, "has the keys indices, values and shape"),
        ({"residuals": {}, "velocities": {}, "scale": 0}, "loss scale .* above 0"),
    ],
)
def test_a_state_that_is_refused_changes_nothing(state, complaint):
    memory = dr.ResidualMemory()
    memory.update("w", np.float32([1, 2]), dr.SparseTensor([], np.float32([]), (2,)))
    with pytest.raises(dr.InputError, match=complaint):
        memory.load_state_dict(state)
    assert residual_of(memory).tolist() == [1, 2]
