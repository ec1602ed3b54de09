"""States whose steps use several threads: the same bits, and no thread is left behind."""

import copy
import pickle
import threading

import pytest
import torch

import deepreduce as dr
from deepreduce.step import threads
from deepreduce.torch import DeepReduceState, LocalSteps, allreduce_

from .pretend import DEVICE, PretendDevice
from .ranks import run_ranks
from .tasks import flat, hooked, network, train, train_with

SPEC = "topr:0.05/rice/qsgd"
COUNTS = (1, 2, 3)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: [0, 1, 2, 3])


def named():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("deepreduce thread")]


def gradients(step):
    draw = torch.Generator().manual_seed(step)
    dense = [torch.randn(shape, generator=draw) for shape in ((70, 900), (3,), (40_000,), (200, 300), (2048,))]
    return [*dense, torch.randn(50_000, generator=draw).bfloat16(), torch.eye(60).mul(step + 1).to_sparse_coo()]


@pytest.mark.parametrize("per", ["parameter", "bucket"])
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_means_have_the_same_bits(topology, per):
    seen = []
    for count in COUNTS:
        with DeepReduceState(SPEC, topology=topology, per=per, threads=count) as state:
            for step in range(3):
                tensors = gradients(step)
                allreduce_(tensors, state)
            seen.append([tensor.to_dense() for tensor in tensors] + list(state.memory.own.residuals.values())[:1])
            assert len(named()) == count - 1
        assert named() == []
    for others in zip(*seen, strict=True):
        assert all(torch.equal(torch.as_tensor(others[0]), torch.as_tensor(other)) for other in others)


def trained(rank, count, topology):
    threads.usable_cores = lambda: [0, 1, 2]
    with DeepReduceState(SPEC, small_tensor_numel=16, topology=topology, threads=count) as state:
        model = hooked(state, bucket_cap_mb=25)
        train(rank, model, 4)
        return flat(model), state.stats().sent_bytes


@pytest.mark.parametrize("topology", ["allgather", "sharded"])
def test_ranks_may_have_different_numbers_of_threads(topology):
    (one, alone), (other, _) = run_ranks(trained, 2, 1, topology)
    (two, shared), _ = run_ranks(trained, 2, 3, topology)
    assert torch.equal(one, other)
    assert torch.equal(one, two)
    assert alone == shared


def test_local_steps_have_the_same_bits():
    seen = []
    for count in (1, 3):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with LocalSteps(model, optimizer, SPEC, every=2, small_tensor_numel=16, threads=count):
            train_with(0, model, optimizer, 6)
            assert len(named()) == count - 1
        assert named() == []
        seen.append(flat(model))
    assert torch.equal(*seen)


def test_a_step_on_a_device_uses_the_thread_that_calls():
    """The pretended device is on in one thread only, as a stream of a device may be."""
    tensors, seen = [torch.randn(3000), torch.randn(40, 50)], []
    for count in (1, 2):
        with DeepReduceState(SPEC, threads=count) as state, PretendDevice():
            on_device = [tensor.to(DEVICE) for tensor in tensors]
            allreduce_(on_device, state)
            seen.append([tensor.held for tensor in on_device])
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_copies_use_as_many_threads(copied):
    with DeepReduceState(SPEC, threads=3) as state:
        allreduce_(gradients(0), state)
        with copied(state) as again:
            state.close()
            tensors, twins = gradients(1), gradients(1)
            allreduce_(twins, copy.deepcopy(state))
            allreduce_(tensors, again)
            assert len(again.reducer.threads) == 3
            assert all(torch.equal(one.to_dense(), other.to_dense()) for one, other in zip(tensors, twins, strict=True))


@pytest.mark.parametrize("wrong", [0, -2, 2.0, "4", None, True])
def test_what_is_no_number_of_threads_is_refused(wrong):
    with pytest.raises(dr.ConfigError, match=r"^threads is an int of at least"):
        DeepReduceState(SPEC, threads=wrong)
    model = network()
    with pytest.raises(dr.ConfigError, match=r"^threads is an int of at least"):
        LocalSteps(model, torch.optim.SGD(model.parameters()), SPEC, threads=wrong)
