"""The operations of a step on torch tensors, on their own device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..source import Source
from ..step.arrays import Arrays, register_arrays
from ..tensor import Positions, Shape, SparseTensor, Values
from .convert import to_torch
from .source import numpy_dtype, source_of

_START = 1024
_ACCUMULATION_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_TORCH = {np.dtype(name): getattr(torch, name) for name in ("float16", "float32", "float64")}


class TorchArrays(Arrays):
    """Tensors of any device; the same bits as numpy gives.

    >>> TORCH.add_scaled(torch.tensor([1.0], dtype=torch.bfloat16), [(torch.tensor([2.0]), 0.5)])
    tensor([2.])
    """

    def dtype(self, array: torch.Tensor) -> np.dtype[Any]:
        return numpy_dtype(array.dtype)

    def source(self, array: torch.Tensor) -> Source:
        return source_of(array)

    def to_accumulation_dtype(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().to(_ACCUMULATION_DTYPES.get(array.dtype, array.dtype))

    def add_scaled(self, array: torch.Tensor, terms: Sequence[tuple[torch.Tensor, float]], out: torch.Tensor | None = None) -> torch.Tensor:
        start = self.to_accumulation_dtype(array)
        total = start.clone(memory_format=torch.contiguous_format)
        for term, factor in terms:
            total += term if factor == 1 else term * float(np.asarray(factor, self.dtype(total)))  # rounded first, as numpy does
        if terms and not _is_finite(total):
            finite = torch.isfinite(start)
            for term, _ in terms:
                finite &= torch.isfinite(term)
            largest = torch.finfo(total.dtype).max
            total = torch.where(total.isinf() & finite, torch.copysign(torch.full_like(total, largest), total), total)
        return total

    def cast_saturating(self, array: torch.Tensor, dtype: np.dtype[Any]) -> torch.Tensor:
        wanted = _TORCH.get(dtype, torch.bfloat16)
        if array.dtype == wanted or array.numel() == 0:
            return array.to(wanted)
        largest = torch.finfo(wanted).max
        low, high = (float(bound) for bound in torch.aminmax(array))
        beyond = np.isfinite(low) and np.isfinite(high) and (low < -largest or high > largest)
        return (array.clamp(-largest, largest) if beyond else array).to(wanted)

    def nonzero_where(self, array: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
        return torch.where(pattern != 0, array, 0.0)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=_ACCUMULATION_DTYPES.get(like.dtype, like.dtype), device=like.device)

    def add_(self, array: torch.Tensor, part: SparseTensor, divisor: int = 1) -> None:
        values = to_torch(part.values).to(array.device, array.dtype)
        self._add(array.view(-1), part, values if divisor == 1 else values / divisor)

    def subtract_(self, array: torch.Tensor, part: SparseTensor) -> None:
        self._add(array.view(-1), part, -to_torch(part.values).to(array.device, array.dtype))

    def _add(self, flat: torch.Tensor, part: SparseTensor, values: torch.Tensor) -> None:
        if part.support.is_all:
            flat += values
        else:
            flat.scatter_add_(0, to_torch(part.indices).to(flat.device), values)  # five times as fast on a CPU as index_add_

    def clear_(self, array: torch.Tensor, positions: Positions) -> None:
        array.view(-1).index_fill_(0, to_torch(positions).to(array.device), 0)

    def scale_(self, array: torch.Tensor, factor: float) -> None:
        array.mul_(float(np.asarray(factor, self.dtype(array))))

    def assign_(self, array: torch.Tensor, total: torch.Tensor) -> None:
        array.copy_(self.cast_saturating(total, self.dtype(array)))

    def is_zero(self, array: torch.Tensor) -> bool:
        start = array.reshape(-1)[:_START]  # hardly ever zero in a tensor that is not, and much less to read
        return not bool(start.any()) and not bool(array.any())

    def norm(self, array: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(array, dtype=torch.float64))

    def first_nonfinite(self, array: torch.Tensor) -> SparseTensor | None:
        if array.numel() == 0 or _is_finite(array):
            return None
        flat = array.reshape(-1)
        first = int(torch.isfinite(flat).logical_not().to(torch.uint8).argmax())
        return SparseTensor(np.array([first]), np.array([float(flat[first])], self.dtype(array)), tuple(array.shape))

    def between(self, array: torch.Tensor, low: int, high: int, shape: Shape) -> torch.Tensor:
        return array.reshape(-1)[low:high].view(shape)

    def concatenate(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([array.detach().reshape(-1) for array in arrays])

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().clone(memory_format=torch.contiguous_format)

    def moved(self, held: torch.Tensor | Values, like: torch.Tensor) -> torch.Tensor:
        return (held if isinstance(held, torch.Tensor) else to_torch(held)).to(like.device)


TORCH = TorchArrays()
register_arrays(torch.Tensor, TORCH)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or Inf: one pass, as a NaN makes both extremes NaN (`torch.isfinite` takes ten times as long)."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
