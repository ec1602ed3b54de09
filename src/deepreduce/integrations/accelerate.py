"""Accelerate, and the Trainer of transformers that stands on it: compressed gradients under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType

from ..errors import ConfigError
from ..torch.hook import deepreduce_hook
from ..torch.state import DeepReduceState
from . import rankfiles

_OTHER_WAYS = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


def compress(target: Any, state: DeepReduceState) -> None:
    """Compress the gradients of an `Accelerator`, before `prepare`, or of a `transformers.Trainer`, before `train`.

    ::

        compress(accelerator, DeepReduceState("topr:0.01/rice/qsgd"))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    The residuals of every rank are part of `accelerator.save_state` and `load_state`. With a trainer they are in its checkpoint folders,
    and `resume_from_checkpoint` restores them; the trainer's log has the bytes.
    """
    if isinstance(target, Accelerator):
        _compress_accelerator(target, state)
    elif isinstance(getattr(target, "accelerator", None), Accelerator) and hasattr(target, "add_callback"):
        _compress_accelerator(target.accelerator, state)
        from .trainer import keep_in_checkpoints

        keep_in_checkpoints(target, state)
    else:
        raise ConfigError(f"compress takes an Accelerator or a transformers.Trainer, got {type(target).__name__}")


def _compress_accelerator(accelerator: Accelerator, state: DeepReduceState) -> None:
    if accelerator.distributed_type in _OTHER_WAYS:
        raise ConfigError(f"compress is for DDP, and this accelerator uses {accelerator.distributed_type}; for FSDP2 see compress_fsdp")
    if _prepared(accelerator):
        raise ConfigError("compress comes before accelerator.prepare(model), and a model is prepared already")
    given = accelerator.ddp_handler or DistributedDataParallelKwargs()
    hook = "deepreduce" if isinstance(given, _Handler) else given.comm_hook
    if hook != DDPCommunicationHookType.NO:
        raise ConfigError(f"the accelerator has a communication hook already, {hook}: DDP takes one")
    if accelerator.scaler is not None:
        state.set_scaler(accelerator.scaler)
    accelerator.ddp_handler = _Handler(given, state)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: _save(state, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: rankfiles.load(state, Path(folder) / "deepreduce"))


def _prepared(accelerator: Accelerator) -> list[torch.nn.Module]:
    """Return the models that an accelerator has prepared. Seen in accelerate 1.15."""
    try:
        return list(accelerator._models)
    except AttributeError as error:
        import accelerate

        raise ConfigError(f"deepreduce knows the models of accelerate 1.15, found {accelerate.__version__}: {error}") from error


def _save(state: DeepReduceState, folder: str) -> None:
    rankfiles.save(state, Path(folder) / "deepreduce")


class _Handler:
    """What an accelerator asks its DDP handler for: the options of DDP, and a hook on the model that it made."""

    def __init__(self, given: Any, state: DeepReduceState) -> None:
        self.given, self.state = given, state

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for DistributedDataParallel."""
        kwargs: dict[str, Any] = self.given.to_kwargs()
        return kwargs

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Put the hook on a model under DDP."""
        self.state.bind(model)
        model.register_comm_hook(self.state, deepreduce_hook)  # type: ignore[operator]
