"""Restarts with another number of ranks: training goes on, and the sum of all residuals stays."""

import io

import pytest
import torch

from deepreduce.step.topology import Sharded
from deepreduce.torch import DeepReduceState, reshard

from .ranks import run_ranks
from .tasks import flat, hooked, train

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
