"""Never slower than dense: the faster way is found, on all ranks alike, and nothing is lost on the way."""

import time

import pytest
import torch

from deepreduce import parse
from deepreduce.torch import DeepReduceState, ResidualMemory, allreduce_, dense

from .ranks import run_ranks
from .tasks import flat, hooked, train

SPEC = "topr:0.05/rice/raw"
STEPS = 20  # eight of each kind, and some that are free to choose
PAUSE_SECONDS = 0.05


class SlowToEncode:
    def codec_for(self, name, source):
        time.sleep(PAUSE_SECONDS)
        return parse(SPEC)


def slow(function):
    def slowed(*arguments, **options):
        time.sleep(PAUSE_SECONDS)
        return function(*arguments, **options)

    return slowed


def ways(rank, slow_network):
    if slow_network:
        dense.all_reduce = slow(dense.all_reduce)
    state = DeepReduceState(SPEC if slow_network else SlowToEncode(), never_slower=True, small_tensor_numel=16)
    model = hooked(state, bucket_cap_mb=25)
    compressed = []
    for step in range(STEPS):
        train(rank, model, 1, start=step)
        compressed.append(state.stats().last.ratio > 1)
    return compressed, flat(model)


@pytest.mark.parametrize("slow_network", [False, True])
def test_the_faster_way_is_kept_on_all_ranks(slow_network):
    (ours, parameters), (theirs, same) = run_ranks(ways, 2, slow_network)
    assert ours == theirs == 8 * [True] + 8 * [False] + 4 * [slow_network]
    assert torch.equal(parameters, same)


def sums(rank, overflow_step, topology):
    state = DeepReduceState(SPEC, topology=topology, never_slower=True, small_tensor_numel=16)
    given, got = torch.zeros(4000), torch.zeros(4000)
    for step in range(10):
        gradient = torch.randn(4000, generator=torch.Generator().manual_seed(100 * step + rank))
        if step == overflow_step:
            gradient *= float("inf") if rank == 1 else 1.0
            allreduce_(gradient, state)
            assert not bool(torch.isfinite(gradient).all())
            continue
        given += gradient
        allreduce_(gradient, state)
        got += gradient
    return given, got, state.stats().last.ratio


@pytest.mark.parametrize(("overflow_step", "topology"), [(None, "allgather"), (8, "allgather"), (None, "server"), (None, "sharded")])
def test_the_first_dense_step_that_is_not_lost_sends_all_residuals(overflow_step, topology):
    (mine, got, ratio), (others, same, _) = run_ranks(sums, 2, overflow_step, topology)
    assert ratio == 1
    assert torch.equal(got, same)
    torch.testing.assert_close(got, (mine + others) / 2, atol=1e-5, rtol=1e-5)


def test_an_unused_parameter_keeps_its_residual():
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    allreduce_(torch.tensor([3.0, 2.0]), state)
    unused = torch.zeros(2)
    assert dense._flush(state, ["tensor 0"], [unused]) == []
    assert unused.tolist() == [0, 0]


def test_the_memory_of_buckets_cannot_be_flushed_to_owners():
    with pytest.raises(ValueError, match=r"never_slower with per='bucket' goes with topology 'allgather' only, got 'sharded'"):
        DeepReduceState(SPEC, topology="sharded", per="bucket", never_slower=True)


def test_momentum_is_for_compressed_steps():
    with pytest.raises(ValueError, match=r"momentum .* got momentum 0.9"):
        DeepReduceState(SPEC, memory=ResidualMemory(momentum=0.9), never_slower=True)


def sparse_sums(rank):
    """Sparse gradients, under which the first dense step must send the residual too."""
    state = DeepReduceState("topr:2/raw/raw", never_slower=True, small_tensor_numel=0)
    given, got = torch.zeros(40), torch.zeros(40)
    for step in range(10):
        places = torch.randint(0, 40, (5,), generator=torch.Generator().manual_seed(100 * step + rank)).unique()
        gradient = torch.sparse_coo_tensor(places[None], torch.ones(places.numel()), (40,), check_invariants=True)
        given += gradient.to_dense()
        allreduce_(gradient, state)
        got += gradient.to_dense()
    return given, got


def test_dense_steps_send_the_residuals_of_sparse_gradients():
    (mine, got), (others, same) = run_ranks(sparse_sums, 2)
    assert torch.equal(got, same)
    torch.testing.assert_close(got, (mine + others) / 2)


def test_a_stepped_state_takes_a_checkpoint_and_goes_on():
    state = DeepReduceState(SPEC, never_slower=True, small_tensor_numel=16)
    fresh = state.state_dict()
    for _ in range(5):
        allreduce_(torch.randn(100), state)
    state.load_state_dict(fresh)
    for _ in range(20):
        allreduce_(torch.randn(100), state)
    assert state.step == 20
