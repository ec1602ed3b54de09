"""Local steps where something goes wrong around them: other optimizers, interrupts, states that do not fit, programs that just end."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import deepreduce as dr
from deepreduce import PeerError
from deepreduce.torch import LocalSteps

from .ranks import run_ranks, watch_ranks
from .tasks import flat, network
from .test_local_delay import RefusesOnce
from .test_local_steps import LOW_BITS, SPARSE, adamw, same_on_all, train

# Steps of another optimizer, and other parameters


def with_another_optimizer(rank, moment, memory):
    """Steps of an optimizer that LocalSteps do not follow; what sync() says."""
    model = network()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, SPARSE, every=4, memory=memory, small_tensor_numel=16)
    train(rank, model, optimizer, moment)
    train(rank, model, adamw(model), 3, start=moment)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            local.sync()
        except PeerError as error:
            return str(error), len(caught), flat(model)
    return "", sum("was another optimizer made" in str(each.message).lower() for each in caught), flat(model)


@pytest.mark.parametrize("moment", [0, 8])
def test_steps_of_another_optimizer_are_told(moment):
    for error, _, _ in run_ranks(with_another_optimizer, 2, moment, "residual"):
        assert f"rank 1 {'has' if moment else 'starts with'} other values of 0.weight than rank 0" in error
        assert ("Was another optimizer made?" in error) == bool(moment)


def test_steps_of_another_optimizer_are_not_undone_without_a_word():
    results = run_ranks(with_another_optimizer, 2, 8, "parameters")
    assert [(error, count) for error, count, _ in results] == [("", 1), ("", 1)]
    assert same_on_all([parameters for _, _, parameters in results])


def other_weights(rank):
    model = network()
    with torch.no_grad():
        model[0].weight += rank
    LocalSteps(model, adamw(model), SPARSE).sync()


def test_a_sync_before_the_first_step_compares_the_initial_parameters():
    for outcome in watch_ranks(other_weights, 2):
        assert "rank 1 starts with other values of 0.weight than rank 0" in outcome.error


FORGETFUL = """
import torch, torch.distributed as dist
from deepreduce.torch import LocalSteps
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
torch.nn.init.ones_(model.weight)
torch.nn.init.ones_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
local = LocalSteps(model, optimizer, "dense", every=2)
for step in range(3):
    model.weight.grad = torch.full((8, 8), 1.0 + dist.get_rank())
    optimizer.step()
"""


def test_a_program_that_ends_between_two_syncs_warns(tmp_path):
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stderr.count("the program ends between two syncs") == 2, ended.stderr


# Exchanges beside training


class SlowOnFirst:
    """A policy that takes its time on rank 0."""

    def __init__(self, rank):
        self.rank = rank

    def codec_for(self, name, source):
        if self.rank == 0:
            time.sleep(1)
        return dr.parse("dense")


def interrupted(rank):
    model = network()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, SlowOnFirst(rank), 4, delay=2)
    train(rank, model, optimizer, 5)
    if rank == 1:  # as by Ctrl-C, while it waits for rank 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            train(rank, model, optimizer, 1, start=5)
    else:
        train(rank, model, optimizer, 1, start=5)
    local.sync()
    local.close()
    return flat(model)


def test_an_interrupt_leaves_the_exchange_under_way():
    assert same_on_all(run_ranks(interrupted, 2))


def test_a_state_is_saved_after_an_exchange_that_failed():
    model = network()
    optimizer = adamw(model)
    local = LocalSteps(model, optimizer, RefusesOnce(rank=1), 4, delay=2)
    train(0, model, optimizer, 5)
    state = local.state_dict()
    assert state["fragments"][0]["pending"] is None
    assert state["fragments"][0]["steps"] == 5
    local.close()
    before = flat(model)
    with LocalSteps(model, optimizer, "dense", 4, delay=2) as again:
        again.load_state_dict(state)
        again.sync()
        torch.testing.assert_close(flat(model), before, rtol=0, atol=1e-6)  # all five steps were sent


# States and fragments


def test_a_state_that_is_refused_changes_nothing():
    model = network()
    optimizer = adamw(model)
    with LocalSteps(model, optimizer, LOW_BITS, every=2) as local:
        train(0, model, optimizer, 2)
        state = local.state_dict()
    model[0].requires_grad_(False)
    with LocalSteps(model, optimizer, LOW_BITS, every=2, seed=3) as other:
        before = set(other._trained.parameters)
        with pytest.raises(ValueError, match="seed"):
            other.load_state_dict(state)
        assert set(other._trained.parameters) == before
    with LocalSteps(model, optimizer, LOW_BITS, every=2) as other:
        (fragment,) = state["fragments"]
        for names in ([["0.weight"]], "0.weight", ["0.weight", "0.weight"]):
            with pytest.raises(ValueError, match=r"fragment|list of strings"):
                other.load_state_dict({**state, "fragments": [{**fragment, "names": names}]})


def with_a_fragment_of_buffers(rank):
    """Train with two fragments, of which a buffer is one, and then without that buffer."""
    model = torch.nn.Linear(1, 1)
    model.register_buffer("total", torch.zeros(8))
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_with(buffers, state=None):
        with LocalSteps(model, optimizer, "dense", every=2, fragments=2, buffers=buffers) as local:
            if state is not None:
                local.load_state_dict(state)
            for _ in range(4):
                model.weight.grad, model.bias.grad = torch.full((1, 1), 1.0 + rank), torch.zeros(1)
                optimizer.step()
            local.sync()
            return local.state_dict()

    train_with("keep", train_with("mean"))
    return model.weight.item()


def test_a_fragment_whose_buffers_are_kept_now_sends_nothing():
    assert run_ranks(with_a_fragment_of_buffers, 2) == pytest.approx([1 - 0.1 * 1.5 * 8] * 2)


class Adapter(torch.nn.Module):
    """A layer with an adapter of low rank, of which one half begins at zero: the gradient of the other is zero at first."""

    def __init__(self):
        super().__init__()
        self.down, self.up = torch.nn.Parameter(torch.ones(4, 8)), torch.nn.Parameter(torch.zeros(8, 4))

    def forward(self, inputs):
        return inputs + inputs @ self.down.T @ self.up.T


def adapted(rank):
    model = Adapter()
    optimizer = adamw(model)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    with warnings.catch_warnings(record=True) as caught, LocalSteps(model, optimizer, "dense", every=2, fragments=2) as local:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).pow(2).sum().backward()
            optimizer.step()
        local.sync()
    return [str(each.message) for each in caught]


def test_gradients_of_zero_are_not_taken_for_averaged_ones():
    assert run_ranks(adapted, 2) == [[], []]
