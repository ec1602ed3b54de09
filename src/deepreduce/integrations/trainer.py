"""The Trainer of transformers: what a rank has of its own in the checkpoint folders, bytes in the log. See `accelerate.compress` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ..errors import ConfigError
from ..step.policy import Spec
from ..torch.local_steps import LocalSteps
from . import rankfiles
from .accelerate import take_local_steps


class Keeper(TrainerCallback):
    """Saves a state with every checkpoint of a trainer, restores it where training resumes, and logs its bytes."""

    def __init__(self, state: rankfiles.RankStateful | None = None) -> None:
        self.state = state
        self.folder: str | None = None
        """Where to resume from."""

    def attach(self, trainer: Trainer) -> None:
        """Take part in `train` and `log`: callbacks are told neither the folder to resume from, nor a log before it is written."""
        train, log = trainer.train, trainer.log

        def resuming(resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
            resume = get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
            self.folder = resume or None
            return train(resume_from_checkpoint, *arguments, **options)

        def logging(logs: dict[str, float], *arguments: Any, **options: Any) -> None:
            log({**logs, **self._bytes()} if "loss" in logs else logs, *arguments, **options)

        trainer.train, trainer.log = resuming, logging

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Restore the state of this rank."""
        if self.state is not None and self.folder is not None:
            rankfiles.load(self.state, Path(self.folder) / "deepreduce")

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the state of this rank."""
        if self.state is not None and not args.save_only_model:
            rankfiles.save(self.state, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / "deepreduce")

    def _bytes(self) -> dict[str, float]:
        if self.state is None:
            return {}
        last = self.state.stats().last
        return {"deepreduce_ratio": last.ratio, "deepreduce_sent_bytes": last.sent_bytes}


class LocalStepsCallback(Keeper):
    """Let the optimizer take local steps, as `LocalSteps` does.

    ::

        trainer.add_callback(LocalStepsCallback(trainer, recipe="adam"))
        trainer.train()

    Takes the arguments of `deepreduce.torch.LocalSteps`. All ranks synchronize before an evaluation, before a checkpoint and at the end
    of every epoch, so that the model of the trainer is then the same on all of them. What a rank has of its own is in the checkpoint
    folders: ``train(resume_from_checkpoint=...)`` goes on with the same bits. The log has the bytes of the latest sync.
    """

    def __init__(self, trainer: Trainer, spec: Spec | None = None, **options: Any) -> None:
        super().__init__()
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"LocalStepsCallback takes the transformers.Trainer that it is added to first, got {type(trainer).__name__}")
        self.local: LocalSteps | None = None
        """What takes the steps, from the beginning of a training on."""
        self._trainer, self._spec, self._options = trainer, spec, options
        self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take local steps from here on, after the state of this rank is restored."""
        trainer = self._trainer
        self._close()  # of a training that ended with an error
        accelerator, model, optimizer = trainer.accelerator, trainer.model_wrapped, trainer.optimizer
        self.local = take_local_steps(accelerator, model, optimizer, self._spec, self._options)
        self.state = rankfiles.TrainingState(self.local, model, optimizer.optimizer, accelerator.scaler, [trainer.lr_scheduler])
        super().on_train_begin(args, state, control, **others)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Synchronize before an evaluation or a checkpoint."""
        if self.local is not None and (control.should_evaluate or control.should_save):
            self.local.sync()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Synchronize: what follows may be an evaluation, a checkpoint or the end."""
        if self.local is not None:
            self.local.sync()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take no more local steps. The trainer may have loaded its best model by now, which stays as it is."""
        self._close()

    def _close(self) -> None:
        if self.local is not None:
            self.local.close()
