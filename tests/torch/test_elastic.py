"""Restarts with another number of ranks: training goes on, and the sum of all residuals stays."""

import io
from functools import partial

import pytest
import torch

from deepreduce.step.topology import Sharded
from deepreduce.torch import DeepReduceState, LocalSteps, reshard

from .ranks import run_ranks
from .tasks import flat, hooked, network, train, train_with

SPEC = "topr:0.05/rice/qsgd"


def state_of(topology):
    return DeepReduceState(SPEC, topology=topology, small_tensor_numel=16)


def first_part(rank, topology):
    state = state_of(topology)
    model = hooked(state, bucket_cap_mb=25)
    train(rank, model, 4)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "deepreduce": state.state_dict()}, file)
    return file.getvalue()


def second_part(rank, topology, checkpoints, ranks):
    loaded = [torch.load(io.BytesIO(file), weights_only=True) for file in checkpoints]
    state = state_of(topology)
    model = hooked(state, bucket_cap_mb=25)
    model.module.load_state_dict(loaded[0]["model"])
    state.load_state_dict(reshard([each["deepreduce"] for each in loaded], ranks)[rank])
    restarted = state.state_dict()
    train(rank, model, 4, start=4)
    return restarted, flat(model), state.step


def total(states, table):
    """The sum of all residuals by name; ranges that ranks own are put where they belong."""
    sums = {}
    for state in states:
        for name, held in state[table]["residuals"].items():
            whole = torch.zeros(state["numels"].get(name, held.numel()) if table == "owned" else held.numel(), dtype=torch.float64)
            if table == "owned" and state["topology"] == "sharded":
                low, high = Sharded().owned_range(name, whole.numel(), state["rank"], state["ranks"])
                whole[low:high] += held.reshape(-1)
            else:
                whole += held.reshape(-1)
            sums[name] = sums.get(name, 0) + whole
    return sums


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4)])
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_training_goes_on_with_another_number_of_ranks(topology, before, after):
    checkpoints = run_ranks(first_part, before, topology)
    results = run_ranks(second_part, after, topology, checkpoints, after)
    old = [torch.load(io.BytesIO(file), weights_only=True)["deepreduce"] for file in checkpoints]
    new = [restarted for restarted, _, _ in results]
    for table in ("memory", "owned"):
        expected, found = total(old, table), total(new, table)
        assert set(found) == set(expected)
        for name, whole in expected.items():
            torch.testing.assert_close(found[name], whole, rtol=1e-6, atol=1e-7)
    assert bool(total(old, "memory"))
    assert bool(total(old, "owned")) == (topology != "allgather")
    assert all(torch.equal(parameters, results[0][1]) for _, parameters, _ in results)
    assert {step for _, _, step in results} == {8}


def test_states_of_some_ranks_are_refused():
    state = DeepReduceState(SPEC).state_dict()
    with pytest.raises(ValueError, match="need the states of all ranks of one run, got ranks \\[0, 0\\]"):
        reshard([state, state], 3)
    with pytest.raises(ValueError, match="this is rank 0 of 1: `reshard` makes"):
        DeepReduceState(SPEC).load_state_dict({**state, "rank": 1, "ranks": 2})


def local_steps(model, topology):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
    return optimizer, LocalSteps(model, optimizer, "none/all/lloyd:2", 3, outer, topology=topology, small_tensor_numel=16)


def first_local_part(rank, topology):
    model = network()
    optimizer, local = local_steps(model, topology)
    train_with(rank, model, optimizer, 4)
    between = local.state_dict()
    local.sync()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}, file)
    return file.getvalue(), between


def second_local_part(rank, topology, checkpoints, ranks):
    loaded = [torch.load(io.BytesIO(file), weights_only=True) for file in checkpoints]
    model = network()
    optimizer, local = local_steps(model, topology)
    model.load_state_dict(loaded[0]["model"])
    optimizer.load_state_dict(loaded[rank % len(loaded)]["optimizer"])
    local.load_state_dict(reshard([each["local"] for each in loaded], ranks)[rank])
    restarted = local.state_dict()["exchange"]
    train_with(rank, model, optimizer, 3, start=4)
    return restarted, flat(model), local.syncs


@pytest.mark.parametrize(("topology", "before", "after"), [("allgather", 3, 2), ("sharded", 2, 3)])
def test_local_steps_go_on_with_another_number_of_ranks(topology, before, after):
    checkpoints, between = zip(*run_ranks(first_local_part, before, topology), strict=True)
    results = run_ranks(second_local_part, after, topology, checkpoints, after)
    old = [torch.load(io.BytesIO(file), weights_only=True)["local"]["exchange"] for file in checkpoints]
    for table in ("memory", "owned"):
        expected, found = total(old, table), total([restarted for restarted, _, _ in results], table)
        assert set(found) == set(expected)
        for name, whole in expected.items():
            torch.testing.assert_close(found[name], whole, rtol=1e-6, atol=1e-7)
    assert bool(total(old, "memory"))
    assert all(torch.equal(parameters, results[0][1]) for _, parameters, _ in results)
    assert {syncs for _, _, syncs in results} == {3}
    with pytest.raises(ValueError, match="state 0 was saved between two syncs"):
        reshard(between, after)
    with pytest.raises(ValueError, match=r"state 1 is not one of LocalSteps"):
        reshard([torch.load(io.BytesIO(checkpoints[0]), weights_only=True)["local"], old[1]], after)
