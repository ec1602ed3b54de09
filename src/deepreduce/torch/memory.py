"""Error feedback on torch tensors, on their own device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import ConfigError, InputError
from ..sparse import SparseTensor
from .convert import to_torch
from .source import add_sparse_, numpy_dtype


@dataclass
class TorchMemory:
    """`deepreduce.ResidualMemory` for tensors: the same results to the bit, and nothing of the gradient's size leaves its device.

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

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is above 0 and at most 1, got {self.decay}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is at least 0 and below 1, got {self.momentum}")

    def compensate(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with what is owed added to it: a new tensor. Nothing is remembered before `update`."""
        gradient = gradient.detach()
        if self.momentum:
            gradient = gradient + self._scaled(self._velocities, name, gradient, self.momentum)
        return gradient + self._scaled(self._residuals, name, gradient, self.decay)

    def update(self, name: str, compensated: torch.Tensor, sent: SparseTensor) -> None:
        """Remember what `compensated` has and `sent` has not. A step with NaN or Inf in it is skipped whole: it leaves no trace."""
        if sent.shape != tuple(compensated.shape):
            raise InputError(f"{name!r} has shape {tuple(compensated.shape)}, but shape {sent.shape} was sent")
        if not _all_finite(compensated):
            return
        if self.momentum:
            velocity = compensated - self._scaled(self._residuals, name, compensated, self.decay)
            forgotten = to_torch(sent.indices).to(velocity.device)
            _remembered(self._velocities, name, velocity).index_fill_(0, forgotten, 0)
        add_sparse_(_remembered(self._residuals, name, compensated), sent, alpha=-1)

    def _scaled(self, table: dict[str, torch.Tensor], name: str, like: torch.Tensor, factor: float) -> torch.Tensor | float:
        held = table.get(name)
        if held is None:
            return 0.0
        if held.shape != like.shape or held.dtype != like.dtype:
            raise InputError(
                f"{name!r} is {like.dtype} of shape {tuple(like.shape)}, but its memory is {held.dtype} of shape {tuple(held.shape)}"
            )
        # A checkpoint may have been read to another device. The factor is rounded to the dtype first, as numpy does.
        return held.to(like.device) * float(np.asarray(factor, numpy_dtype(like.dtype)))

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


def _remembered(table: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Put a copy into the table, in the memory of the old one where it fits, and give a flat view of it."""
    held = table.get(name)
    if held is None or (held.shape, held.dtype, held.device) != (tensor.shape, tensor.dtype, tensor.device):
        held = table[name] = _plain(tensor)
    else:
        held.copy_(tensor)
    return held.view(-1)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
