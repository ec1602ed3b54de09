"""Error feedback: what one step could not send is added to the next (paper, section 6.3: memory compensation)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .errors import ConfigError, InputError
from .tensor import SparseTensor, Values, float_dtype


@dataclass
class ResidualMemory:
    """Keeps, for every parameter by name, the part of its gradients that was not sent yet.

    `decay` scales the residual before it is added. With `momentum` above 0, momentum is accumulated before sparsifying, and forgotten
    where an element was sent (momentum correction and factor masking of Deep Gradient Compression); the optimizer then has none itself.

    >>> import deepreduce as dr, numpy as np
    >>> memory, codec = dr.ResidualMemory(), dr.parse("topr:1/raw/raw")
    >>> for step in range(2):
    ...     gradient = memory.compensate("w", np.float32([3, 2]))
    ...     sent = dr.decode_sparse(codec.encode(gradient))
    ...     memory.update("w", gradient, sent)
    ...     print(gradient, "sent", sent.to_dense())
    [3. 2.] sent [3. 0.]
    [3. 4.] sent [0. 4.]
    """

    decay: float = 1.0
    momentum: float = 0.0
    _residuals: dict[str, Values] = field(default_factory=dict, init=False, repr=False)
    _velocities: dict[str, Values] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is above 0 and at most 1, got {self.decay}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is at least 0 and below 1, got {self.momentum}")

    def compensate(self, name: str, gradient: Values) -> Values:
        """The gradient with what is owed added to it: a new array. Nothing is remembered before `update`.

        Where the sum of two finite numbers would be infinite, it is the largest finite number of the dtype.
        """
        gradient = _floats(name, gradient)
        if self.momentum:
            gradient = _sum(gradient, self._known(self._velocities, name, gradient) * gradient.dtype.type(self.momentum))
        return _sum(gradient, self._known(self._residuals, name, gradient) * gradient.dtype.type(self.decay))

    def update(self, name: str, compensated: Values, sent: SparseTensor) -> None:
        """Remember what `compensated` has and `sent` has not. A step with NaN or Inf in it is skipped whole: it leaves no trace."""
        if not isinstance(sent, SparseTensor):
            raise InputError(f"what was sent of {name!r} is a SparseTensor, got {type(sent).__name__}")
        compensated = _floats(name, compensated)
        if sent.shape != compensated.shape:
            raise InputError(f"{name!r} has shape {compensated.shape}, but shape {sent.shape} was sent")
        if not np.all(np.isfinite(compensated)):
            return
        if self.momentum:
            owed = self._known(self._residuals, name, compensated) * compensated.dtype.type(self.decay)
            velocity = np.array(_sum(compensated, -owed), order="C")
            velocity.reshape(-1)[sent.indices] = 0
            self._velocities[name] = velocity
        residual = np.array(compensated, order="C")
        flat = residual.reshape(-1)
        flat[sent.indices] = _sum(flat[sent.indices], -sent.values)
        self._residuals[name] = residual

    def _known(self, table: dict[str, Values], name: str, like: Values) -> Values:
        held = table.get(name)
        if held is None:
            return np.zeros(like.shape, like.dtype)
        if held.shape != like.shape or held.dtype != like.dtype:
            raise InputError(f"{name!r} is {like.dtype} of shape {like.shape}, but its memory is {held.dtype} of shape {held.shape}")
        return held

    def state_dict(self) -> dict[str, dict[str, Values]]:
        """Copies of everything that is remembered, for a checkpoint."""
        return {
            "residuals": {name: held.copy() for name, held in self._residuals.items()},
            "velocities": {name: held.copy() for name, held in self._velocities.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from a checkpoint; what was remembered before is dropped. Nothing changes if the state is not one of ours."""
        if not (isinstance(state, Mapping) and all(isinstance(table, Mapping) for table in state.values())):
            raise InputError(f"a memory state is a dict of dicts, got {type(state).__name__}")
        if set(state) != {"residuals", "velocities"}:
            raise InputError(f"a memory state has the keys residuals and velocities, got {sorted(state)}")
        loaded = {key: {name: _floats(name, held, "memory of").copy() for name, held in table.items()} for key, table in state.items()}
        self._residuals, self._velocities = loaded["residuals"], loaded["velocities"]


def _floats(name: str, given: Any, what: str = "gradient") -> Values:
    """An array of floats in the byte order of this machine; the one that was given, where it is one."""
    array = np.asarray(given)
    return array.astype(float_dtype(array.dtype, f"{what} {name!r}"), copy=False)


def _sum(a: Values, b: Values) -> Values:
    """The sum in the dtype of `a`: a new array. Finite where both are: infinity would be owed for ever."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.asarray(a + b).astype(a.dtype, copy=False)
    if np.all(np.isfinite(total)):
        return total
    largest = ml_dtypes.finfo(a.dtype).max  # type: ignore[no-untyped-call]
    return np.where(np.isinf(total) & np.isfinite(a) & np.isfinite(b), np.copysign(largest, total), total)
