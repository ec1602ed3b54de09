"""Local steps in Accelerate, in the Trainer of transformers and in Lightning: with AdamW, two processes."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from deepreduce.errors import ConfigError, InputError
from deepreduce.torch import LocalSteps

from ..torch.ranks import run_ranks
from ..torch.tasks import batch, flat, network
from .launched import as_if_launched, free_port

WAY = {"recipe": "adam", "every": 3, "small_tensor_numel": 16}


def halved_after_four(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 4 else 0.5)


def by_hand(rank):
    """The parameters after six steps and two syncs, without any tool."""
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


class Loop:
    """A training loop of Accelerate, with a scaler if wanted, whose steps are skipped where rank 1 has a loss that is not finite."""

    def __init__(self, seed=0, scaler=None, layer=None, **options):
        from accelerate import Accelerator

        from deepreduce.integrations.accelerate import local_steps

        self.accelerator = Accelerator(cpu=True)
        self.accelerator.scaler = scaler  # Accelerate makes one by itself on GPUs only
        model = torch.nn.Sequential(network(seed), *([layer] if layer else []))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        made = self.accelerator.prepare(model, optimizer, halved_after_four(optimizer))
        self.model, self.optimizer, self.scheduler = made
        self.local = local_steps(self.accelerator, self.model, self.optimizer, **WAY, **options)

    def train(self, steps, not_finite=()):
        rank = self.accelerator.process_index
        for step in steps:
            inputs, targets = batch(rank, step)
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            self.accelerator.backward(loss * float("inf") if (rank, step) in not_finite else loss)
            self.optimizer.step()
            self.scheduler.step()

    def all(self):
        """What this rank has: parameters, buffers, learning rate and loss scale."""
        scale = self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1.0
        numbers = torch.tensor([*self.scheduler.get_last_lr(), scale])
        return torch.cat([flat(self.model), *(buffer.flatten().float() for buffer in self.model.buffers()), numbers])


class Pair:
    """Two models and two optimizers on one accelerator."""

    def __init__(self, seed=0):
        from accelerate import Accelerator

        from deepreduce.integrations.accelerate import local_steps

        self.accelerator = Accelerator(cpu=True)
        self.trained = []
        for offset in (0, 10):
            model = network(seed + offset)
            model, optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
            self.trained.append((model, optimizer, local_steps(self.accelerator, model, optimizer, **WAY)))

    def train(self, steps):
        for step in steps:
            inputs, targets = batch(self.accelerator.process_index, step)
            for model, optimizer, _ in self.trained:
                optimizer.zero_grad()
                self.accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()

    def all(self):
        return torch.cat([flat(model) for model, _, _ in self.trained])

    @property
    def model(self):
        return self.trained[0][0]


def with_accelerate(rank, port, path):
    """Pairs of parameters that must be equal on this rank."""
    as_if_launched(rank, 2, port)
    folder = Path(path)
    refusals()
    plain, common = resumed_loop(folder / "plain", dict)
    full, _ = resumed_loop(folder / "full", everything_differs, not_finite={(1, 1)})
    pair = resumed_loop(folder / "pair", dict, loop=Pair)[0]
    unfitting(folder / "plain", rank)
    return plain, full, pair, common, (by_accelerate(), by_hand(rank))


def by_accelerate():
    loop = Loop()
    loop.scheduler = mock.Mock()
    loop.train(range(6))
    loop.local.sync()
    assert loop.local.syncs == 2
    return flat(loop.model)


def everything_differs():
    """Options of a loop in which ranks have buffers, a loss scale and a learning rate of their own."""
    return {"layer": torch.nn.BatchNorm1d(5), "buffers": "keep", "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)}


def resumed_loop(folder, options, loop=Loop, **training):
    """What a loop has that saved between two syncs and went on, and one that resumed; and the model after the save, and in the file."""
    from safetensors.torch import load_file

    first = loop(**options())
    first.train(range(4), **training)
    first.accelerator.save_state(folder)
    first.accelerator.wait_for_everyone()
    common, saved = flat(first.model), load_file(folder / "model.safetensors")
    own = torch.cat([saved[name].reshape(-1) for name, _ in first.model.module.named_parameters()])
    resumed = loop(seed=1, **options())
    resumed.accelerator.load_state(folder)
    first.train(range(4, 9))
    resumed.train(range(4, 9))
    return (first.all(), resumed.all()), (common, own)


def refusals():
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from deepreduce.integrations.accelerate import local_steps

    accelerator = Accelerator(cpu=True)
    model = network()
    plain = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, plain)
    with pytest.raises(ConfigError, match=r"takes what accelerator\.prepare\(model, optimizer\) returns, got AdamW"):
        local_steps(accelerator, prepared, plain, **WAY)
    with (
        mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP),
        pytest.raises(ConfigError, match="local_steps is for DDP"),
    ):
        local_steps(accelerator, prepared, optimizer, **WAY)


def unfitting(folder, rank):
    """A checkpoint that fits no more, and one without the file of this rank."""
    own = folder / f"deepreduce.rank{rank}"
    torch.save(torch.load(own) | {"scaler": {}}, own)
    with pytest.raises(InputError, match="the state of a rank has local, optimizer, scheduler 0, tensors; got local, optimizer, scaler"):
        Loop().accelerator.load_state(folder)
    own.unlink()
    with pytest.raises(InputError, match="was made without deepreduce"):
        Loop().accelerator.load_state(folder)


def test_accelerate_takes_local_steps_and_resumes(tmp_path):
    first, second = run_ranks(with_accelerate, 2, free_port(), str(tmp_path), timeout=300)
    for straight, resumed in (*first[:4], *second[:4]):
        assert torch.equal(straight, resumed)
    assert not torch.equal(first[0][0], second[0][0])  # between two syncs
    assert torch.equal(first[3][0], second[3][0])  # in the checkpoint
    (own, plain), (other, _) = first[4], second[4]
    assert torch.equal(own, other)
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-7)


def made_trainer(folder, seed=0, **options):
    """A Trainer for a small GPT-2 with dropout, made from a config: nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from deepreduce.integrations.trainer import LocalStepsCallback

    class Evaluated(TrainerCallback):
        def __init__(self):
            self.parameters = []

        def on_evaluate(self, args, state, control, model=None, **others):
            self.parameters.append(flat(model))

    torch.manual_seed(seed)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    words = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in words]
    fixed = {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "disable_tqdm": True, "logging_steps": 1, "seed": 3}
    saving = {"max_steps": 10, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 0.01, **options}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, **fixed, **saving)
    evaluated = Evaluated()
    made = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[evaluated])
    own = LocalStepsCallback(made, **WAY)
    made.add_callback(own)
    return made, own, evaluated


def by_trainer(rank, port, path):
    as_if_launched(rank, 2, port)
    from deepreduce.integrations.trainer import LocalStepsCallback

    with pytest.raises(ConfigError, match=r"takes the transformers\.Trainer that it is added to first, got str"):
        LocalStepsCallback("topr:0.01/rice/qsgd")
    made, own, evaluated = made_trainer(path)
    made.train()
    straight = flat(made.model)
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["deepreduce_sent_bytes"] > 0 for entry in logged] == [False, False] + [True] * 8  # from the first sync on
    assert logged[-1]["deepreduce_ratio"] > 10
    assert own.local.syncs == 5  # after steps 3, 4 (saved), 7, 8 (saved, and an epoch ends) and 10
    resumed = []
    for step in 4, 8:  # in the middle of an epoch, and at the end of one
        again, _, _ = made_trainer(f"{path}/resumed", seed=1)
        again.train(resume_from_checkpoint=f"{path}/checkpoint-{step}")
        resumed.append(flat(again.model))
    best, _, seen = made_trainer(f"{path}/best", load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    best.train()
    losses = [entry["eval_loss"] for entry in best.state.log_history if "eval_loss" in entry]
    largest = losses.index(max(losses))
    assert largest < len(losses) - 1  # the loss falls, so the model that is loaded is not that of the last step
    assert torch.equal(flat(best.model), seen.parameters[largest])
    best.train()  # a second training begins with the model of the first
    return straight, *resumed, *evaluated.parameters, flat(best.model)


def test_the_trainer_of_transformers_takes_local_steps_and_resumes(tmp_path):
    first, second = run_ranks(by_trainer, 2, free_port(), str(tmp_path), timeout=600)
    straight, resumed, resumed_later, *others = first
    assert torch.equal(straight, resumed)
    assert torch.equal(straight, resumed_later)
    assert len(others) == 4  # what was evaluated, and the model of a second training
    for own, other in zip(first, second, strict=True):
        assert torch.equal(own, other)


def fitted(rank, folder, seed=0, ckpt_path=None, plugins=(), not_finite=(), **options):
    """A module after a fit, and its trainer and callback. An epoch has six batches."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from deepreduce.integrations.lightning import LocalStepsCallback

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Sequential(network(seed), torch.nn.BatchNorm1d(5))
            self.validated = []

        def training_step(self, data, index):
            step = 6 * self.current_epoch + index  # in the middle of an epoch, Lightning resumes with the first batch of its loader
            inputs, targets = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(self.network(inputs), targets)
            return loss * float("inf") if (rank, step) in not_finite else loss

        def validation_step(self, data):
            self.validated.append(flat(self))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return [optimizer], [{"scheduler": halved_after_four(optimizer), "interval": "step"}]

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.zeros(6, 1))

        def val_dataloader(self):
            return torch.utils.data.DataLoader(torch.zeros(1, 1))

    callback = LocalStepsCallback(**WAY)
    callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1), callback]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fixed = {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False, "val_check_interval": 2}
    trainer = Trainer(callbacks=callbacks, strategy="ddp", plugins=list(plugins), max_epochs=2, **fixed, **quiet, **options)
    module = Module()
    trainer.fit(module, ckpt_path=ckpt_path)
    return module, trainer, callback


def fits(rank, port, path):
    as_if_launched(rank, 2, port)
    from lightning.pytorch.plugins import MixedPrecision

    results = []
    for name, skipping in (("plain", False), ("scaled", True)):
        folder, found = Path(path) / name, []
        for seed, ckpt_path in ((0, None), (1, str(folder / "step=4.ckpt"))):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "not_finite": {(1, 1)}} if skipping else {}
            module, trainer, callback = fitted(rank, folder if seed == 0 else folder / "resumed", seed, ckpt_path, **options)
            found.append(flat(module))
            assert callback.local is None
            assert trainer.callback_metrics["deepreduce/ratio"] > 5
        trainer.save_checkpoint(folder / "end.ckpt")  # after the training
        assert (folder / f"end.ckpt.deepreduce.rank{rank}").exists()
        results.append((*found, *module.validated[-4:]))
    return results


def test_lightning_takes_local_steps_and_resumes(tmp_path):
    first, second = run_ranks(fits, 2, free_port(), str(tmp_path), timeout=300)
    for own, other in zip(first, second, strict=True):
        straight, resumed, *_ = own
        assert torch.equal(straight, resumed)
        for mine, theirs in zip(own, other, strict=True):  # also what was validated
            assert torch.equal(mine, theirs)
    assert not torch.equal(first[0][0], first[1][0])


def by_lightning(rank, port):
    as_if_launched(rank, 2, port)
    from lightning.pytorch import LightningModule, Trainer

    from deepreduce.integrations.lightning import LocalStepsCallback

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

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    fixed = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    Trainer(max_epochs=1, callbacks=[LocalStepsCallback(**WAY)], **fixed, **quiet).fit(module)
    return flat(module), by_hand(rank)


def test_lightning_has_the_parameters_of_local_steps_without_it():
    (own, plain), (other, _) = run_ranks(by_lightning, 2, free_port(), timeout=150)
    assert torch.equal(own, other)
    torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-7)
