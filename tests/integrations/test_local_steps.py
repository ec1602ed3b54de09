"""Local steps where a tool has put the model under DDP: with AdamW, two processes. The lines are those of docs/integrations.md."""

import pytest
import torch

from deepreduce.torch import LocalSteps

from ..torch.ranks import run_ranks
from ..torch.tasks import batch, flat, network
from .launched import as_if_launched, free_port

WAY = {"recipe": "adam", "every": 2, "small_tensor_numel": 16}


def by_hand(rank):
    """The parameters after six steps and three syncs, without any tool."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with LocalSteps(model, optimizer, **WAY) as local:
        for step in range(6):
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        local.sync()
    return flat(model)


def by_accelerate(rank, port):
    as_if_launched(rank, 2, port)
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    local = LocalSteps(model, optimizer.optimizer, **WAY)
    for step in range(6):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    local.sync()
    assert local.syncs == 3
    return flat(model), by_hand(rank)


def by_lightning(rank, port):
    as_if_launched(rank, 2, port)
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Local(Callback):
        def on_train_start(self, trainer, pl_module):
            self.steps = LocalSteps(trainer.strategy.model, trainer.optimizers[0], **WAY)

        def on_train_epoch_end(self, trainer, pl_module):
            self.steps.sync()

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, data):
            inputs, targets = data
            return torch.nn.functional.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

        def train_dataloader(self):
            return torch.utils.data.DataLoader([batch(rank, step) for step in range(6)], batch_size=None)

    local, module = Local(), Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[local], use_distributed_sampler=False, **quiet)
    trainer.fit(module)
    assert local.steps.syncs == 3
    return flat(module), by_hand(rank)


@pytest.mark.parametrize("tool", [by_accelerate, by_lightning])
def test_the_parameters_are_those_of_local_steps_without_the_tool(tool):
    (own, plain), (other, _) = run_ranks(tool, 2, free_port(), timeout=150)
    assert torch.equal(own, other)
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-7)


def by_trainer(rank, port, path):
    as_if_launched(rank, 2, port)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Local(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **rest):
            self.steps = LocalSteps(trainer.model_wrapped, optimizer.optimizer, **WAY)

        def on_step_end(self, args, state, control, **rest):
            if control.should_evaluate or control.should_save or control.should_training_stop:
                self.steps.sync()

        on_epoch_end = on_step_end

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    words = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    fixed = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(path, max_steps=6, per_device_train_batch_size=4, ddp_broadcast_buffers=False, **fixed)
    local, rows = Local(), [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[local])
    before = flat(trainer.model)
    trainer.train()
    assert local.steps.syncs == 3
    assert local.steps.stats().last.ratio > 10
    return before, flat(trainer.model)


def test_the_trainer_of_transformers_takes_local_steps(tmp_path):
    (before, own), (_, other) = run_ranks(by_trainer, 2, free_port(), str(tmp_path), timeout=300)
    assert torch.equal(own, other)
    assert not torch.equal(own, before)
