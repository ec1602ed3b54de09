"""Error feedback for what the hook sends: in float32 for the half precisions, sparse for sparse gradients, and along with a loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError
from ..tensor import SparseTensor
from .convert import to_numpy
from .memory import TorchMemory
from .sums import combined, narrow, wide_dtype, widened
from .units import Content


class Feedback:
    """A `TorchMemory`, or none at all, for gradients of any kind.

    >>> import numpy as np
    >>> feedback = Feedback(TorchMemory())
    >>> wide = feedback.compensate("w", torch.tensor([3.0, 2.0], dtype=torch.bfloat16))
    >>> feedback.update("w", wide, SparseTensor([0], np.float32([3]), (2,)))
    >>> feedback.compensate("w", torch.tensor([0.0, 0.0078125], dtype=torch.bfloat16))
    tensor([0.0000, 2.0078])
    """

    def __init__(self, memory: TorchMemory | None) -> None:
        self.memory = memory
        self._sparse: dict[str, SparseTensor] = {}
        self._scale = 1.0

    def compensate(self, name: str, gradient: Content) -> Content:
        """The gradient with what is owed, in the dtype to add up in. Nothing is remembered before `update`."""
        if isinstance(gradient, SparseTensor):
            return self._compensate_sparse(name, gradient)
        wide = gradient.to(wide_dtype(gradient.dtype))
        return wide if self.memory is None else self.memory.compensate(name, wide)

    def update(self, name: str, compensated: Content, sent: SparseTensor) -> None:
        """Remember what was not sent, in a step that is finite on all ranks."""
        if self.memory is None:
            return
        sent = SparseTensor(sent.indices, widened(sent.values), sent.shape)
        if isinstance(compensated, SparseTensor):
            self._sparse[name] = combined([compensated, SparseTensor(sent.indices, -sent.values, sent.shape)])
        else:
            self.memory.remember(name, compensated, sent)

    def owes(self, name: str) -> bool:
        """Whether something is owed to a dense gradient."""
        return self.memory is not None and self.memory.owes(name)

    def pay(self, name: str, gradient: torch.Tensor) -> None:
        """Add what is owed to a dense gradient that is sent whole, in place. To `forget` when it has arrived."""
        gradient.copy_(narrow(self.compensate(name, gradient), gradient.dtype))  # type: ignore[arg-type]

    def forget(self, name: str) -> None:
        """What was owed has been paid."""
        if self.memory is not None:
            self.memory.forget(name)

    def _compensate_sparse(self, name: str, gradient: SparseTensor) -> SparseTensor:
        wide = SparseTensor(gradient.indices, widened(gradient.values), gradient.shape)
        owed = self._sparse.get(name)
        if self.memory is None or owed is None:
            return wide
        if owed.shape != wide.shape:
            raise InputError(f"{name!r} has shape {wide.shape}, but its memory has shape {owed.shape}")
        return combined([wide, SparseTensor(owed.indices, owed.values * owed.dtype.type(self.memory.decay), owed.shape)])

    def rescale(self, scale: float) -> None:
        """Follow a loss scale: what is owed was made under the scale before."""
        factor, self._scale = scale / self._scale, scale
        if factor == 1.0 or self.memory is None:
            return
        self.memory.scale_(factor)
        self._sparse = {
            name: SparseTensor(owed.indices, owed.values * owed.dtype.type(factor), owed.shape) for name, owed in self._sparse.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that is remembered, as tensors."""
        sparse = {
            name: {"indices": torch.tensor(owed.indices), "values": torch.tensor(owed.values), "shape": list(owed.shape)}
            for name, owed in self._sparse.items()
        }
        dense = {} if self.memory is None else self.memory.state_dict()
        return {"dense": dense, "sparse": sparse, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        if set(state) != {"dense", "sparse", "scale"}:
            raise InputError(f"a feedback state has the keys dense, sparse and scale, got {sorted(state)}")
        if self.memory is not None:
            self.memory.load_state_dict(state["dense"] or {"residuals": {}, "velocities": {}})
        self._scale = float(state["scale"])
        self._sparse = {
            name: SparseTensor(to_numpy(owed["indices"]), to_numpy(owed["values"]), tuple(owed["shape"]))
            for name, owed in state["sparse"].items()
        }
