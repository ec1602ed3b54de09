"""Accelerate and the Trainer of transformers, two processes."""

from copy import deepcopy
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from deepreduce.errors import ConfigError
from deepreduce.torch import DeepReduceState

from ..torch.ranks import run_ranks
from ..torch.tasks import batch, flat, network
from .launched import as_if_launched, free_port
from .scripts import run_example

LOSSY = "topr:0.01/rice/qsgd"


class Loop:
    """A training loop of Accelerate."""

    def __init__(self, spec, seed=0, scaler=None, **options):
        from accelerate import Accelerator

        from deepreduce.integrations.accelerate import compress

        self.accelerator = Accelerator(cpu=True, **options)
        self.accelerator.scaler = scaler  # Accelerate makes one by itself on GPUs only
        self.state = None if spec is None else DeepReduceState(spec, small_tensor_numel=16)
        if self.state:
            compress(self.accelerator, self.state)
        model = network(seed)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(self, steps):
        for step in steps:
            inputs, targets = batch(self.accelerator.process_index, step)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(torch.nn.functional.cross_entropy(self.model(inputs), targets))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return flat(self.model)


def loops(rank, port, path):
    as_if_launched(rank, 2, port)
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType

    from deepreduce.integrations.accelerate import compress

    pairs = [[Loop(spec).train(range(4)) for spec in (None, "dense")]]
    pairs.append([Loop(spec, gradient_accumulation_steps=2).train(range(4)) for spec in (None, "dense")])
    find = DistributedDataParallelKwargs(find_unused_parameters=True)
    assert Loop(LOSSY, kwargs_handlers=[find]).model.find_unused_parameters
    pairs.append([Loop(spec, scaler=torch.amp.GradScaler("cpu")).train(range(4)) for spec in (None, "dense")])
    scaled = Loop(LOSSY, scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    scaled.train(range(2))
    assert scaled.state.memory.own.state_dict()["scale"] == 16  # that of the second step
    first = Loop(LOSSY)
    first.train(range(3))
    first.accelerator.save_state(path)
    resumed = Loop(LOSSY, seed=1)
    resumed.accelerator.load_state(path)
    assert first.state.stats().last.ratio > 5
    assert set(first.state.memory.own.residuals) <= set(dict(network().named_parameters()))
    check_copies(first)
    with pytest.raises(ConfigError, match=r"comes before accelerator\.prepare"):
        compress(first.accelerator, DeepReduceState(LOSSY))
    with pytest.raises(ConfigError, match="has a communication hook already"):
        Loop(LOSSY, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)])
    with pytest.raises(ConfigError, match=r"takes an Accelerator or a transformers\.Trainer, got Linear"):
        compress(torch.nn.Linear(1, 1), DeepReduceState(LOSSY))
    with mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP), pytest.raises(ConfigError, match="compress is for DDP"):
        compress(Accelerator(cpu=True), DeepReduceState(LOSSY))
    return pairs, [first.train(range(3, 6)), resumed.train(range(3, 6))]


def check_copies(loop):
    """Accelerate deep-copies what its handlers hold: the copy of a state stands by itself."""
    from accelerate.utils import DistributedDataParallelKwargs

    copied = deepcopy(loop.accelerator.ddp_handler).state
    given = deepcopy(DistributedDataParallelKwargs(comm_state_option={"state": loop.state})).comm_state_option["state"]
    for state in (copied, given):
        assert state is not loop.state
        assert repr(state) == repr(loop.state)
        for name, residual in loop.state.memory.own.residuals.items():
            assert np.array_equal(state.memory.own.residuals[name], residual)
            assert state.memory.own.residuals[name] is not residual


def test_accelerate(tmp_path):
    (pairs, lossy), (_, same) = run_ranks(loops, 2, free_port(), str(tmp_path / "checkpoint"), timeout=150)
    for own, ours in pairs:
        assert torch.allclose(own, ours, rtol=0, atol=1e-6)
    for straight, resumed in (lossy, same):
        assert torch.equal(straight, lossy[0])
        assert torch.equal(resumed, straight)


def trainer(spec, folder, seed=0, target=lambda made: made):
    """A Trainer for a small GPT-2, made from a config: nothing is downloaded. `target` is what is compressed of it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from deepreduce.integrations.accelerate import compress

    torch.manual_seed(seed)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    words = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    fixed = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_steps": 3}
    arguments = TrainingArguments(str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=0.01, seed=3, **fixed)
    made = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in words])
    state = None if spec is None else DeepReduceState(spec, small_tensor_numel=16)
    if state:
        compress(target(made), state)
    return made, state


def trainers(rank, port, path):
    as_if_launched(rank, 2, port)
    folder, results = Path(path), []
    for spec in (None, "dense", LOSSY):
        made, state = trainer(spec, folder / f"{spec}".replace("/", "-"))
        made.train()
        results.append(flat(made.model))
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert state.stats().last.ratio > 5
    other, _ = trainer(LOSSY, folder / "accelerator", target=lambda made: made.accelerator)
    other.train()
    results.append(flat(other.model))
    folder = folder / LOSSY.replace("/", "-")
    assert (folder / "checkpoint-3" / f"deepreduce.rank{rank}").exists()
    resumed, _ = trainer(LOSSY, folder, seed=1)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return [*results, flat(resumed.model)], logged


def test_the_trainer_trains_and_resumes(tmp_path):
    (first, logged), (second, _) = run_ranks(trainers, 2, free_port(), str(tmp_path), timeout=300)
    own, dense, straight, *same = first
    assert torch.allclose(own, dense, rtol=0, atol=1e-6)
    assert not torch.equal(dense, straight)
    for parameters in (*same, *second[2:]):  # by its accelerator, resumed, and on the other rank
        assert torch.equal(parameters, straight)
    assert len(logged) == 6
    assert all(entry["deepreduce_ratio"] > 5 and entry["deepreduce_sent_bytes"] > 0 for entry in logged)


def test_the_examples_run():
    assert "times fewer bytes" in run_example("accelerate_loop.py", "--nproc-per-node", "2")
    assert "deepreduce_ratio" in run_example("trainer_gpt2.py", "--nproc-per-node", "2")
    assert "deepreduce_ratio" in run_example("trainer_gpt2.py", "--nproc-per-node", "2", options=["--gradients"])
