"""Local steps: all ranks sync to the same bits, whatever the optimizer, and a run goes on after interruptions and failures as it must."""

import io
import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepreduce import InputError, PeerError, parse
from deepreduce.torch import DeepReduceState, LocalSteps, ResidualMemory, Schedule, noop_hook

from .ranks import run_ranks, watch_ranks
from .tasks import batch, flat, network
from .tasks import train_with as train

SPARSE, LOW_BITS = "topr:0.05/rice/qsgd", "none/all/lloyd:2"
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def same_on_all(results):
    return all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("every", [1, 3])
def test_a_schedule_counts_the_steps_of_the_optimizer(every):
    model = network()
    optimizer = adamw(model)
    sizes = []
    with LocalSteps(model, optimizer, Schedule("topr:0.01/raw/raw", 2 * every, start=0.5), every, small_tensor_numel=0) as local:
        for sync in range(3):
            train(0, model, optimizer, every, start=every * sync)
            sizes.append(local.stats().last.message_bytes)
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]
    assert local.stats().last.step == 3 * every - 1


# Agreement


def trained(rank, ways, steps):
    found = []
    for spec, topology, every, outer in ways:
        model = network()
        optimizer = adamw(model)
        with LocalSteps(model, optimizer, spec, every, outer, topology=topology, small_tensor_numel=16) as local:
            train(rank, model, optimizer, steps)
            found.append((flat(model), local.syncs, local.stats().sent_bytes))
    return found


WAYS = [
    (SPARSE, "allgather", 1, None),
    (SPARSE, "server", 1, None),
    (SPARSE, "sharded", 1, None),
    (LOW_BITS, "allgather", 30, NESTEROV),
    (LOW_BITS, "server", 30, NESTEROV),
    (LOW_BITS, "sharded", 30, NESTEROV),
]


def test_all_ranks_hold_the_same_bits_after_a_meeting():
    steps = 60
    results = run_ranks(trained, 3, WAYS, steps, timeout=240)
    for (_, topology, every, _), column in zip(WAYS, zip(*results, strict=True), strict=True):
        assert same_on_all([parameters for parameters, _, _ in column]), (topology, every)
        parameters, syncs, sent_bytes = column[0]
        assert syncs == steps // every
        assert sent_bytes > 0
        assert bool(torch.isfinite(parameters).all())
        assert not torch.equal(parameters, flat(network()))


def beside_averaging_by_hand(rank):
    """Dense changes at every step, and the mean of all parameters by allreduce."""
    models = [network(), network()]
    optimizers = [adamw(model) for model in models]
    with LocalSteps(models[0], optimizers[0], "dense"):
        train(rank, models[0], optimizers[0], 20)
    for step in range(20):
        train(rank, models[1], optimizers[1], 1, start=step)
        for parameter in models[1].parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
    return flat(models[0]), flat(models[1])


def test_dense_changes_are_the_mean_of_the_parameters():
    for by_local_steps, by_hand in run_ranks(beside_averaging_by_hand, 3):
        torch.testing.assert_close(by_local_steps, by_hand, rtol=0, atol=1e-6)


def between_meetings(rank):
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE, every=10, small_tensor_numel=16) as local:
        train(rank, model, optimizer, 5)
        apart = flat(model)
        local.sync()
        together = flat(model)
        local.sync()
        return apart, together, flat(model), local.syncs


def test_ranks_meet_when_they_are_told_to():
    results = run_ranks(between_meetings, 2)
    assert not same_on_all([apart for apart, _, _, _ in results])
    assert same_on_all([together for _, together, _, _ in results])
    for _, together, after, syncs in results:
        assert torch.equal(together, after)
        assert syncs == 1


def with_uneven_data(rank, steps, every, topology):
    """A rank takes its own number of steps, and then syncs with the others."""
    model = network()
    optimizer = adamw(model)
    timeout = timedelta(seconds=20)
    with LocalSteps(model, optimizer, SPARSE, every=every, small_tensor_numel=16, topology=topology, timeout=timeout) as local:
        train(rank, model, optimizer, steps[rank])
        local.sync()
        return flat(model)


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_ranks_that_took_more_steps_than_others_are_told(topology):
    """Rank 0 has synchronized after 4 and 8 steps; rank 1 comes to its second sync after 6."""
    outcomes = watch_ranks(with_uneven_data, 2, (8, 6), 4, topology)
    assert all("PeerError: rank" in outcome.error for outcome in outcomes)
    assert any("is at step 5 in" in outcome.error and "uneven data?" in outcome.error for outcome in outcomes)


def under_ddp_that_goes_on(rank):
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE, every=2), pytest.warns(UserWarning, match="give LocalSteps the DDP model"):
        train(rank, parallel, optimizer, 2)


def test_gradients_that_ddp_has_averaged_are_warned_of():
    run_ranks(under_ddp_that_goes_on, 2)


def test_a_sync_after_the_end_is_refused():
    model = network()
    local = LocalSteps(model, adamw(model), SPARSE)
    local.close()
    with pytest.raises(ValueError, match=r"call sync\(\) before close\(\)"):
        local.sync()


def test_the_model_comes_first():
    model = network()
    with pytest.raises(ValueError, match="the model first"):
        LocalSteps(adamw(model), model, SPARSE)


def test_bytes_are_compared_with_a_gradient_in_every_step():
    model = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(5))
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, "dense", every=3, small_tensor_numel=16) as local:
        for _ in range(6):
            model(torch.randn(5, 20)).sum().backward()
            optimizer.step()
        last = local.stats().last
        assert (last.dense_bytes, local.stats().dense_bytes) == (3 * gradient_bytes, 6 * gradient_bytes)
        assert last.parameters["1.weight"].dense_bytes == 3 * 4 * 5
        assert last.ratio == pytest.approx(3, rel=0.2)


def losses_of_adam(rank):
    """The mean loss at the end of training by the recipe, and alone."""
    found = []
    for recipe in ("adam", None):
        model = network()
        optimizer = adamw(model)
        local = LocalSteps(model, optimizer, recipe=recipe, small_tensor_numel=16) if recipe else None
        found.append(sum(train(rank, model, optimizer, 300)[-100:]) / 100)
        if local is not None:
            found.append(local.stats().dense_bytes / local.stats().message_bytes)
            local.close()
    return found


def test_the_recipe_for_adam_learns_from_all_ranks():
    for recipe, ratio, alone in run_ranks(losses_of_adam, 4, timeout=120):
        assert recipe < 0.95 * alone
        assert ratio > 100


@pytest.mark.parametrize("bytes_per_step", [90, 350, 10**6])
@pytest.mark.parametrize("spec", [LOW_BITS, SPARSE, Schedule(SPARSE, 1)])
def test_syncs_are_as_frequent_as_the_bytes_allow(spec, bytes_per_step):
    model = network(width=200)
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, spec, bytes_per_step=bytes_per_step, small_tensor_numel=16) as local:
        train(0, model, optimizer, 2 * local.every)
        taken = local.stats().last.message_bytes / local.every
        assert taken == pytest.approx(bytes_per_step, rel=0.1) if local.every > 1 else taken < bytes_per_step


# The outer optimizer


def with_outer(rank, given):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) if given else partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    with LocalSteps(model, optimizer, "dense", every=2, outer=outer):
        train(rank, model, optimizer, 4)
    gradients_kept = all(parameter.grad is not None for parameter in model.parameters())

    by_hand = network()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    outer = torch.optim.SGD(by_hand.parameters(), lr=0.5, momentum=0.9)
    for start in (0, 2):
        anchors = [parameter.detach().clone() for parameter in by_hand.parameters()]
        train(rank, by_hand, optimizer, 2, start=start)
        for parameter, anchor in zip(by_hand.parameters(), anchors, strict=True):
            change = anchor - parameter.detach()
            dist.all_reduce(change)
            parameter.data.copy_(anchor)
            parameter.grad = change / dist.get_world_size()
        outer.step()
    return flat(model), flat(by_hand), gradients_kept


def with_outer_made_and_given(rank):
    return [with_outer(rank, given) for given in (False, True)]


def test_the_outer_optimizer_steps_with_the_mean_change():
    for ours, by_hand, gradients_kept in (found for results in run_ranks(with_outer_made_and_given, 2) for found in results):
        torch.testing.assert_close(ours, by_hand, rtol=0, atol=1e-6)
        assert gradients_kept


def test_a_sparse_spec_with_outer_momentum_is_warned_of():
    model = network()
    with pytest.warns(UserWarning, match="outer momentum overshoots with the sparse spec topr"):
        LocalSteps(model, adamw(model), SPARSE, every=30, outer=NESTEROV)
    LocalSteps(model, adamw(model), LOW_BITS, every=30, outer=NESTEROV)
    LocalSteps(model, adamw(model), SPARSE, every=30, outer=partial(torch.optim.SGD, lr=0.7))


def test_an_outer_optimizer_has_all_parameters():
    model = network()
    with pytest.raises(ValueError, match=r"outer optimizer does not have the parameter 2\.weight"):
        LocalSteps(model, adamw(model), "dense", outer=torch.optim.SGD(list(model.parameters())[:2], lr=1.0))


# What belongs to a model beside trained parameters


def with_buffers(rank, buffers):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE, every=3, buffers=buffers, small_tensor_numel=1):
        train(rank, model, optimizer, 3)
    norm = model[1]
    return norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)


def with_buffers_kept_and_averaged(rank):
    return with_buffers(rank, "keep"), with_buffers(rank, "mean")


def with_a_mask_of_infinities(rank):
    torch.manual_seed(0)
    model = network()
    model.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE, every=2) as local:
        for _ in range(4):
            model(torch.randn(8, 20)).sum().backward()
            optimizer.step()
        return local.syncs, model.mask


def test_a_mask_of_infinities_is_no_divergence():
    for syncs, mask in run_ranks(with_a_mask_of_infinities, 2):
        assert syncs == 2
        assert torch.equal(mask, torch.triu(torch.full((4, 4), float("-inf")), 1))


def test_a_buffer_that_grows_is_named():
    model = network()
    model.register_buffer("table", torch.arange(10.0))
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE):
        train(0, model, optimizer, 1)
        model.table = torch.arange(20.0)
        with pytest.raises(InputError, match=r"'table' is float32 of shape \(20,\), but its residual is float32 of shape \(10,\)"):
            train(0, model, optimizer, 1)


def test_an_optimizer_takes_local_steps_once():
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE), pytest.raises(ValueError, match="takes local steps already"):
        LocalSteps(model, optimizer, SPARSE)
    LocalSteps(model, optimizer, SPARSE).close()


def test_buffers_are_averaged_or_kept():
    kept, averaged = zip(*run_ranks(with_buffers_kept_and_averaged, 2), strict=True)
    for index in (0, 1):
        own = [result[index] for result in kept]
        assert not torch.equal(*own)
        for result in averaged:
            torch.testing.assert_close(result[index], sum(own) / 2, rtol=0, atol=1e-6)
    assert same_on_all([result[0] for result in averaged])
    assert [result[2] for result in averaged] == [3, 3]


def with_frozen_parameters(rank):
    """The first layer is frozen until step 4; the last one is given to the optimizer in step 8."""
    model = network()
    model[0].requires_grad_(False)
    first = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=3e-3)
    local = LocalSteps(model, optimizer, SPARSE, every=2, outer=partial(torch.optim.SGD, lr=0.9), small_tensor_numel=16)
    train(rank, model, optimizer, 4)
    frozen = torch.equal(first, model[0].weight)
    model[0].requires_grad_(True)
    train(rank, model, optimizer, 4, start=4)
    last = model[4].weight.detach().clone()
    optimizer.add_param_group({"params": model[4].parameters()})
    train(rank, model, optimizer, 4, start=8)
    local.close()
    return flat(model), frozen, torch.equal(first, model[0].weight), torch.equal(last, model[4].weight)


def test_parameters_may_be_frozen_and_come_later():
    results = run_ranks(with_frozen_parameters, 2)
    assert same_on_all([result[0] for result in results])
    for _, *states in results:
        assert states == [True, False, False]


def test_outer_momentum_leaves_frozen_parameters_where_they_are():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(model, optimizer, "dense", outer=NESTEROV) as local:
        train(0, model, optimizer, 3)
        local.sync()
        model[0].requires_grad_(False)
        frozen, free = model[0].weight.clone(), model[2].weight.clone()
        train(0, model, optimizer, 3)
        assert torch.equal(frozen, model[0].weight)
        assert not torch.equal(free, model[2].weight)


def test_a_state_with_a_parameter_that_was_frozen_since_is_loaded():
    def trained(model, optimizer, local, start):
        train(0, model, optimizer, 3, start=start)
        local.sync()
        return flat(model)

    def made(frozen):
        model = network()
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, LocalSteps(model, optimizer, SPARSE, every=2, small_tensor_numel=16)

    model, optimizer, local = made(frozen=False)
    trained(model, optimizer, local, 0)
    model[0].requires_grad_(False)
    trained(model, optimizer, local, 3)
    saved_model, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, local.state_dict()
    expected = trained(model, optimizer, local, 6)
    resumed_model, resumed_optimizer, resumed = made(frozen=True)
    resumed_model.load_state_dict(saved_model)
    resumed.load_state_dict(state)
    assert torch.equal(trained(resumed_model, resumed_optimizer, resumed, 6), expected)


def test_an_outer_optimizer_needs_more_than_half_precision():
    model = network(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 or float64, and 0.weight is torch.bfloat16"):
        LocalSteps(model, adamw(model), "dense", outer=NESTEROV)


def test_an_optimizer_that_only_wraps_another_is_refused():
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

    model = network()
    with pytest.raises(ValueError, match="got Wrapping: where it wraps another one, give that"):
        LocalSteps(model, Wrapping(adamw(model)), SPARSE)


def test_bfloat16_goes_on_from_the_rounded_parameters():
    model = network(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = flat(model)
    with LocalSteps(model, optimizer, "dense") as local:
        for _ in range(3):
            model(torch.ones(1, 20, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        assert local.stats().last.message_bytes < 200  # nothing changed: nothing is sent
    assert torch.equal(before, flat(model))


def test_a_compiled_model_has_the_names_of_the_model():
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = adamw(compiled)
    local = LocalSteps(compiled, optimizer, SPARSE, small_tensor_numel=16)
    train(0, compiled, optimizer, 1)
    assert set(local.state_dict()["anchors"]) == {name for name, _ in model.named_parameters()}
    local.close()


def test_steps_that_a_scaler_skips_count():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    local = LocalSteps(model, optimizer, SPARSE, every=2, small_tensor_numel=16, scaler=scaler)
    for step in range(6):
        inputs, targets = batch(0, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert local.syncs == 3
    local.close()
    assert "step" not in vars(scaler)


# Warm-up


def warming_up(rank, delay):
    """The syncs after every step, with a checkpoint that another run goes on from in mid-warm-up, and the parameters of both."""
    model = network()
    optimizer, syncs = adamw(model), []
    local = LocalSteps(model, optimizer, LOW_BITS, 4, warmup=3, delay=delay, small_tensor_numel=16)
    for step in range(12):
        train(rank, model, optimizer, 1, start=step)
        syncs.append(local.syncs)
        if step == 1:
            checkpoint = saved(model=model, optimizer=optimizer, local=local)
    local.sync()

    again = network()
    again_optimizer = adamw(again)
    again_local = LocalSteps(again, again_optimizer, LOW_BITS, 4, warmup=3, delay=delay, small_tensor_numel=16)
    loaded(checkpoint, again, again_optimizer, again_local)
    train(rank, again, again_optimizer, 10, start=2)
    again_local.sync()
    return syncs, flat(model), flat(again)


@pytest.mark.parametrize(("delay", "expected"), [(0, [1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5]), (2, [1, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4])])
def test_the_steps_of_the_warmup_each_end_with_a_sync(delay, expected):
    results = run_ranks(warming_up, 2, delay)
    for syncs, straight, resumed in results:
        assert syncs == expected
        assert torch.equal(straight, resumed)
    assert same_on_all([straight for _, straight, _ in results])


def test_the_outer_optimizer_waits_for_the_end_of_the_warmup():
    found = []
    for outer in (None, NESTEROV):
        model = network()
        optimizer = adamw(model)
        with LocalSteps(model, optimizer, LOW_BITS, 2, outer, warmup=3) as local:
            train(0, model, optimizer, 3)
            found.append(flat(model))
            train(0, model, optimizer, 2, start=3)
            found.append(flat(model))
            assert local.syncs == 4
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[1], found[3])


# A run that is interrupted


def saved(**parts):
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return file.getvalue()


def loaded(checkpoint, *parts):
    for part, state in zip(parts, torch.load(io.BytesIO(checkpoint), weights_only=True).values(), strict=True):
        part.load_state_dict(state)


def started(topology, **options):
    model = network()
    optimizer = adamw(model)
    spec, outer = (Schedule(SPARSE, 6), None) if topology == "sharded" else (LOW_BITS, NESTEROV)
    local = LocalSteps(model, optimizer, spec, 4, outer, topology=topology, small_tensor_numel=16, seed=7, **options)
    return model, optimizer, local


def interrupted_and_not(rank, topology):
    model, optimizer, local = started(topology)
    train(rank, model, optimizer, 10)
    checkpoint = saved(model=model, optimizer=optimizer, local=local)
    train(rank, model, optimizer, 10, start=10)

    again, again_optimizer, again_local = started(topology)
    loaded(checkpoint, again, again_optimizer, again_local)
    train(rank, again, again_optimizer, 10, start=10)
    return flat(model), flat(again), local.syncs, again_local.syncs


def interrupted_in_all_topologies(rank):
    return [interrupted_and_not(rank, topology) for topology in ("allgather", "server", "sharded")]


def test_resuming_between_meetings_gives_the_same_bits():
    for results in zip(*run_ranks(interrupted_in_all_topologies, 2, timeout=120), strict=True):
        for straight, resumed, *syncs in results:
            assert torch.equal(straight, resumed)
            assert syncs == [5, 5]
        assert same_on_all([straight for straight, *_ in results])


def test_a_foreign_state_is_refused():
    model, optimizer, local = started("allgather")
    train(0, model, optimizer, 3)
    state = local.state_dict()
    refused = [
        ({"steps": 1}, "has the keys anchors, exchange, fragments, outer"),
        ({**state, "outer": None}, "made without an outer optimizer"),
        ({**state, "anchors": {"other": torch.ones(2)}}, "the state has other, which"),
        ({**state, "exchange": {**state["exchange"], "seed": 8}}, "seed 8"),
    ]
    for wrong, why in refused:
        with pytest.raises(ValueError, match=why):
            local.load_state_dict(wrong)
    assert local.state_dict()["fragments"][0]["steps"] == 3


# Failures


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, every):
    model = network()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, SPARSE, every, small_tensor_numel=16, timeout=timedelta(seconds=10))
    train(rank, model, optimizer, 2 * every)
    if rank == 1:
        die()
    train(rank, model, optimizer, every, start=2 * every)
    return local.syncs


def test_a_killed_rank_makes_the_others_raise():
    outcomes = watch_ranks(killed, 3, 3, timeout=40)
    assert not outcomes[1].alive
    for outcome in (outcomes[0], outcomes[2]):
        assert "PeerError" in outcome.error
        assert "a peer failed, is gone or is too slow" in outcome.error


class DiesLater:
    """A policy that ends the process in its third sync, when the others wait for its message."""

    def __init__(self, rank):
        self.left = 12 if rank == 1 else -1  # tensors of two syncs

    def codec_for(self, name, source):
        self.left -= 1
        if self.left == -1:
            time.sleep(0.5)
            die()
        return parse(SPARSE)


def killed_in_an_exchange(rank, topology):
    model = network()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, DiesLater(rank), 2, topology=topology, timeout=timedelta(seconds=60))
    train(rank, model, optimizer, 4)
    assert local.syncs == 2
    train(rank, model, optimizer, 2, start=4)


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_a_rank_that_is_killed_while_others_wait_for_it_makes_them_raise(topology):
    outcomes = watch_ranks(killed_in_an_exchange, 3, topology, timeout=90)
    assert not outcomes[1].alive
    for outcome in (outcomes[0], outcomes[2]):
        assert "PeerError" in outcome.error
        assert "a peer failed, is gone or is too slow" in outcome.error
        assert outcome.seconds < 50  # not by the timeout


def starting_apart(rank):
    model = network(seed=rank)
    optimizer = adamw(model)
    LocalSteps(model, optimizer, SPARSE, small_tensor_numel=16, timeout=timedelta(seconds=10))
    for step in range(2):  # the anchors are still those of before
        with pytest.raises(PeerError, match=r"rank 1 starts with other values of 0\.weight than rank 0"):
            train(rank, model, optimizer, 1, start=step)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


def test_ranks_that_start_from_other_parameters_are_told():
    run_ranks(starting_apart, 2)


def diverging(rank):
    model = network()
    optimizer = adamw(model)
    LocalSteps(model, optimizer, SPARSE, every=3, small_tensor_numel=16, timeout=timedelta(seconds=10))
    train(rank, model, optimizer, 2)
    if rank == 1:
        model[2].weight.data[3, 4] = float("nan")
    train(rank, model, optimizer, 1, start=2)


def test_a_rank_that_diverged_is_told_of_on_all():
    for outcome in watch_ranks(diverging, 2, timeout=30):
        assert "is not finite on some rank after 3 local steps" in outcome.error


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spec": None}, "give a spec, or a recipe: adam"),
        ({"spec": None, "recipe": "adamw"}, "recipes for local steps are adam, sgd, got 'adamw'"),
        ({"every": 0}, "every is"),
        ({"warmup": -1}, "warmup"),
        ({"every": 5, "bytes_per_step": 100}, "give every, or bytes_per_step"),
        ({"bytes_per_step": 0}, "above 0"),
        ({"spec": "nonzero/auto/qsgd", "bytes_per_step": 100}, "not known beforehand"),
        ({"buffers": "sum"}, "'mean' or 'keep'"),
        ({"topology": "dense"}, "the spec 'dense'"),
        ({"outer": 0.7}, "outer is an optimizer"),
        ({"timeout": 5}, "timeout is a timedelta"),
        ({"spec": "adam"}, 'give recipe="adam"'),
        ({"memory": ResidualMemory(momentum=0.9)}, "momentum and clip of a memory are for gradients"),
    ],
)
def test_wrong_arguments_are_refused(change, why):
    model = network()
    with pytest.raises(ValueError, match=why):
        LocalSteps(**{"model": model, "optimizer": adamw(model), "spec": SPARSE, **change})


def with_and_without_ddp(rank):
    found = []
    for wrap in (DistributedDataParallel, lambda model: model):
        norm = torch.nn.BatchNorm1d(5)
        model = wrap(torch.nn.Sequential(network(), norm))
        optimizer = adamw(model)
        with LocalSteps(model, optimizer, LOW_BITS, 3, NESTEROV, small_tensor_numel=16) as local:
            train(rank, model, optimizer, 10)
            running_mean = norm.running_mean.clone()  # of this rank since the last sync
            local.sync()
            found.append((flat(model), running_mean, list(local.state_dict()["anchors"])))
    return found


def test_under_ddp_only_local_steps_exchange():
    first, second = run_ranks(with_and_without_ddp, 2)
    for (wrapped, running_mean, names), (plain, plain_running_mean, plain_names) in (first, second):
        assert torch.equal(wrapped, plain)
        assert torch.equal(running_mean, plain_running_mean)
        assert names == plain_names
    assert not torch.equal(first[0][1], second[0][1])


def refused_under_ddp(rank):
    inside = torch.nn.Sequential(DistributedDataParallel(network()))
    with pytest.raises(ValueError, match="got Sequential around one of DDP"):
        LocalSteps(inside, adamw(inside), SPARSE)
    hooked = DistributedDataParallel(network())
    hooked.register_comm_hook(None, noop_hook)
    with pytest.raises(ValueError, match="has a communication hook"):
        LocalSteps(hooked, adamw(hooked), SPARSE)


def test_ddp_that_would_exchange_something_is_refused():
    run_ranks(refused_under_ddp, 1)


def test_another_scaler_is_refused_and_leaves_the_optimizer_free():
    model = network()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=r"scaler is a torch\.amp\.GradScaler, got 3"):
        LocalSteps(model, optimizer, SPARSE, scaler=3)
    LocalSteps(model, optimizer, SPARSE).close()


def keeps_unsent_in_parameters(local):
    return local.state_dict()["fragments"][0]["residuals_in_parameters"]


def test_what_is_given_beside_a_recipe_is_not_replaced():
    model = network()
    with LocalSteps(model, adamw(model), recipe="adam") as whole:
        assert (whole.every, keeps_unsent_in_parameters(whole)) == (4, True)
    with LocalSteps(model, adamw(model), "none/all/lloyd:2", 10, NESTEROV, recipe="adam", memory="residual") as given:
        assert repr(given) == "LocalSteps(none/all/lloyd:2, every 10, allgather)"
        assert isinstance(given.outer, torch.optim.SGD)
        assert not keeps_unsent_in_parameters(given)
    with LocalSteps(model, adamw(model), recipe="sgd", every=8) as sgd:
        assert "none/all/lloyd:1, every 8" in repr(sgd)
    assert DeepReduceState(recipe="sgd").memory.own.momentum > 0
    assert DeepReduceState(recipe="sgd", memory="residual").memory.own.momentum == 0
    assert DeepReduceState(recipe="sgd", memory="none").memory.own is None


@pytest.mark.parametrize("first", [0, 1])
def test_local_steps_of_one_scaler_are_closed_in_any_order(first):
    scaler = torch.amp.GradScaler("cpu")
    models = [network(), network()]
    optimizers = [adamw(model) for model in models]
    both = [LocalSteps(model, optimizer, "dense", scaler=scaler) for model, optimizer in zip(models, optimizers, strict=True)]

    def skip():
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 20), float("inf"))).sum()).backward()
            scaler.step(optimizer)
        scaler.update()
        return [local.syncs for local in both]

    assert skip() == [1, 1]
    both[first].close()
    assert skip()[1 - first] == 2
    assert both[first].syncs == 1
    both[1 - first].close()
    assert "step" not in vars(scaler)
    skip()
    assert sorted(local.syncs for local in both) == [1, 2]


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="not one of the model"):
        LocalSteps(network(), adamw(network()), SPARSE)


def test_memory_with_decay_is_taken():
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, SPARSE, memory=ResidualMemory(decay=0.95), small_tensor_numel=16) as local:
        train(0, model, optimizer, 2)
        assert local.state_dict()["exchange"]["memory"]["residuals"]
