"""Sums of decoded tensors, in the order given and so the same on every rank, and tensors cut and joined along their positions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from .. import steps
from ..tensor import Shape, SparseTensor, Values
from .convert import to_torch
from .source import add_sparse_
from .units import Content

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: float32 for the half precisions.

    >>> wide_dtype(torch.bfloat16)
    torch.float32
    """
    return _WIDE.get(dtype, dtype)


def widened(values: Values) -> Values:
    """Values in the dtype to add up in."""
    return values.astype(steps.wide_dtype(values.dtype), copy=False)


def shares(parts: Sequence[SparseTensor]) -> list[SparseTensor]:
    """What each rank adds to the mean. Parts are divided before they are added, as DDP does."""
    return [SparseTensor(part.indices, widened(part.values) / len(parts), part.shape) for part in parts]


def total(shares: Sequence[SparseTensor], like: Content) -> Content:
    """The sum of the shares, of the kind of `like` and in the dtype to add up in.

    >>> parts = [SparseTensor([0], np.float32([6]), (3,)), SparseTensor([0, 2], np.float32([2, 4]), (3,))]
    >>> total(shares(parts), like=torch.zeros(3))
    tensor([4., 0., 2.])
    """
    if isinstance(like, SparseTensor):
        return combined(shares)
    filled = torch.zeros(like.shape, dtype=wide_dtype(like.dtype), device=like.device)
    fill_(filled, shares)
    return filled


def fill_(tensor: torch.Tensor, shares: Sequence[SparseTensor]) -> None:
    """Write the sum of the shares over a tensor; in place where it is wide enough to add up in, and contiguous."""
    if tensor.dtype != wide_dtype(tensor.dtype) or not tensor.is_contiguous():
        tensor.copy_(total(shares, torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)))  # type: ignore[arg-type]
        return
    flat = tensor.view(-1).zero_()
    for share in shares:
        add_(flat, share)


def add_(flat: torch.Tensor, part: SparseTensor) -> None:
    """Add a sparse tensor to a flat one."""
    if part.nnz == flat.numel():
        flat.add_(to_torch(part.values).to(flat.device, flat.dtype))
    else:
        add_sparse_(flat, part)


def combined(parts: Sequence[SparseTensor]) -> SparseTensor:
    """The sum of sparse tensors of one shape; entries that cancel out are left away.

    >>> combined([SparseTensor([1, 5], np.float32([1, 2]), (6,)), SparseTensor([1, 3], np.float32([-1, 4]), (6,))]).indices
    array([3, 5])
    """
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], np.concatenate([part.values for part in parts])[order]
    starts = np.flatnonzero(np.diff(indices, prepend=-1))
    sums = np.add.reduceat(values, starts) if starts.size else values
    left = np.flatnonzero(sums)
    return SparseTensor(indices[starts][left], sums[left], parts[0].shape)


def finite(parts: Sequence[SparseTensor]) -> bool:
    """Whether there is no NaN and no Inf in any of these."""
    return all(bool(np.all(np.isfinite(part.values))) for part in parts)


# Cutting and joining


def bounds(numel: int, count: int) -> list[int]:
    """Where `count` ranges of nearly the same size begin and end.

    >>> bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [numel * place // count for place in range(count + 1)]


def piece_shape(shape: Shape, low: int, high: int) -> Shape:
    """The shape of a range: whole rows where it falls so, as index codecs make use of the shape.

    >>> piece_shape((8, 3, 3), 18, 36), piece_shape((7, 3), 5, 10)
    ((2, 3, 3), (5,))
    """
    row = int(np.prod(shape[1:], dtype=np.int64)) if shape else 1
    whole = len(shape) > 1 and row > 0 and low % row == 0 and high % row == 0
    return ((high - low) // row, *shape[1:]) if whole else (high - low,)


def sliced(content: Content, low: int, high: int, shape: Shape) -> Content:
    """The range from `low` to `high` of a tensor, in this shape; a view of a dense one."""
    if isinstance(content, torch.Tensor):
        return content.reshape(-1)[low:high].view(shape)
    return _between(content, low, high, shape)


def _between(tensor: SparseTensor, low: int, high: int, shape: Shape) -> SparseTensor:
    first, last = np.searchsorted(tensor.indices, [low, high])
    return SparseTensor(tensor.indices[first:last] - low, tensor.values[first:last], shape)


def split(tensor: SparseTensor, shapes: Sequence[Shape]) -> list[SparseTensor]:
    """The tensors of these shapes that were put one after another.

    >>> split(SparseTensor([1, 5], np.float32([1, 2]), (6,)), [(2, 2), (2,)])[1].indices
    array([1])
    """
    if [tensor.shape] == list(shapes):
        return [tensor]
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    return [_between(tensor, end - prod(shape), end, shape) for shape, end in zip(shapes, ends, strict=True)]


def joined(parts: Sequence[SparseTensor], starts: Sequence[int], shape: Shape) -> SparseTensor:
    """The tensor of which these are the ranges that begin at `starts`."""
    indices = [part.indices + start for part, start in zip(parts, starts, strict=True)]
    return SparseTensor(np.concatenate(indices), np.concatenate([part.values for part in parts]), shape)


def narrow(content: Content, dtype: Any) -> Content:
    """The same in the dtype of the gradient; what is finite stays finite.

    >>> narrow(torch.tensor([1e6, 1.0]), torch.float16)
    tensor([6.5504e+04, 1.0000e+00], dtype=torch.float16)
    """
    if isinstance(content, SparseTensor):
        return content if content.dtype == dtype else SparseTensor(content.indices, steps.narrow(content.values, dtype), content.shape)
    if content.dtype == dtype or content.numel() == 0:
        return content.to(dtype)
    largest = torch.finfo(dtype).max
    low, high = (float(bound) for bound in torch.aminmax(content))
    beyond = np.isfinite(low) and np.isfinite(high) and (low < -largest or high > largest)
    return (content.clamp(-largest, largest) if beyond else content).to(dtype)
