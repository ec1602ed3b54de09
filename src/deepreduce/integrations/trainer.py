"""The Trainer of transformers: residuals in its checkpoint folders, bytes in its log. See `accelerate.compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ..torch.state import DeepReduceState
from . import rankfiles


def keep_in_checkpoints(trainer: Trainer, state: DeepReduceState) -> None:
    """Save a state with every checkpoint of a trainer, restore it where `train(resume_from_checkpoint=...)` resumes, and log its bytes."""
    keeper, train, log = _Keeper(state), trainer.train, trainer.log

    def resuming(resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        resume = get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        keeper.folder = resume or None
        return train(resume_from_checkpoint, *arguments, **options)

    def logging(logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        last = state.stats().last
        ours = {"deepreduce_ratio": last.ratio, "deepreduce_sent_bytes": last.sent_bytes}
        log({**logs, **ours} if "loss" in logs else logs, *arguments, **options)

    # Callbacks are told neither the folder to resume from, nor a log before it is written.
    trainer.train, trainer.log = resuming, logging
    trainer.add_callback(keeper)


class _Keeper(TrainerCallback):
    """Saves and restores a state, on every rank."""

    def __init__(self, state: DeepReduceState) -> None:
        self.state = state
        self.folder: str | None = None
        """Where to resume from."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.folder is not None:
            rankfiles.load(self.state, Path(self.folder) / "deepreduce")

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not args.save_only_model:
            rankfiles.save(self.state, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / "deepreduce")
