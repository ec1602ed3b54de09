"""Local steps with `delay`: the exchange runs beside training; ranks share the anchor, and all parameters after a sync."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import deepreduce as dr
from deepreduce.step.transport import SingleRank
from deepreduce.torch import LocalSteps

from .ranks import run_ranks, watch_ranks
from .tasks import flat, network
from .test_local_steps import LOW_BITS, NESTEROV, SPARSE, adamw, die, loaded, same_on_all, saved, train


def flat_anchor(local):
    return torch.cat([anchor.reshape(-1) for anchor in local.state_dict()["anchors"].values()])


# Agreement


def delayed(rank, ways):
    """The anchor and the parameters after 18 steps, when an exchange was applied, and the parameters after a sync."""
    found = []
    for spec, topology, outer in ways:
        model = network()
        optimizer = adamw(model)
        with LocalSteps(model, optimizer, spec, 6, outer, delay=4, topology=topology, small_tensor_numel=16) as local:
            train(rank, model, optimizer, 16)
            before = flat_anchor(local), flat(model)
            train(rank, model, optimizer, 4, start=16)
            local.sync()
            found.append((*before, flat_anchor(local), flat(model), local.syncs))
    return found


WAYS = [(SPARSE, "allgather", None), (SPARSE, "server", None), (SPARSE, "sharded", None), (LOW_BITS, "sharded", NESTEROV)]


def test_all_ranks_have_the_same_anchor_and_after_a_sync_the_same_parameters():
    for column in zip(*run_ranks(delayed, 3, WAYS, timeout=120), strict=True):
        anchors, parameters, last_anchors, last_parameters, syncs = zip(*column, strict=True)
        assert same_on_all(anchors)
        assert not same_on_all(parameters)
        assert same_on_all(last_parameters)
        assert torch.equal(last_anchors[0], last_parameters[0])
        assert not torch.equal(anchors[0], last_anchors[0])
        assert syncs == (4, 4, 4)  # after steps 6, 12 and 18, and the last one


def by_hand(rank, every, delay, steps, outer):
    """Dense changes, whose mean moves the anchor some steps after they were made."""
    model = network()
    optimizer, parameters, values = adamw(model), list(model.parameters()), []
    anchors = [parameter.detach().clone() for parameter in parameters]
    move = outer(anchors)
    for step in range(1, steps + 1):
        train(rank, model, optimizer, 1, start=step - 1)
        if values and step % every == delay:
            move.step()
            for parameter, anchor, value in zip(parameters, anchors, values, strict=True):
                parameter.data.copy_(anchor + (parameter.data - value))
        if step % every == 0:
            values = [parameter.detach().clone() for parameter in parameters]
            for anchor, value in zip(anchors, values, strict=True):
                anchor.grad = anchor - value
                dist.all_reduce(anchor.grad)
                anchor.grad /= dist.get_world_size()
    return flat(model)


def beside_by_hand(rank, steps):
    found = []
    applied, stepped = partial(torch.optim.SGD, lr=1.0), partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    for outer in (None, stepped):
        model = network()
        optimizer = adamw(model)
        with LocalSteps(model, optimizer, "dense", 5, outer, delay=2):
            train(rank, model, optimizer, steps)
        found.append((flat(model), by_hand(rank, 5, 2, steps, outer or applied)))
    return found


def test_the_mean_is_applied_after_so_many_steps():
    for results in run_ranks(beside_by_hand, 2, 23):
        for ours, expected in results:
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


class Held(SingleRank):
    """A transport that waits until it is let go."""

    def __init__(self):
        self.go, self.arrived = threading.Event(), threading.Event()

    def all_gather(self, frame, tag):
        self.arrived.set()
        if tag.description.startswith("the digests"):
            return super().all_gather(frame, tag)
        assert self.go.wait(30)
        return super().all_gather(frame, tag)


def held(every, delay):
    model = network()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, SPARSE, every, delay=delay, small_tensor_numel=16)
    local._transport = Held()
    return model, optimizer, local


def test_training_goes_on_beside_the_exchange():
    model, optimizer, local = held(every=4, delay=3)
    train(0, model, optimizer, 6)
    assert local.syncs == 0
    before = flat_of_anchors(local)
    timer = threading.Timer(0.2, local.transport.go.set)
    timer.start()
    train(0, model, optimizer, 1, start=6)  # waits for it
    assert local.transport.go.is_set()
    assert local.syncs == 1
    assert not torch.equal(before, flat_of_anchors(local))
    local.close()


def flat_of_anchors(local):
    """The anchors, without waiting for an exchange."""
    return torch.cat([torch.as_tensor(anchor).reshape(-1) for anchor in local._fragments[0].training.anchors.values()])


def test_closing_waits_for_the_exchange_and_leaves_the_parameters():
    model, optimizer, local = held(every=2, delay=1)
    train(0, model, optimizer, 2)
    before = flat(model)
    threading.Timer(0.2, local.transport.go.set).start()
    local.close()
    assert local.transport.go.is_set()
    assert torch.equal(before, flat(model))
    assert not any("deepreduce exchange" in thread.name for thread in threading.enumerate())
    train(0, model, optimizer, 2, start=2)
    assert local.syncs == 0


# Buffers and parameters that come later


def with_buffers(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=3e-3)
    with LocalSteps(model, optimizer, "dense", every=4, delay=2, outer=partial(torch.optim.SGD, lr=1.0)) as local:
        train(rank, model, optimizer, 5)
        model[2].requires_grad_(True)  # while an exchange is under way
        train(rank, model, optimizer, 1, start=5)
        means = model[1].running_mean.clone()
        train(rank, model, optimizer, 3, start=6)
        local.sync()
    return means, flat(model), model[1].running_var.clone()


def test_buffers_become_their_mean_and_parameters_may_come_while_an_exchange_is_under_way():
    for column in zip(*run_ranks(with_buffers, 2), strict=True):
        assert same_on_all(column)


def test_bfloat16_stays_where_nothing_changes():
    model = network(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = flat(model)
    with LocalSteps(model, optimizer, "dense", every=2, delay=1):
        for _ in range(5):
            model(torch.ones(1, 20, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
    assert torch.equal(before, flat(model))


# A run that is interrupted


def started(topology):
    model = network()
    optimizer = adamw(model)
    spec, outer = (SPARSE, None) if topology == "sharded" else (LOW_BITS, NESTEROV)
    return model, optimizer, LocalSteps(model, optimizer, spec, 5, outer, delay=3, topology=topology, small_tensor_numel=16, seed=7)


def interrupted_and_not(rank, topology, stop):
    """One run without a break, one that writes a checkpoint in between, and one that goes on from it."""
    runs = []
    for interrupted in (False, True):
        model, optimizer, local = started(topology)
        train(rank, model, optimizer, stop)
        checkpoint = saved(model=model, optimizer=optimizer, local=local) if interrupted else b""
        train(rank, model, optimizer, 20 - stop, start=stop)
        local.sync()
        runs.append(flat(model))
    model, optimizer, local = started(topology)
    train(rank, model, optimizer, 5)  # an exchange that loading a checkpoint drops
    loaded(checkpoint, model, optimizer, local)
    train(rank, model, optimizer, 20 - stop, start=stop)
    local.sync()
    return [*runs, flat(model)]


def interrupted_in_all_topologies(rank):
    return [interrupted_and_not(rank, topology, stop) for topology, stop in (("allgather", 10), ("server", 12), ("sharded", 14))]


def test_resuming_in_the_middle_of_an_exchange_gives_the_same_bits():
    for results in zip(*run_ranks(interrupted_in_all_topologies, 2, timeout=120), strict=True):
        for straight, interrupted, resumed in results:
            assert torch.equal(straight, interrupted)
            assert torch.equal(straight, resumed)
        assert same_on_all([straight for straight, *_ in results])


def test_a_foreign_pending_state_is_refused():
    model, optimizer, local = started("allgather")
    train(0, model, optimizer, 6)
    state = local.state_dict()
    [fragment] = state["fragments"]
    assert set(fragment["pending"]) == {"means", "values"}
    for wrong, why in (
        ({"means": {}}, "has the keys means, values"),
        ({**fragment["pending"], "values": {"other": torch.ones(2)}}, "the state has other, which"),
    ):
        with pytest.raises(dr.InputError, match=why):
            local.load_state_dict({**state, "fragments": [{**fragment, "pending": wrong}]})
    local.close()


# Failures


def killed_beside_training(rank):
    model = network()
    optimizer = adamw(model)
    LocalSteps(model, optimizer, SPARSE, 4, delay=2, small_tensor_numel=16, timeout=timedelta(seconds=10))
    train(rank, model, optimizer, 7)
    if rank == 1:
        die()
    train(rank, model, optimizer, 2, start=7)  # the exchange begins, and fails, beside these
    train(rank, model, optimizer, 1, start=9)


def test_a_killed_rank_makes_the_others_raise_where_the_mean_would_be_applied():
    outcomes = watch_ranks(killed_beside_training, 3, timeout=40)
    assert not outcomes[1].alive
    for outcome in (outcomes[0], outcomes[2]):
        assert "PeerError" in outcome.error
        assert "a peer failed, is gone or is too slow" in outcome.error
        assert "start=9" in outcome.error


class RefusesOnce:
    """A policy that fails in the first sync of rank 1."""

    def __init__(self, rank):
        self.left = 1 if rank == 1 else 0

    def codec_for(self, name, source):
        if self.left:
            self.left -= 1
            raise dr.InputError("this rank refuses")
        return dr.parse(SPARSE)


def refused_once(rank):
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, RefusesOnce(rank), 4, delay=2) as local:
        train(rank, model, optimizer, 5)
        with pytest.raises(dr.InputError if rank == 1 else dr.PeerError, match="this rank refuses"):
            train(rank, model, optimizer, 1, start=5)
        train(rank, model, optimizer, 5, start=6)
        local.sync()
        return flat(model), local.syncs


def test_a_rank_that_cannot_encode_tells_the_others_and_they_go_on():
    results = run_ranks(refused_once, 2)
    assert same_on_all([parameters for parameters, _ in results])
    assert [syncs for _, syncs in results] == [2, 2]


def diverging(rank):
    model = network()
    optimizer = adamw(model)
    LocalSteps(model, optimizer, SPARSE, every=3, delay=1, small_tensor_numel=16, timeout=timedelta(seconds=10))
    train(rank, model, optimizer, 2)
    if rank == 1:
        model[2].weight.data[3, 4] = float("nan")
    train(rank, model, optimizer, 2, start=2)


def test_a_rank_that_diverged_is_told_of_on_all():
    for outcome in watch_ranks(diverging, 2, timeout=30):
        assert "is not finite on some rank after 3 local steps" in outcome.error


@pytest.mark.parametrize(("every", "delay"), [(1, 1), (5, 5), (5, -1)])
def test_a_delay_is_below_every(every, delay):
    model = network()
    with pytest.raises(dr.ConfigError, match="delay"):
        LocalSteps(model, adamw(model), SPARSE, every, delay=delay)
