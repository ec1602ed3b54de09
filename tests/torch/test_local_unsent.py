"""Local steps that keep what was not sent in the parameters of the rank: nothing is lost of it, and `sync` makes all ranks equal."""

import io
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from deepreduce.torch import LocalSteps, reshard

from .ranks import run_ranks
from .tasks import batch, flat, network
from .tasks import train_with as train

SPARSE = "topr:0.02/rice/lloyd:1"
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)


def started(spec=SPARSE, every=1, outer=None, **options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = LocalSteps(model, optimizer, spec, every, outer, memory="parameters", small_tensor_numel=16, **options)
    return model, optimizer, local


def mean_over_ranks(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def apart_and_together(rank, ways):
    found = []
    for way in ways:
        model, optimizer, local = started(**way)
        train(rank, model, optimizer, 21)
        apart = flat(model)
        local.sync()
        together = flat(model)
        train(rank, model, optimizer, 9, start=21)
        local.sync()
        found.append((apart, together, flat(model)))
        local.close()
    return found


WAYS = [
    {"topology": "allgather"},
    {"topology": "server"},
    {"topology": "sharded"},
    {"every": 4},
    {"every": 4, "delay": 2},
    {"spec": "none/all/lloyd:2", "every": 10, "outer": NESTEROV},
]


def test_ranks_differ_by_what_they_did_not_send_until_they_are_told_to_sync():
    for way, column in zip(WAYS, zip(*run_ranks(apart_and_together, 3, WAYS, timeout=240), strict=True), strict=True):
        for moment, equal in enumerate((False, True, True)):
            states = [result[moment] for result in column]
            assert all(torch.equal(state, states[0]) for state in states) == equal, (way, moment)
        _, first, last = column[0]
        assert bool(torch.isfinite(last).all())
        assert not torch.equal(first, last)


def drift(rank, every, delay):
    """Constant gradients, other ones on each rank: what all ranks did together is known."""
    model = torch.nn.Linear(40, 50)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradients = [torch.randn(each.shape, generator=torch.Generator().manual_seed(rank)) for each in model.parameters()]
    with LocalSteps(model, optimizer, SPARSE, every, delay=delay, memory="parameters", small_tensor_numel=16) as local:
        for step in range(1, 41):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            if step in (12, 20):
                local.sync()
        while delay and local.syncs < 13:  # the last exchange must not be under way
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    expected = [1 - 0.01 * 40 * mean_over_ranks(gradient) for gradient in gradients]
    return [mean_over_ranks(parameter.detach()) for parameter in model.parameters()], expected


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (3, 0), (4, 2)])
def test_the_mean_of_the_ranks_is_that_of_all_their_steps(every, delay):
    """Whatever is sent of them: a rank that sends a part of its change gives it away, and all get their share of it."""
    for found, expected in run_ranks(drift, 2, every, delay):
        for mean, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(mean, exact, rtol=0, atol=1e-5)


def saved(**parts):
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return file.getvalue()


def interrupted_and_not(rank, way):
    model, optimizer, local = started(seed=7, **way)
    train(rank, model, optimizer, 10)
    checkpoint = saved(model=model, optimizer=optimizer, local=local)
    train(rank, model, optimizer, 10, start=10)
    again = started(seed=7, **way)
    for part, state in zip(again, torch.load(io.BytesIO(checkpoint), weights_only=True).values(), strict=True):
        part.load_state_dict(state)
    train(rank, *again[:2], 10, start=10)
    return flat(model), flat(again[0])


@pytest.mark.parametrize("way", [{}, {"every": 4, "topology": "sharded"}, {"every": 4, "delay": 3}])
def test_resuming_gives_the_same_bits(way):
    for straight, resumed in run_ranks(interrupted_and_not, 2, way):
        assert torch.equal(straight, resumed)


def test_a_state_with_an_exchange_under_way_goes_on_with_another_warmup():
    def steps(run, count):
        local, optimizer, model = run
        for _ in range(count):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return local

    def made(**options):
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return LocalSteps(model, optimizer, "none/all/raw", 4, delay=3, **options), optimizer, model

    for memory in ("residual", "parameters"):
        first = made(memory=memory)
        state = steps(first, 5).state_dict()
        assert state["fragments"][0]["pending"] is not None
        again = made(memory=memory, warmup=6)
        again[2].load_state_dict(first[2].state_dict())
        again[0].load_state_dict(state)
        steps(again, 3).sync()
        assert bool((again[2].weight == -8).all()), memory
        first[0].close()
        again[0].close()


def test_states_and_memories_that_do_not_fit_are_refused():
    model, optimizer, local = started()
    train(0, model, optimizer, 3)
    apart = local.state_dict()
    with pytest.raises(ValueError, match=r"state 0 was saved between two syncs.*call local.sync\(\) before"):
        reshard([apart], ranks=2)
    beside = LocalSteps(other := network(), torch.optim.AdamW(other.parameters()), SPARSE, memory="residual", small_tensor_numel=16)
    with pytest.raises(ValueError, match='goes on with memory="parameters"'):
        beside.load_state_dict(apart)
    local.sync()
    first, _ = reshard([local.state_dict()], ranks=2)
    assert first["exchange"]["memory"]["residuals"]
    beside.load_state_dict(local.state_dict())


def test_sync_leaves_weights_alone_that_were_set_after_it():
    model, optimizer, local = started()
    train(0, model, optimizer, 3)
    local.sync()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    local.sync()
    assert bool((model[0].weight == 7.0).all())


def test_a_parameter_that_is_frozen_after_sync_stays_where_it_is():
    model, optimizer, local = started()
    train(0, model, optimizer, 5)
    local.sync()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer.zero_grad(set_to_none=True)
    train(0, model, optimizer, 5, start=5)
    local.sync()
    assert torch.equal(model[0].weight, before)


def in_half_precision(rank):
    model = network().to(torch.bfloat16)
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with LocalSteps(model, optimizer, SPARSE, memory="parameters", small_tensor_numel=16) as local:
        for step in range(20):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            torch.nn.functional.cross_entropy(model(inputs.to(torch.bfloat16)).float(), targets).backward()
            optimizer.step()
        local.sync()
    return before, flat(model)


def test_half_precisions_agree_too():
    results = run_ranks(in_half_precision, 2)
    before, after = results[0]
    assert torch.equal(after, results[1][1])
    assert bool(torch.isfinite(after.float()).all())
    assert not torch.equal(before, after)


def test_what_half_precision_cannot_hold_of_a_residual_stays_one():
    model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSteps(model, optimizer, "none/all/lloyd:1", memory="parameters", small_tensor_numel=0) as local:
        model.weight.grad = torch.linspace(-0.1, 0.1, 64 * 64, dtype=torch.bfloat16).reshape(64, 64)
        optimizer.step()
        held, anchor = (torch.from_numpy(table["weight"]) for table in (local._memory.own.residuals, local._fragments[0].training.anchors))
        unsent = anchor.to(torch.bfloat16).float() - model.weight.detach().float() + held
        did = anchor - (1 - model.weight.grad).float()  # the anchor has moved by what was sent
        torch.testing.assert_close(unsent, did, rtol=0, atol=1e-6)
        assert float(held.abs().max()) > 1e-4  # bfloat16 has steps of 2**-8 below 1


def test_other_memories_are_refused():
    model = network()
    with pytest.raises(ValueError, match="memory is 'residual', 'parameters', 'none' or a ResidualMemory, got 'momentum'"):
        LocalSteps(model, torch.optim.SGD(model.parameters()), SPARSE, memory="momentum")


def warnings_at_close(rank, options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = LocalSteps(model, optimizer, SPARSE, small_tensor_numel=16, **options)
    train(rank, model, optimizer, 6)
    with warnings.catch_warnings(record=True) as before:
        local.close()
    local = LocalSteps(model, optimizer, SPARSE, small_tensor_numel=16, **options)
    model.load_state_dict(network().state_dict())
    train(rank, model, optimizer, 6)
    local.sync()
    with warnings.catch_warnings(record=True) as after:
        local.close()
    return [str(each.message) for each in before], [str(each.message) for each in after]


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({"every": 3}, False),
        ({"every": 4}, True),
        ({"every": 3, "memory": "parameters"}, True),
        ({"every": 3, "delay": 1}, True),
        ({"every": 4, "fragments": 2}, True),
    ],
)
def test_closing_between_two_syncs_warns(options, apart):
    for before, after in run_ranks(warnings_at_close, 2, options):
        assert len(before) == apart
        assert all("call sync() on all ranks before close()" in message for message in before)
        assert not after
