"""Lightning: a callback that compresses the gradients of ``strategy="ddp"``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from ..torch.hook import deepreduce_hook
from ..torch.state import DeepReduceState
from . import rankfiles

_SUFFIX = ".deepreduce"


class Compress(Callback):
    """Compress the gradients that DDP exchanges: ``Trainer(strategy="ddp", callbacks=[Compress("topr:0.01/rice/qsgd")])``.

    Takes the arguments of `deepreduce.torch.DeepReduceState`. The residuals of every rank go in a file beside each checkpoint, and are
    restored by ``fit(ckpt_path=...)``. With ``precision="16-mixed"``, they follow the loss scale of Lightning's `GradScaler`.
    Bytes and seconds of a step are logged as ``deepreduce/...``.
    """

    def __init__(self, spec: Any = None, **options: Any) -> None:
        self.state = DeepReduceState(spec, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the state with every checkpoint from here on."""
        if stage == "fit" and isinstance(trainer.save_checkpoint, MethodType):  # not yet, in an earlier fit
            trainer.save_checkpoint = self._saving(trainer.save_checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook, and restore the state where training goes on from a checkpoint."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # "16-mixed" has one
        if scaler is not None:
            self.state.set_scaler(scaler)
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            self.state.bind(model)
            model.register_comm_hook(self.state, deepreduce_hook)
        elif trainer.world_size > 1:
            raise ConfigError(f"Compress goes with strategy 'ddp', got {type(trainer.strategy).__name__}")
        if trainer.ckpt_path is not None:
            rankfiles.load(self.state, f"{trainer.ckpt_path}{_SUFFIX}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *step: Any) -> None:
        """Log what the latest step cost this rank."""
        pl_module.log_dict({f"deepreduce/{name}": float(number) for name, number in self.state.stats().last.scalars().items()})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the connections."""
        self.state.close()

    def _saving(self, save_checkpoint: Callable[..., None]) -> Callable[..., None]:
        """Return `Trainer.save_checkpoint` with the state: callbacks are not told the path."""

        def save(filepath: Any, weights_only: bool | None = None, *arguments: Any, **options: Any) -> None:
            save_checkpoint(filepath, weights_only, *arguments, **options)
            if not weights_only:
                own = rankfiles.save(self.state, f"{filepath}{_SUFFIX}")
                if Path(filepath).exists():  # else checkpoints are written elsewhere, and one that is missing here need not be gone
                    _remove_orphans(own)

        return save


def _remove_orphans(own: Path) -> None:
    """Delete the files of this rank whose checkpoint Lightning has removed."""
    for path in own.parent.glob(f"*{_SUFFIX}{own.suffix}"):
        if path != own and not path.with_name(path.name.removesuffix(f"{_SUFFIX}{own.suffix}")).exists():
            path.unlink(missing_ok=True)
