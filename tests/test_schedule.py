"""Density warm-up and local clipping."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import Bucket, ErrorFeedback, Reducer
from deepreduce.step.topology import AllGather
from deepreduce.step.transport import SingleRank


@pytest.mark.parametrize("spec", ["topr:0.01/rice/qsgd", "randomr:0.01/seeded/raw", "chunktopr:41,chunk=4096/raw/raw"])
@pytest.mark.parametrize("start", [0.25, 1.0])
def test_the_density_falls_to_that_of_the_spec(spec, start):
    schedule, gradient = dr.Schedule(spec, steps=100, start=start), np.random.default_rng(0).normal(size=40960).astype(np.float32)
    kept = [dr.inspect(schedule.codec_at(step).encode(gradient)).nnz for step in range(0, 120, 5)]
    assert kept[0] == pytest.approx(start * gradient.size, rel=0.01)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == kept[20] == pytest.approx(0.01 * gradient.size, rel=0.01)
    assert kept[19] > kept[20]


def test_a_step_takes_the_codec_of_its_number():
    reducer = Reducer(policy_of(dr.Schedule("topr:0.01/raw/raw", steps=10, start=0.5), small_numel=0), AllGather())
    gradient = np.arange(1, 1001, dtype=np.float32)
    buckets = [Bucket(["w"], [gradient], step) for step in (0, 9, 10)]
    kept = [np.count_nonzero(reducer.reduce(bucket, ErrorFeedback(None, None), SingleRank())[0][0]) for bucket in buckets]
    assert kept == [500, 16, 10]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("none/all/qsgd", 10), "has none"),
        (("topr:100/raw/raw", 10), "has none"),
        (("topr:0.5/raw/raw", 10, 0.25), "at least the density"),
        (("topr:0.01/raw/raw", -1), "an int of at least 0"),
        (("topr:0.01/raw/raw", 10, 1.5), "at most 1"),
    ],
)
def test_what_has_no_density_is_refused(arguments, why):
    with pytest.raises(dr.ConfigError, match=why):
        dr.Schedule(*arguments)


def test_a_gradient_is_clipped_to_its_norm_before_the_residual_is_added():
    memory = dr.ResidualMemory(clip=5.0)
    memory.update("w", np.float32([3, 1]), dr.SparseTensor([0], np.float32([3]), (2,)))
    assert memory.compensate("w", np.float32([30, 40])) == pytest.approx([3, 5])
    assert memory.compensate("w", np.float32([1, 2])) == pytest.approx([1, 3])
    assert np.isnan(memory.compensate("w", np.float32([np.nan, 40]))).tolist() == [True, False]


def test_a_gradient_with_a_loss_scale_is_clipped_as_one_without():
    memory = dr.ResidualMemory(clip=5.0)
    memory.rescale(1024.0)
    assert memory.compensate("w", 1024 * np.float32([3, 3])) / 1024 == pytest.approx([3, 3])
    assert memory.compensate("w", 1024 * np.float32([30, 40])) / 1024 == pytest.approx([3, 4])


def test_a_sparse_gradient_is_clipped_too():
    clipped = dr.ResidualMemory(clip=5.0).compensate("w", dr.SparseTensor([1, 7], np.float32([30, 40]), (9,)))
    assert clipped.values == pytest.approx([3, 4])


def test_a_clip_is_a_norm():
    with pytest.raises(dr.ConfigError, match="above 0"):
        dr.ResidualMemory(clip=0.0)
