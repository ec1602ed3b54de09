"""Local steps by fragments of the model: each is synchronized at steps of its own, and a sync of all of them ends as without fragments."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import deepreduce as dr
from deepreduce.torch import LocalSteps

from .ranks import run_ranks
from .tasks import flat, network
from .test_local_delay import RefusesOnce
from .test_local_steps import LOW_BITS, NESTEROV, SPARSE, adamw, loaded, same_on_all, saved, train


def in_fragments(rank, ways):
    """The anchor after steps between two syncs, and the anchor and the parameters after a sync."""
    found = []
    for spec, topology, outer, delay, memory in ways:
        model = network()
        optimizer = adamw(model)
        options = {"delay": delay, "fragments": 3, "topology": topology, "memory": memory, "small_tensor_numel": 16}
        with LocalSteps(model, optimizer, spec, 6, outer, **options) as local:
            train(rank, model, optimizer, 17)
            anchors = local.state_dict()["anchors"]
            local.sync()
            found.append((anchors, local.state_dict()["anchors"], flat(model), local.syncs))
    return found


WAYS = [
    (SPARSE, "allgather", None, 0, "residual"),
    (SPARSE, "server", None, 1, "parameters"),
    (SPARSE, "sharded", None, 5, "residual"),
    (LOW_BITS, "sharded", NESTEROV, 3, "residual"),
]


def test_all_ranks_have_the_same_anchors_and_after_a_sync_the_same_parameters():
    names = [name for name, _ in network().named_parameters()]
    for way, column in zip(WAYS, zip(*run_ranks(in_fragments, 3, WAYS, timeout=120), strict=True), strict=True):
        anchors, last_anchors, parameters, syncs = zip(*column, strict=True)
        assert all(sorted(each) == sorted(names) for each in anchors), way
        assert all(same_on_all([each[name] for each in anchors]) for name in names), way
        assert same_on_all(parameters), way
        assert torch.equal(parameters[0], torch.cat([last_anchors[0][name].reshape(-1) for name in names])), way
        assert syncs == (11, 11, 11), way  # after 2, 8, 14; after 4, 10, 16; after 6, 12; and all of them at last


def test_fragments_are_of_about_equal_size_and_take_turns():
    model = network()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, "dense", every=6, fragments=2) as local:
        moved = []
        for step in range(12):
            before = local.state_dict()["anchors"]
            train(0, model, optimizer, 1, start=step)
            anchors = local.state_dict()["anchors"]
            moved.append({name for name in before if not torch.equal(before[name], anchors[name])})
        assert repr(local) == "LocalSteps(dense, every 6, fragments 2, allgather)"
    first, second = moved[2], moved[5]
    assert first | second == set(sizes)
    assert not first & second
    assert abs(sum(sizes[name] for name in first) - sum(sizes[name] for name in second)) < max(sizes.values())
    assert [len(each) for each in moved] == [0, 0, len(first), 0, 0, len(second)] * 2
    assert moved[8:] == moved[2:6]


def averaged_by_hand(rank, steps):
    """Ours, and the mean of each of two fragments after steps of its own."""
    ours = network()
    optimizer = adamw(ours)
    with LocalSteps(ours, optimizer, "dense", every=4, fragments=2) as local:
        train(rank, ours, optimizer, steps)
        fragments = [part["names"] for part in local.state_dict()["fragments"]]
    model = network()
    optimizer, parameters = adamw(model), dict(model.named_parameters())
    for step in range(1, steps + 1):
        train(rank, model, optimizer, 1, start=step - 1)
        if step % 2 == 0:
            for name in fragments[(step // 2 - 1) % 2]:
                dist.all_reduce(parameters[name].data)
                parameters[name].data /= dist.get_world_size()
    return flat(ours), flat(model)


def test_each_fragment_is_averaged_after_steps_of_its_own():
    for ours, expected in run_ranks(averaged_by_hand, 2, 11):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_the_first_steps_synchronize_all_fragments():
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, "dense", every=4, warmup=3, delay=2, fragments=2) as local:
        train(0, model, optimizer, 3)
        assert local.syncs == 6
        train(0, model, optimizer, 6, start=3)  # exchanges begin after 2 and 4 more steps, and their means are applied 2 steps later
        assert local.syncs == 8


# A run that is interrupted


def started(delay, every=5):
    model = network()
    optimizer = adamw(model)
    options = {"delay": delay, "fragments": 3, "memory": "parameters", "small_tensor_numel": 16, "seed": 7}
    return model, optimizer, LocalSteps(model, optimizer, SPARSE, every, **options)


def interrupted_and_not(rank, delay, stop):
    """One run without a break, and one that goes on from a checkpoint of another."""
    model, optimizer, local = started(delay)
    with local:
        train(rank, model, optimizer, stop)
        checkpoint = saved(model=model, optimizer=optimizer, local=local)
        train(rank, model, optimizer, 20 - stop, start=stop)
        local.sync()
    resumed, optimizer, local = started(delay)
    with local:
        train(rank, resumed, optimizer, 4)
        loaded(checkpoint, resumed, optimizer, local)
        train(rank, resumed, optimizer, 20 - stop, start=stop)
        local.sync()
    return flat(model), flat(resumed)


def interrupted_at_all_steps(rank, delay):
    return [interrupted_and_not(rank, delay, stop) for stop in range(9, 15)]


@pytest.mark.parametrize("delay", [0, 2, 4])
def test_resuming_gives_the_same_bits(delay):
    for results in zip(*run_ranks(interrupted_at_all_steps, 2, delay, timeout=120), strict=True):
        assert all(torch.equal(straight, resumed) for straight, resumed in results)
        assert same_on_all([straight for straight, _ in results])


def of_equal_steps(rank, every, delay):
    """A model of zeros, and what takes steps that add one on rank 0 and two on rank 1."""
    model = torch.nn.Linear(4, 4)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def take(steps):
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0 - rank)
            optimizer.step()

    options = {"delay": delay, "fragments": 2, "memory": "parameters", "small_tensor_numel": 0}
    return model, optimizer, LocalSteps(model, optimizer, "topr:0.5/raw/raw", every, **options), take


def resumed_with_another_delay(rank):
    model, optimizer, local, take = of_equal_steps(rank, every=4, delay=3)
    with local:
        take(5)
        checkpoint = saved(model=model, optimizer=optimizer, local=local)
    model, optimizer, local, take = of_equal_steps(rank, every=12, delay=10)
    with local:
        loaded(checkpoint, model, optimizer, local)
        take(19)
    return flat(model)


def test_a_state_with_an_exchange_under_way_goes_on_with_another_delay():
    first, second = run_ranks(resumed_with_another_delay, 2)
    assert (first + second).tolist() == [24 * 3.0] * 20  # nothing is lost or sent twice


def buffers_that_were_kept(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, "dense", every=2, fragments=2, buffers="keep") as local:
        train(rank, model, optimizer, 3)
        checkpoint = saved(model=model, optimizer=optimizer, local=local)
    with LocalSteps(model, optimizer, "dense", every=2, fragments=2) as local:
        loaded(checkpoint, model, optimizer, local)
        train(rank, model, optimizer, 3, start=3)
        local.sync()
    return torch.cat([model[1].running_mean, model[1].running_var])


def test_buffers_that_were_kept_are_averaged_from_then_on():
    assert same_on_all(run_ranks(buffers_that_were_kept, 2))


def test_a_state_of_other_fragments_is_refused():
    model = network()
    with LocalSteps(model, adamw(model), SPARSE, every=4, fragments=2) as two:
        state = two.state_dict()
    with LocalSteps(model, adamw(model), SPARSE, every=4) as one, pytest.raises(dr.InputError, match="fragments=2, here it is 1"):
        one.load_state_dict(state)
    with LocalSteps(model, adamw(model), SPARSE, every=4, fragments=2) as two:
        for wrong in ({"names": []}, None, {**state["fragments"][0], "due_after": -1}):
            with pytest.raises(dr.DeepReduceError, match=r"a fragment in a state|due_after of a state"):
                two.load_state_dict({**state, "fragments": [state["fragments"][0], wrong]})


# Failures


def refused_once(rank, delay, fails_in_sync):
    """The parameters after an error that a loop ignored, and the steps that each fragment has counted."""
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, RefusesOnce(rank), 4, delay=delay, fragments=2, small_tensor_numel=16) as local:
        train(rank, model, optimizer, 2 if fails_in_sync else 1)
        fails = local.sync if fails_in_sync else partial(train, rank, model, optimizer, 3, start=1)
        with pytest.raises(dr.InputError if rank == 1 else dr.PeerError, match="this rank refuses"):
            fails()
        steps = {fragment.training.all_steps for fragment in local._fragments}
        local.sync()
    return flat(model), local.state_dict()["anchors"], steps


@pytest.mark.parametrize(("delay", "fails_in_sync"), [(0, False), (1, True), (1, False), (3, True)])
def test_after_an_error_a_sync_brings_all_ranks_together(delay, fails_in_sync):
    results = run_ranks(refused_once, 2, delay, fails_in_sync)
    parameters, anchors, steps = zip(*results, strict=True)
    assert same_on_all(parameters)
    assert torch.equal(parameters[0], torch.cat([anchors[0][name].reshape(-1) for name, _ in network().named_parameters()]))
    assert steps[0] == steps[1]
    assert len(steps[0]) == 1


# Numbers of fragments, and parameters that come later


@pytest.mark.parametrize(("fragments", "every"), [(0, 4), (5, 4), (7, 10), (-1, 4), (1.5, 4), (True, 4)])
def test_other_numbers_of_fragments_are_refused(fragments, every):
    model = network()
    with pytest.raises(dr.DeepReduceError, match="fragments"):
        LocalSteps(model, adamw(model), SPARSE, every=every, fragments=fragments)


def with_later_parameters(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=3e-3)
    with LocalSteps(model, optimizer, "dense", every=4, delay=3, fragments=2, outer=partial(torch.optim.SGD, lr=1.0)) as local:
        train(rank, model, optimizer, 5)
        model[2].requires_grad_(True)  # while an exchange is under way
        train(rank, model, optimizer, 6, start=5)
        local.sync()
        parts = [part["names"] for part in local.state_dict()["fragments"]]
    return flat(model), model[1].running_var.clone(), sorted(name for names in parts for name in names)


def test_parameters_and_buffers_that_come_later_join_a_fragment():
    parameters, buffers, names = zip(*run_ranks(with_later_parameters, 2), strict=True)
    assert same_on_all(parameters)
    assert same_on_all(buffers)
    assert names[0] == names[1] == ["0.bias", "0.weight", "1.running_mean", "1.running_var", "2.bias", "2.weight"]
