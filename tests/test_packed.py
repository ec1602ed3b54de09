"""Small gradients that share one array: they must not be told from those that do not."""

import copy
import pickle

import numpy as np
import pytest

from deepreduce.step import packed
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import Bucket, ErrorFeedback, Reducer
from deepreduce.step.residual import ResidualMemory
from deepreduce.step.topology import topology_of
from deepreduce.step.transport import SingleRank

SHAPES = [(40, 60), (7,), (2048,), (1,), (3, 5, 100), (40_000,), (1024,)]
NAMES = [f"parameter {number}" for number in range(len(SHAPES))]


def gradients(step):
    """One of them is not used in some steps, and one is not plain memory."""
    rng = np.random.default_rng(step)
    made = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    made[0] = np.asfortranarray(made[0])
    if step % 3 == 1:
        made[2][:] = 0
    return made


def trained(steps, reducer, memory, change=lambda step, made: made):
    """The means of some steps, written in place as an adapter does, and the residuals after them."""
    means = []
    for step in range(steps):
        seen = change(step, gradients(step))
        bucket = Bucket(NAMES, seen, step)
        context = reducer.context(bucket, memory, SingleRank())
        prepared = reducer.prepare(bucket, memory, context)
        result, _ = reducer.exchange(prepared, memory, context)
        parts, small = prepared.by_gradient(result.parts), []
        if prepared.packed is not None:
            prepared.packed.fill_(seen, parts, result.divisor)
            small = prepared.packed.indices
        assert bool(small) == (packed.SMALL > 0 and not memory.own.momentum)
        means += [seen[at].copy() if at in small else parts[at][0].to_dense() for at in range(len(seen))]
    return means, memory.own.state_dict()["residuals"]


def by_one(monkeypatch, *settings):
    """The same without a shared array."""
    with monkeypatch.context() as patch:
        patch.setattr(packed, "SMALL", 0)
        return trained(*settings)


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
@pytest.mark.parametrize("spec", ["topr:0.01/rice/qsgd", "nonzero/auto/fp16", "randomr:0.1/seeded/raw", "dense"])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_packed_gradients_have_the_same_means_and_residuals(monkeypatch, topology, spec, decay):
    reducer = Reducer(policy_of(spec, 1024), topology_of(topology))
    means, residuals = trained(6, reducer, ErrorFeedback(ResidualMemory(decay), ResidualMemory()))
    single, kept = by_one(monkeypatch, 6, reducer, ErrorFeedback(ResidualMemory(decay), ResidualMemory()))
    assert all(np.array_equal(mean, own) for mean, own in zip(means, single, strict=True))
    assert residuals.keys() == kept.keys()
    assert all(np.array_equal(residuals[name], kept[name]) for name in kept)


def with_nan(step, made):
    if step == 2:
        made[4][0] = np.nan
    return made


def huge(step, made):
    made[6][:] = 3e38
    return made


@pytest.mark.parametrize("change", [with_nan, huge])
def test_what_is_not_finite_is_handled_as_elsewhere(monkeypatch, change):
    reducer = Reducer(policy_of("topr:0.01/rice/raw", 1024), topology_of("allgather"))
    _, kept = by_one(monkeypatch, 5, reducer, ErrorFeedback(ResidualMemory(), None), change)
    memory = ErrorFeedback(ResidualMemory(), None)
    for step in range(5):
        reducer.reduce(Bucket(NAMES, change(step, gradients(step)), step), memory, SingleRank())
    residuals = memory.own.state_dict()["residuals"]
    assert all(np.array_equal(residuals[name], kept[name]) for name in kept)
    assert all(np.isfinite(held).all() for held in residuals.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
def test_a_copy_of_the_memory_goes_its_own_way(copied):
    reducer = Reducer(policy_of("topr:0.01/rice/qsgd", 1024), topology_of("allgather"))
    memory = ErrorFeedback(ResidualMemory(), None)
    trained(3, reducer, memory)
    before = memory.own.state_dict()["residuals"]
    trained(2, reducer, copied(memory))
    assert all(np.array_equal(held, before[name]) for name, held in memory.own.residuals.items())


def test_buckets_may_be_rebuilt():
    """As DDP does after its first step: residuals belong to parameters, not to buckets."""
    reducer = Reducer(policy_of("topr:0.01/rice/qsgd", 1024), topology_of("allgather"))
    one, other = ErrorFeedback(ResidualMemory(), None), ErrorFeedback(ResidualMemory(), None)
    for step in range(4):
        made = gradients(step)
        reducer.reduce(Bucket(NAMES, made, step), one, SingleRank())
        halves = (slice(0, 3), slice(3, None)) if step % 2 else (slice(0, 5), slice(5, None))
        for half in halves:
            reducer.reduce(Bucket(NAMES[half], made[half], step), other, SingleRank())
    assert all(np.array_equal(held, other.own.residuals[name]) for name, held in one.own.residuals.items())
    assert len(other.own._packs) <= 2
