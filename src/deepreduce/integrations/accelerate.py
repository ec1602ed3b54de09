"""Accelerate, and the Trainer of transformers that stands on it: compressed gradients, or local steps, under DDP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType

from ..errors import ConfigError
from ..step.policy import Spec
from ..torch.hook import deepreduce_hook
from ..torch.local_steps import LocalSteps
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
        from .trainer import Keeper

        keeper = Keeper(state)
        keeper.attach(target)
        target.add_callback(keeper)
    else:
        raise ConfigError(f"compress takes an Accelerator or a transformers.Trainer, got {type(target).__name__}")


def _compress_accelerator(accelerator: Accelerator, state: DeepReduceState) -> None:
    _expect_ddp(accelerator, "compress")
    if _prepared(accelerator, "models"):
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


def local_steps(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer, spec: Spec | None = None, **options: Any
) -> LocalSteps:
    """Let an optimizer that `accelerator.prepare` has returned take local steps, with the model of it; returns what takes them.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        local = local_steps(accelerator, model, optimizer, recipe="adam")
        ...
        local.sync()  # before an evaluation, and at the end

    Takes the arguments of `deepreduce.torch.LocalSteps`; the accelerator's `GradScaler` is the `scaler`. All ranks call
    ``accelerator.save_state(folder)``, which synchronizes first, so that the model in it is the same on all ranks. What a rank has of its
    own is in ``folder/deepreduce.rank<number>``, and after ``load_state(folder)`` training goes on with the same bits.
    """
    local = take_local_steps(accelerator, model, optimizer, spec, options)
    checkpoint = _LocalCheckpoint(accelerator, local, model, optimizer)
    accelerator.register_save_state_pre_hook(checkpoint.save)
    accelerator.register_load_state_pre_hook(checkpoint.begin_load)
    accelerator.register_for_checkpointing(checkpoint)
    return local


def take_local_steps(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer, spec: Spec | None, options: Mapping[str, Any]
) -> LocalSteps:
    """Return `LocalSteps` for a model and an optimizer that are prepared; checkpoints are left to the caller."""
    _expect_ddp(accelerator, "local_steps")
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError(f"local_steps takes what accelerator.prepare(model, optimizer) returns, got {type(optimizer).__name__}")
    return LocalSteps(model, optimizer.optimizer, spec, **{"scaler": accelerator.scaler, **options})


def _expect_ddp(accelerator: Accelerator, name: str) -> None:
    if accelerator.distributed_type in _OTHER_WAYS:
        raise ConfigError(f"{name} is for DDP, and this accelerator uses {accelerator.distributed_type}; for FSDP2 see compress_fsdp")


def _prepared(accelerator: Accelerator, kind: Literal["models", "optimizers", "schedulers"]) -> list[Any]:
    """Return the models, optimizers or schedulers that an accelerator has prepared. Seen in accelerate 1.15."""
    try:
        return list(getattr(accelerator, f"_{kind}"))
    except AttributeError as error:
        import accelerate

        raise ConfigError(f"deepreduce knows the {kind} of accelerate 1.15, found {accelerate.__version__}: {error}") from error


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


class _LocalCheckpoint:
    """What an accelerator saves and loads of `LocalSteps`.

    It is written by a hook, as Accelerate saves the objects of rank 0 only, and read as such an object, as these come after the optimizers.
    """

    def __init__(self, accelerator: Accelerator, local: LocalSteps, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> None:
        self.accelerator, self.local, self.model, self.optimizer = accelerator, local, model, optimizer
        self._name = f"deepreduce_{_prepared(accelerator, 'optimizers').index(optimizer)}".removesuffix("_0")
        self._folder = ""

    def save(self, models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
        """Synchronize and write the file of this rank. The weights, which are written next, are the tensors of the model itself."""
        self.local.sync()
        rankfiles.save(self._state(), Path(folder) / self._name)

    def begin_load(self, models: list[torch.nn.Module], folder: str) -> None:
        """Take the folder, which `load_state_dict` is not told."""
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: `save` has written it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the file of this rank."""
        rankfiles.load(self._state(), Path(self._folder) / self._name)

    def _state(self) -> rankfiles.TrainingState:
        schedulers = _prepared(self.accelerator, "schedulers")
        return rankfiles.TrainingState(self.local, self.model, self.optimizer.optimizer, self.accelerator.scaler, schedulers)
