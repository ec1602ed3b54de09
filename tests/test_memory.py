import ml_dtypes
import numpy as np
import pytest

import deepreduce as dr
from deepreduce.tensor import FLOAT_DTYPES

from .tensors import same_bits


def run(memory, gradients, spec):
    """What is sent for a row of gradients."""
    codec, sent = dr.parse(spec), []
    for step, gradient in enumerate(gradients):
        compensated = memory.compensate("w", gradient)
        part = dr.decode_sparse(codec.encode(compensated, seed=step))
        memory.update("w", compensated, part)
        sent.append(part.to_dense())
    return sent


def random_gradients(count=20, shape=(30, 10)):
    rng = np.random.default_rng(5)
    return [rng.integers(-64, 64, shape).astype(np.float32) for _ in range(count)]


def test_nothing_is_lost_what_was_not_sent_is_still_owed():
    gradients, memory = random_gradients(), dr.ResidualMemory()
    sent = run(memory, gradients, "topr:0.05/raw/raw")
    owed = memory.state_dict()["residuals"]["w"]
    assert np.array_equal(sum(sent) + owed, sum(gradients))  # integers: exact in float32


def test_rounding_of_a_lossy_codec_is_owed_too():
    memory = dr.ResidualMemory()
    gradients = [np.full(4, 0.1, np.float32)] * 50
    sent = run(memory, gradients, "none/all/bf16")
    np.testing.assert_allclose(sum(sent) + memory.state_dict()["residuals"]["w"], 5.0, rtol=1e-5)


def test_momentum_correction_follows_deep_gradient_compression():
    gradients, momentum = random_gradients(8, (40,)), 0.5
    sent = run(dr.ResidualMemory(momentum=momentum), gradients, "topr:4/raw/raw")
    velocity, residual = np.zeros(40, np.float32), np.zeros(40, np.float32)
    for gradient, got in zip(gradients, sent, strict=True):
        velocity = momentum * velocity + gradient
        residual = residual + velocity
        top = np.sort(np.argsort(-np.abs(residual), kind="stable")[:4])
        assert np.array_equal(np.flatnonzero(got), top)
        np.testing.assert_allclose(got[top], residual[top], rtol=1e-5)
        velocity[top] = 0
        residual[top] = 0


def test_resume_gives_the_same_bits():
    gradients = random_gradients()
    whole = run(dr.ResidualMemory(decay=0.9, momentum=0.9), gradients, "topr:0.05/raw/fp16")
    memory = dr.ResidualMemory(decay=0.9, momentum=0.9)
    first = run(memory, gradients[:9], "topr:0.05/raw/fp16")
    resumed = dr.ResidualMemory(decay=0.9, momentum=0.9)
    resumed.load_state_dict(memory.state_dict())
    rest = run(resumed, gradients[9:], "topr:0.05/raw/fp16")
    assert all(np.array_equal(a, b) for a, b in zip(whole, first + rest, strict=True))


def test_a_step_with_nan_leaves_no_trace():
    memory = dr.ResidualMemory(momentum=0.9)
    gradients = random_gradients(4)
    run(memory, gradients[:2], "topr:0.1/raw/raw")
    before = memory.state_dict()
    spoiled = gradients[2].copy()
    spoiled[0, 0] = np.nan
    (sent,) = run(memory, [spoiled], "topr:0.1/raw/raw")
    assert np.isnan(sent[0, 0])
    after = memory.state_dict()
    assert all(np.array_equal(before[key]["w"], after[key]["w"]) for key in before)


def test_compensate_changes_nothing_and_update_checks_shapes():
    memory, gradient = dr.ResidualMemory(), np.float32([1, 2])
    compensated = memory.compensate("w", gradient)
    assert compensated is not gradient
    assert memory.state_dict()["residuals"] == {}
    with pytest.raises(dr.InputError, match=r"shape \(2,\), but shape \(3,\)"):
        memory.update("w", compensated, dr.SparseTensor([], np.float32([]), (3,)))
    memory.update("w", compensated, dr.SparseTensor([], np.float32([]), (2,)))
    with pytest.raises(dr.InputError, match="its memory is float32"):
        memory.compensate("w", np.float64([1, 2]))
    with pytest.raises(dr.InputError, match="residuals and velocities"):
        memory.load_state_dict({"other": {}})
    with pytest.raises(dr.InputError, match="memory of 'w' holds float16"):
        memory.load_state_dict({"residuals": {"w": np.arange(3)}, "velocities": {}})
    assert memory.compensate("w", gradient).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"decay": 0}, "decay"), ({"decay": 1.5}, "decay"), ({"momentum": 1}, "momentum"), ({"momentum": -0.1}, "momentum")],
)
def test_settings_are_checked(settings, complaint):
    with pytest.raises(dr.ConfigError, match=complaint):
        dr.ResidualMemory(**settings)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_finite_gradients_never_owe_infinity(dtype, momentum):
    largest = np.array(ml_dtypes.finfo(dtype).max, dtype)
    gradients = [np.array([largest, -largest, 1], dtype)] * 6
    memory = dr.ResidualMemory(momentum=momentum)
    for dense in run(memory, gradients, "topr:1/raw/raw"):
        assert np.all(np.isfinite(dense))
    residual = memory.state_dict()["residuals"]["w"]
    assert residual.dtype == dtype
    assert np.all(np.isfinite(residual))
    assert np.any(residual != gradients[0])  # it did not stop


def test_float16_that_overflows_goes_on():
    sent = run(dr.ResidualMemory(), [np.float16([60000, 60001])] * 4, "topr:1/raw/raw")
    assert [dense.tolist() for dense in sent] == [[60000, 0], [0, 65504], [65504, 0], [0, 65504]]


def test_infinity_of_the_gradient_stays():
    memory = dr.ResidualMemory()
    memory.update("w", np.float16([60000, 1]), dr.SparseTensor([], np.float16([]), (2,)))
    assert memory.compensate("w", np.float16([60000, np.inf])).tolist() == [65504, np.inf]


def test_byte_order_and_lists_do_not_matter():
    memory = dr.ResidualMemory(momentum=0.5)
    swapped = run(memory, [gradient.astype(">f4") for gradient in random_gradients(4)], "topr:0.1/raw/raw")
    native = run(dr.ResidualMemory(momentum=0.5), random_gradients(4), "topr:0.1/raw/raw")
    assert all(same_bits(a, b) for a, b in zip(swapped, native, strict=True))
    assert memory.compensate("w", random_gradients(1)[0].astype(">f4")).dtype == np.float32
    resumed = dr.ResidualMemory(momentum=0.5)
    resumed.load_state_dict({key: {"w": table["w"].astype(">f4")} for key, table in memory.state_dict().items()})
    assert resumed.compensate("w", random_gradients(1)[0]).dtype == np.float32
    memory = dr.ResidualMemory()
    assert memory.compensate("list", [1.0, 2.0]).tolist() == [1, 2]
    memory.update("list", [1.0, 2.0], dr.SparseTensor([1], np.float64([2]), (2,)))
    assert memory.compensate("list", [0.0, 0.0]).tolist() == [1, 0]


def test_what_is_no_gradient_is_refused():
    memory, sent = dr.ResidualMemory(), dr.SparseTensor([], np.float32([]), (3,))
    with pytest.raises(dr.InputError, match=r"gradient 'w' holds float16.* got int32"):
        memory.compensate("w", np.arange(3, dtype=np.int32))
    with pytest.raises(dr.InputError, match=r"gradient 'w' holds float16.* got int32"):
        memory.update("w", np.arange(3, dtype=np.int32), sent)
    with pytest.raises(dr.InputError, match="'w' is a SparseTensor, got ndarray"):
        memory.update("w", np.ones(3, np.float32), np.ones(3, np.float32))
    for state in (None, {"residuals": None, "velocities": {}}):
        with pytest.raises(dr.InputError, match="a dict of dicts"):
            memory.load_state_dict(state)
    assert memory.state_dict() == {"residuals": {}, "velocities": {}}
