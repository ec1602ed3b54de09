"""Lightning: callbacks that compress the gradients of ``strategy="ddp"``, or let the optimizer take local steps there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from ..step.policy import Spec
from ..torch.hook import deepreduce_hook
from ..torch.local_steps import LocalSteps
from ..torch.state import DeepReduceState
from . import rankfiles

_SUFFIX = ".deepreduce"


class _Keeper(Callback):
    """Saves the state of every rank beside each checkpoint, restores it where training resumes, and logs what it counts."""

    state: rankfiles.RankStateful | None = None
    """None before training begins, where it is made then."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the state with every checkpoint from here on."""
        if stage == "fit" and isinstance(trainer.save_checkpoint, MethodType):  # not yet, in an earlier fit
            trainer.save_checkpoint = self._saving(trainer.save_checkpoint)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *step: Any) -> None:
        """Log what the latest exchange cost this rank."""
        if self.state is not None:
            pl_module.log_dict({f"deepreduce/{name}": float(number) for name, number in self.state.stats().last.scalars().items()})

    def _sync(self) -> None:
        """Make the model the same on all ranks, where it is not."""

    def _restore(self, state: rankfiles.RankStateful, trainer: Trainer) -> None:
        if trainer.ckpt_path is not None:
            rankfiles.load(state, f"{trainer.ckpt_path}{_SUFFIX}")

    def _saving(self, save_checkpoint: Callable[..., None]) -> Callable[..., None]:
        """Return `Trainer.save_checkpoint` with the state: callbacks are not told the path."""

        def save(filepath: Any, weights_only: bool | None = None, *arguments: Any, **options: Any) -> None:
            self._sync()
            save_checkpoint(filepath, weights_only, *arguments, **options)
            if self.state is not None and not weights_only:
                own = rankfiles.save(self.state, f"{filepath}{_SUFFIX}")
                if Path(filepath).exists():  # else checkpoints are written elsewhere, and one that is missing here need not be gone
                    _remove_orphans(own)

        return save


class Compress(_Keeper):
    """Compress the gradients that DDP exchanges: ``Trainer(strategy="ddp", callbacks=[Compress("topr:0.01/rice/qsgd")])``.

    Takes the arguments of `deepreduce.torch.DeepReduceState`. The residuals of every rank go in a file beside each checkpoint, and are
    restored by ``fit(ckpt_path=...)``. With ``precision="16-mixed"``, they follow the loss scale of Lightning's `GradScaler`.
    Bytes and seconds of a step are logged as ``deepreduce/...``.
    """

    state: DeepReduceState

    def __init__(self, spec: Any = None, **options: Any) -> None:
        self.state = DeepReduceState(spec, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook, and restore the state where training goes on from a checkpoint."""
        scaler = _scaler(trainer)
        if scaler is not None:
            self.state.set_scaler(scaler)
        model = _model(trainer, "Compress")
        if isinstance(model, DistributedDataParallel):
            self.state.bind(model)
            model.register_comm_hook(self.state, deepreduce_hook)
        self._restore(self.state, trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the connections."""
        self.state.close()


class LocalStepsCallback(_Keeper):
    """Let the optimizer take local steps: ``Trainer(strategy="ddp", callbacks=[LocalStepsCallback(recipe="adam")])``.

    Takes the arguments of `deepreduce.torch.LocalSteps`; the `GradScaler` of ``precision="16-mixed"`` is the `scaler`. All ranks
    synchronize before a validation, before a checkpoint and at the end of every epoch, so that the model is then the same on all of
    them. What a rank has of its own goes in a file beside each checkpoint: ``fit(ckpt_path=...)`` goes on with the same bits. Bytes and
    seconds of the latest sync are logged as ``deepreduce/...``.
    """

    def __init__(self, spec: Spec | None = None, **options: Any) -> None:
        self.local: LocalSteps | None = None
        """What takes the steps; None outside of a training."""
        self._spec, self._options = spec, options

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take local steps from here on, and restore the state where training goes on from a checkpoint."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"LocalStepsCallback takes a module with one optimizer, got {len(trainer.optimizers)}")
        self._close()  # of a training that ended with an error
        model, optimizer, scaler = _model(trainer, "LocalStepsCallback"), trainer.optimizers[0], _scaler(trainer)
        self.local = LocalSteps(model, optimizer, self._spec, **{"scaler": scaler, **self._options})
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.state = rankfiles.TrainingState(self.local, model, optimizer, scaler, schedulers)
        self._restore(self.state, trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the model that all ranks have in common; the sanity check comes before all steps."""
        self._sync()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Synchronize: training may end here."""
        self._sync()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take no more local steps; a checkpoint that is saved from here on has the state of the last one."""
        self._close()

    def _sync(self) -> None:
        if self.local is not None:
            self.local.sync()

    def _close(self) -> None:
        if self.local is not None:
            self.local.close()
        self.local = None


def _model(trainer: Trainer, callback: str) -> torch.nn.Module:
    """Return the model as it is trained: one of DDP, or of a single process."""
    model: torch.nn.Module = trainer.strategy.model
    if trainer.world_size > 1 and not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"{callback} goes with strategy 'ddp', got {type(trainer.strategy).__name__}")
    return model


def _scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    """Return the `GradScaler` of ``precision="16-mixed"``."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _remove_orphans(own: Path) -> None:
    """Delete the files of this rank whose checkpoint Lightning has removed."""
    for path in own.parent.glob(f"*{_SUFFIX}{own.suffix}"):
        if path != own and not path.with_name(path.name.removesuffix(f"{_SUFFIX}{own.suffix}")).exists():
            path.unlink(missing_ok=True)
