"""Error feedback on torch tensors, on their own device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import ConfigError, InputError
from ..tensor import SparseTensor
from .convert import to_torch
from .source import add_sparse_, numpy_dtype


@dataclass
class TorchMemory:
    """`deepreduce.ResidualMemory` for tensors: the same results to the bit where no sum overflows, and nothing of the gradient's size
    leaves its device.

    `decay` is how much of the residual is carried over. `momentum` corrects for the delay as in DGC: it is accumulated before the
    selection, so the optimizer should then have none. Two tensors of a gradient's size are held for each.

    >>> memory = TorchMemory()
    >>> first = memory.compensate("w", torch.tensor([3.0, 2.0]))
    >>> memory.update("w", first, sent=SparseTensor([0], np.float32([3]), (2,)))
    >>> memory.compensate("w", torch.tensor([3.0, 2.0]))
    tensor([3., 4.])
    """

    decay: float = 1.0
    momentum: float = 0.0
    _residuals: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _velocities: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _spare: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is above 0 and at most 1, got {self.decay}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is at least 0 and below 1, got {self.momentum}")

    def compensate(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with what is owed added to it: a new tensor. Nothing is remembered before `update`."""
        gradient = gradient.detach()
        owed = self._owed(self._residuals, name, gradient, self.decay)
        if self.momentum:
            gradient = gradient + self._owed(self._velocities, name, gradient, self.momentum)
        return torch.add(gradient, owed, out=self._room(name, gradient))

    def update(self, name: str, compensated: torch.Tensor, sent: SparseTensor) -> None:
        """Remember what `compensated` has and `sent` has not. A step with NaN or Inf in it is skipped whole: it leaves no trace."""
        if sent.shape != tuple(compensated.shape):
            raise InputError(f"{name!r} has shape {tuple(compensated.shape)}, but shape {sent.shape} was sent")
        if _all_finite(compensated):
            self.remember(name, compensated.clone(), sent)

    def remember(self, name: str, compensated: torch.Tensor, sent: SparseTensor) -> None:
        """`update` for a step that is known to be finite, at the cost of what was sent: it takes `compensated` over, and writes to it.

        The residual of the step before makes room for the next sum, as fresh memory costs more than adding up.
        """
        compensated = compensated.contiguous()
        if self.momentum:
            velocity = compensated - self._owed(self._residuals, name, compensated, self.decay)
            velocity.view(-1).index_fill_(0, to_torch(sent.indices).to(velocity.device), 0)
            self._velocities[name] = velocity
        if name in self._residuals:
            self._spare[name] = self._residuals[name]
        self._residuals[name] = compensated
        add_sparse_(compensated.view(-1), sent, alpha=-1)

    def owes(self, name: str) -> bool:
        """Whether there is a residual of this name."""
        return name in self._residuals

    def forget(self, name: str) -> None:
        """Nothing is owed any more."""
        if name in self._residuals:
            self._spare[name] = self._residuals.pop(name)

    def scale_(self, factor: float) -> None:
        """Multiply all that is remembered, in place."""
        for table in (self._residuals, self._velocities):
            for held in table.values():
                held.mul_(factor)

    def _owed(self, table: dict[str, torch.Tensor], name: str, like: torch.Tensor, factor: float) -> torch.Tensor | float:
        held = table.get(name)
        if held is None:
            return 0.0
        if held.shape != like.shape or held.dtype != like.dtype:
            raise InputError(
                f"{name!r} is {like.dtype} of shape {tuple(like.shape)}, but its memory is {held.dtype} of shape {tuple(held.shape)}"
            )
        held = held.to(like.device)  # a checkpoint may have been read to another one
        return held if factor == 1 else held * float(np.asarray(factor, numpy_dtype(like.dtype)))  # rounded first, as numpy does

    def _room(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor like this one."""
        spare = self._spare.pop(name, None)
        if spare is not None and (spare.shape, spare.dtype, spare.device) == (like.shape, like.dtype, like.device):
            return spare
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of everything that is remembered, for a checkpoint."""
        return {
            "residuals": {name: held.clone() for name, held in self._residuals.items()},
            "velocities": {name: held.clone() for name, held in self._velocities.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on from a checkpoint; what was remembered before is dropped. Nothing changes if the state is not one of ours."""
        if set(state) != {"residuals", "velocities"}:
            raise InputError(f"a memory state has the keys residuals and velocities, got {sorted(state)}")
        for table in state.values():
            for name, held in table.items():
                numpy_dtype(held.dtype, f"memory of {name!r}")
        loaded = {key: {name: _plain(held) for name, held in table.items()} for key, table in state.items()}
        self._residuals, self._velocities = loaded["residuals"], loaded["velocities"]


def _all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or Inf: one pass, as a NaN makes both extremes NaN (`torch.isfinite` takes ten times as long)."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
