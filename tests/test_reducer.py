"""One step without a framework: the residuals of gradients that travel together, and by policies of its own."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.step import residual
from deepreduce.step.flush import move_owned_residuals
from deepreduce.step.frame import FrameTag, write_frame
from deepreduce.step.local import check_equal
from deepreduce.step.policy import policy_of, title
from deepreduce.step.reducer import Bucket, ErrorFeedback, Reducer
from deepreduce.step.residual import ResidualMemory
from deepreduce.step.topology import AllGather, Sharded
from deepreduce.step.transport import SingleRank, all_gather_array
from deepreduce.step.trial import all_reduce_max


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_unused_parameter_of_a_bucket_keeps_its_residual(dtype):
    rng = np.random.default_rng(0)
    reducer = Reducer(policy_of("topr:0.25/raw/raw", 0), AllGather(), per="bucket")
    memory = ErrorFeedback(ResidualMemory(), None)
    steps = [[rng.standard_normal(40_000).astype(dtype) for _ in range(2)] for _ in range(3)]
    steps[1][1][:] = 0
    sent = np.zeros(40_000)
    for step, gradients in enumerate(steps):
        before = memory.own.residuals.get("unused")
        means, _ = reducer.reduce(Bucket(["used", "unused"], gradients, step), memory, SingleRank())
        sent += means[1]
        if step == 1:
            assert memory.own.residuals["unused"] is before
            assert not means[1].any()
    given = sum(gradients[1].astype(np.float64) for gradients in steps)
    np.testing.assert_allclose(sent + memory.own.residuals["unused"], given, atol=1e-5)


def test_what_an_owner_remembers_of_tensors_on_a_device_goes_back_to_its_gradient():
    torch = pytest.importorskip("torch")
    from deepreduce.torch import arrays  # noqa: F401  (registers the operations for tensors)

    memory = ErrorFeedback(ResidualMemory(), ResidualMemory(), {"w": 6})
    memory.owned.residuals["w"] = torch.tensor([1.0, 2, 3, 4, 5, 6])
    move_owned_residuals(memory, Sharded(), ["w"], [torch.zeros(2, 3)], rank=0, size=1)
    assert memory.own.residuals["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not memory.owned.residuals


class Interrupted(AllGather):
    def fail(self, failure, context):
        raise KeyboardInterrupt


class Failing:
    def codec_for(self, name, source):
        raise LookupError("not today")


def test_an_interruption_is_not_swallowed_while_a_failure_is_reported():
    with pytest.raises(KeyboardInterrupt):
        Reducer(Failing(), Interrupted()).reduce(Bucket(["w"], [np.ones(3)], 0), ErrorFeedback(None, None), SingleRank())


class OtherSize(SingleRank):
    """A second rank sends three bytes."""

    size = 2

    def all_gather(self, frame, tag):
        return [*super().all_gather(frame, tag), np.frombuffer(write_frame(b"abc", tag), np.uint8)]


def test_an_array_of_another_size_is_a_corrupt_message():
    tag = FrameTag("times", 0, 0, 16)
    for gather in (lambda: all_gather_array(np.ones(2), OtherSize(), tag), lambda: all_reduce_max([1, 2], OtherSize(), tag)):
        with pytest.raises(dr.CorruptError, match="rank 1 sent 3 bytes for times, here they are 16"):
            gather()
    with pytest.raises(dr.CorruptError, match="rank 1 sent 3 bytes"):
        check_equal(["weight"], [b"8 bytes!"], OtherSize(), step=0)


class Falling:
    """A schedule of a user's own."""

    def codec_at(self, step):
        return dr.parse("topr:0.1/raw/raw")


def test_the_name_of_a_schedule_is_the_same_on_all_ranks():
    first, second = (title(policy_of(Falling(), 10)) for _ in range(2))
    assert first == second == "ByStep(10, Falling)"


def test_only_gradients_whose_residuals_can_be_written_over_keep_a_second_array():
    momentum, plain = ResidualMemory(momentum=0.9), ResidualMemory()
    for memory in (momentum, plain):
        for step in range(3):
            gradient = np.random.default_rng(step).standard_normal(50).astype(np.float32)
            memory.update("w", memory.compensate("w", gradient), dr.SparseTensor([0], gradient[:1], (50,)))
    assert momentum._spares == {}
    assert plain._spares["w"] is not None


def steps_of(memory, count):
    """Run steps of one parameter; yields each compensated gradient."""
    for step in range(count):
        gradient = np.random.default_rng(step).standard_normal(50).astype(np.float32)
        compensated = memory.compensate("w", gradient)
        yield compensated
        memory.update_("w", compensated, dr.SparseTensor([0], compensated[:1].copy(), (50,)))


def test_the_memory_of_a_residual_is_used_again():
    used = [compensated.ctypes.data for compensated in steps_of(ResidualMemory(), 8)]
    assert len(set(used[2:])) == 2


@pytest.mark.parametrize("kept", [np.asarray, lambda array: array[10:], memoryview], ids=["array", "view", "memoryview"])
@pytest.mark.parametrize("fewer", [0, 2], ids=["this interpreter", "one that counts less"])
def test_the_memory_of_a_residual_that_somebody_holds_is_not_written_to(kept, fewer, monkeypatch):
    if fewer:  # since Python 3.14, a local variable that is passed to a function is counted once
        monkeypatch.setattr(residual, "sys", SimpleNamespace(getrefcount=lambda array: sys.getrefcount(array) - fewer))
        monkeypatch.setattr(residual, "_ALONE", residual._references_of_one_holder())
    memory, held, copies = ResidualMemory(), [], []
    for _ in steps_of(memory, 8):
        if "w" in memory.residuals:
            held.append(kept(memory.residuals["w"]))
            copies.append(np.array(held[-1]))
    assert all(np.array_equal(array, copy) for array, copy in zip(held, copies, strict=True))
