"""Checkpoints, loss scaling, and failures: what a long run meets."""

import io
import os
import signal
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from deepreduce.integrations import rankfiles
from deepreduce.torch import DeepReduceState, LocalSteps, allreduce_
from deepreduce.torch.transport import Gloo

from .ranks import run_ranks, watch_ranks
from .tasks import batch, flat, hooked, network, train

SPEC = "topr:0.05/rice/qsgd"


def saved(model, state):
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "deepreduce": state.state_dict()}, file)
    return file.getvalue()


def state_for(topology):
    return DeepReduceState(SPEC, topology=topology, small_tensor_numel=16, seed=7)


def interrupted_and_not(rank, topology):
    state = state_for(topology)
    model = hooked(state)
    train(rank, model, 5)
    checkpoint = saved(model, state)
    train(rank, model, 5, start=5)

    resumed_state = state_for(topology)
    resumed = hooked(resumed_state)
    loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
    resumed.module.load_state_dict(loaded["model"])
    resumed_state.load_state_dict(loaded["deepreduce"])
    train(rank, resumed, 5, start=5)
    return flat(model), flat(resumed), state.step, resumed_state.step


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_resuming_gives_the_same_bits(topology):
    for straight, resumed, *steps in run_ranks(interrupted_and_not, 2, topology):
        assert torch.equal(straight, resumed)
        assert steps == [10, 10]


def without_the_residual(rank):
    straight, _, _, _ = interrupted_and_not(rank, "allgather")
    state = state_for("allgather")
    model = hooked(state)
    train(rank, model, 5)
    state.memory.own.load_state_dict({"residuals": {}, "velocities": {}})
    train(rank, model, 5, start=5)
    return straight, flat(model)


def test_the_residual_is_what_a_checkpoint_must_hold():
    for straight, forgetful in run_ranks(without_the_residual, 2):
        assert not torch.equal(straight, forgetful)


def test_a_foreign_state_is_refused():
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0, model=torch.nn.Linear(2, 1))
    allreduce_(torch.tensor([3.0, 2.0]), state, names=["weight"])
    before = state.state_dict()
    foreign = {**before, "memory": {"residuals": {"other": torch.ones(2)}, "velocities": {}, "scale": 1.0}}
    spoiled = {**before, "step": 9, "owned": {"residuals": {"weight": torch.ones(2, dtype=torch.int32)}, "velocities": {}}}
    for refused, why in (({"step": 1}, "has the keys memory, numels"), (foreign, "the model has not: other"), (spoiled, "int32")):
        with pytest.raises(ValueError, match=why):
            state.load_state_dict(refused)
        after = state.state_dict()
        assert after["step"] == before["step"]
        assert torch.equal(after["memory"]["residuals"]["weight"], before["memory"]["residuals"]["weight"])


def saved_alone(rank, path):
    """Rank 0 alone saves and loads, before the first step and after the connections are closed; then all take a step."""
    states = [DeepReduceState(SPEC, timeout=timedelta(seconds=10)) for _ in range(2)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, optimizer, SPEC, timeout=timedelta(seconds=10))
    allreduce_(torch.ones(2000), states[1])
    states[1].close()
    places = []
    if rank == 0:
        for state in states:
            places.append(rankfiles.save(state, f"{path}/state").name)
            rankfiles.load(state, f"{path}/state")
        local.load_state_dict(local.state_dict())
        places += [held["ranks"] for held in (states[0].state_dict(), local.state_dict()["exchange"])]
    for state in states:
        allreduce_(torch.ones(2000), state)
    train(rank, model, 1)
    return places


def test_a_rank_saves_and_loads_without_the_others(tmp_path):
    assert run_ranks(saved_alone, 2, str(tmp_path)) == [["state.rank0", "state.rank0", 2, 2], []]


def used_before_the_group(rank, store):
    """A state and local steps that were used, saved and loaded before there was a process group."""
    state, model = DeepReduceState("dense"), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, optimizer, "dense")
    state.load_state_dict(state.state_dict())
    local.load_state_dict(local.state_dict())
    allreduce_(torch.ones(3), state)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    gradient = torch.full((3,), float(rank))
    allreduce_(gradient, state)
    inputs, targets = batch(rank, 0)
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    return gradient.tolist(), flat(model)


def test_what_was_used_before_the_process_group_exchanges_when_it_is_there(tmp_path):
    (mean, parameters), (same, others) = run_ranks(used_before_the_group, 2, str(tmp_path / "store"), joined=False)
    assert mean == same == [0.5] * 3
    assert torch.equal(parameters, others)


# Mixed precision


def overflow(rank, spec, topology):
    """One rank overflows in step 3; the scale, the parameters before and after it, and at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    state = DeepReduceState(spec, topology=topology, small_tensor_numel=16, scaler=scaler)
    model = hooked(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(6):
        inputs, targets = batch(rank, step)
        before = flat(model)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss * (float("inf") if (rank, step) == (1, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), torch.equal(before, flat(model))))
    held = state.state_dict()["memory"]["residuals"].values()
    return found, flat(model), all(bool(torch.isfinite(each).all()) for each in held)


@pytest.mark.parametrize(("spec", "topology"), [(SPEC, "allgather"), ("randomr:0.1/seeded/raw", "sharded"), (SPEC, "server")])
def test_an_overflow_on_one_rank_is_skipped_on_all(spec, topology):
    results = run_ranks(overflow, 2, spec, topology)
    for steps, parameters, residual_is_finite in results:
        assert [skipped for _, skipped in steps] == [False, False, False, True, False, False]
        assert [scale for scale, _ in steps] == [256.0] * 3 + [128.0] * 3
        assert residual_is_finite
        assert bool(torch.isfinite(parameters).all())
        assert torch.equal(parameters, results[0][1])


def half_precision(rank):
    """Training in float16 under a loss scale that is far too large at first; for every step the scale, and whether it was skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=1000)
    state = DeepReduceState(SPEC, small_tensor_numel=16, scaler=scaler)
    model = hooked(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(20):
        inputs, targets = batch(rank, step)
        before = flat(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), torch.equal(before, flat(model))))
    return found, flat(model)


def test_float16_overflows_until_the_scale_fits_and_then_trains():
    (steps, parameters), (others, same) = run_ranks(half_precision, 2)
    assert steps == others
    scales = [2.0**26, *(scale for scale, _ in steps)]
    assert [was_skipped for _, was_skipped in steps] == [after < before for before, after in pairwise(scales)]
    assert steps[0][1]
    assert sum(not was_skipped for _, was_skipped in steps) >= 5
    assert torch.equal(parameters, same)
    assert bool(torch.isfinite(parameters).all())


@pytest.mark.parametrize("later", [False, True], ids=["given", "set later"])
def test_the_residual_follows_the_loss_scale(later):
    class Scaler:
        scale = 1024.0

        def get_scale(self):
            return self.scale

    scaler = Scaler()
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0, scaler=None if later else scaler)
    if later:
        state.set_scaler(scaler)
    allreduce_(torch.tensor([3.0, 2.0]) * 1024, state)
    scaler.scale = 512.0
    gradient = torch.tensor([3.0, 2.0]) * 512
    allreduce_(gradient, state)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 4.0]) * 512)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_residual_of_half_precision_is_kept_in_float32(dtype):
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    for _ in range(4):
        allreduce_(torch.tensor([100.0, 1.0, 2.0**-12], dtype=dtype), state)
    held = state.state_dict()["memory"]["residuals"]["tensor 0"]
    assert torch.equal(held, torch.tensor([0.0, 4.0, 4 * 2.0**-12]))


def test_a_residual_beyond_float16_stays_finite():
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    got = torch.zeros(2)
    for _ in range(4):
        gradient = torch.tensor([60000.0, 59008.0], dtype=torch.float16)
        allreduce_(gradient, state)
        assert bool(torch.isfinite(gradient).all())
        got += gradient
    held = state.state_dict()["memory"]["residuals"]["tensor 0"]
    assert torch.equal(got + held, torch.tensor([4 * 60000.0, 4 * 59008.0]))


# Failures


def killed(rank):
    state = DeepReduceState(SPEC, small_tensor_numel=16, timeout=timedelta(seconds=10))
    model = hooked(state)
    train(rank, model, 2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(rank, model, 1, start=2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_makes_the_others_raise(size):
    outcomes = watch_ranks(killed, size, timeout=30)
    assert not outcomes[1].alive
    for outcome in outcomes[:1] + outcomes[2:]:
        assert "PeerError" in outcome.error
        assert "a peer failed, is gone or is too slow" in outcome.error


def corrupting(rank, topology, model_rank=1):
    state = DeepReduceState(SPEC, topology=topology, small_tensor_numel=16, timeout=timedelta(seconds=10))
    model = hooked(state)
    train(rank, model, 1)
    if rank == model_rank:
        _corrupt(Gloo)
    train(rank, model, 2, start=1)


def _corrupt(transport):
    """Flip one byte of every message this rank sends, behind the back of the checksum."""
    for name in ("all_gather", "gather", "all_to_all"):
        setattr(transport, name, _flipping(getattr(transport, name)))


def _flipping(send):
    def sending(self, outgoing, *arguments):
        flipped = [_flipped(frame) for frame in outgoing] if isinstance(outgoing, list) else _flipped(outgoing)
        return send(self, flipped, *arguments)

    return sending


def _flipped(frame):
    changed = bytearray(frame)
    changed[len(frame) // 2 if len(frame) > 150 else 0] ^= 0xFF
    return bytes(changed)


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_a_corrupted_message_makes_the_others_raise(topology):
    outcomes = watch_ranks(corrupting, 2, topology, timeout=30)
    assert "CorruptError" in outcomes[0].error
    assert "rank 1" in outcomes[0].error
    assert outcomes[1].error


def failing(rank):
    class Policy:
        def codec_for(self, name, source):
            if rank == 1 and source.numel > 1000:
                raise RuntimeError("no codec today")
            from deepreduce import parse

            return parse("dense")

    state = DeepReduceState(Policy(), model=None, timeout=timedelta(seconds=10))
    train(rank, hooked(state), 1)


def test_a_rank_that_cannot_encode_tells_the_others_why():
    outcomes = watch_ranks(failing, 2, timeout=30)
    assert "no codec today" in outcomes[1].error
    assert "rank 1 failed: RuntimeError" in outcomes[0].error
    assert "no codec today" in outcomes[0].error


def disagreeing(rank):
    gradient = torch.ones(2000)
    allreduce_(gradient, DeepReduceState("topr:0.1/raw/raw" if rank else "topr:0.2/raw/raw", timeout=timedelta(seconds=10)))


def test_ranks_with_different_specs_are_told():
    for outcome in watch_ranks(disagreeing, 2, timeout=30):
        assert "all ranks need the same model, spec, topology and checkpoint" in outcome.error


def test_an_error_names_the_parameter():
    with pytest.raises(ValueError, match=r"layer.weight.*int32"):
        allreduce_(torch.ones(2000, dtype=torch.int32), DeepReduceState("dense"), names=["layer.weight"])


def failing_beside_others(rank):
    """Several buckets are under way when the first one fails; what the user sends next is not mixed with them."""
    with pytest.raises(RuntimeError):
        failing(rank)
    total = torch.ones(3)
    dist.all_reduce(total)
    return total.tolist()


def test_after_a_failure_the_groups_of_the_user_are_left_alone():
    assert run_ranks(failing_beside_others, 2) == [[2.0, 2.0, 2.0]] * 2
