"""The state of every rank in a file of its own: residuals and, with local steps, parameters and moments differ from rank to rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..errors import InputError
from ..step.stats import Stats
from ..torch.local_steps import LocalSteps
from ..torch.names import unwrapped
from ..torch.transport import rank_and_size


class RankStateful(Protocol):
    """A state that each rank saves and loads by itself, and what its exchanges cost."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rank."""

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest exchanges."""


def save(state: RankStateful, prefix: str | os.PathLike[str]) -> Path:
    """Write the state of this rank to ``prefix.rank<number>``, whole or not at all; returns the path."""
    path = _path(prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    torch.save(state.state_dict(), unfinished)
    unfinished.replace(path)
    return path


def load(state: RankStateful, prefix: str | os.PathLike[str]) -> None:
    """Go on from what `save` wrote for this rank.

    >>> import tempfile
    >>> from deepreduce.torch import DeepReduceState
    >>> with tempfile.TemporaryDirectory() as folder, DeepReduceState("topr:0.01/raw/fp16") as state:
    ...     print(save(state, Path(folder) / "deepreduce").name)
    ...     load(state, Path(folder) / "deepreduce")
    deepreduce.rank0
    """
    path = _path(prefix)
    if not path.exists():
        raise InputError(
            f"the checkpoint has no {path}, with the state of this rank: it was made without deepreduce, or by fewer ranks "
            "(`deepreduce.torch.reshard` makes the states of all ranks into those of another number of ranks)"
        )
    state.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


class TrainingState:
    """All that differs from rank to rank where an optimizer takes local steps; tools save that of rank 0 alone.

    These are the parameters that are trained, the buffers of floats, the optimizer and `LocalSteps`; and the `GradScaler` and the
    learning rate schedulers, as a step may be skipped on one rank alone.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with LocalSteps(model, optimizer, recipe="adam") as local:
    ...     state = TrainingState(local, model, optimizer)
    ...     sorted(state.state_dict())
    ['local', 'optimizer', 'tensors']
    """

    def __init__(
        self,
        local: LocalSteps,
        model: torch.nn.Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        schedulers: Iterable[Any] = (),
    ) -> None:
        self._local, self._model = local, unwrapped(model)
        self._parts: dict[str, Any] = {"local": local, "optimizer": optimizer}
        self._parts |= {f"scheduler {index}": scheduler for index, scheduler in enumerate(schedulers)}
        if scaler is not None:
            self._parts["scaler"] = scaler

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest syncs."""
        return self._local.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        trained = {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        kept = trained | {name for name, buffer in self._model.named_buffers() if buffer.is_floating_point()}
        tensors = {name: tensor for name, tensor in self._model.state_dict().items() if name in kept}
        return {"tensors": tensors} | {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rank, after the tool has restored its own."""
        expected = {"tensors", *self._parts}
        if set(state) != expected:
            raise InputError(f"the state of a rank has {', '.join(sorted(expected))}; got {', '.join(sorted(state))}")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        unknown = self._model.load_state_dict(state["tensors"], strict=False).unexpected_keys
        if unknown:
            raise InputError(f"the state has {unknown[0]}, which the model has not")


def _path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.rank{rank_and_size(None)[0]}")
