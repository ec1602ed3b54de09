"""Residuals before a step in another mode: a step that sends everything adds them; one without owners takes over what owners hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..tensor import SparseTensor, Support
from . import sums
from .arrays import HOST, arrays_of
from .reducer import ErrorFeedback
from .residual import Gradient
from .topology import Topology


def add_residuals(
    memory: ErrorFeedback, topology: Topology, names: Sequence[str], gradients: Sequence[Gradient], rank: int, size: int
) -> dict[int, Gradient]:
    """Return, by their index, the gradients that have a residual, with it added; those that are zero throughout keep theirs.

    The residual of a mean that this rank owns counts once for every rank, as the gradients are divided by their number.
    """
    found: dict[int, Gradient] = {}
    for index, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
        has_own = memory.own is not None and name in memory.own.residuals
        has_owned = memory.owned is not None and name in memory.owned.residuals
        if not (has_own or has_owned) or (not isinstance(gradient, SparseTensor) and arrays_of(gradient).is_zero(gradient)):
            continue
        total = memory.own.flush_into(name, gradient) if memory.own is not None else gradient
        found[index] = _with_owned(memory, topology, name, total, rank, size) if has_owned else total
    return found


def move_owned_residuals(
    memory: ErrorFeedback, topology: Topology, names: Sequence[str], gradients: Sequence[Gradient], rank: int, size: int
) -> None:
    """Add the residuals of means that this rank owns to those of its own gradients: the next step has no owners."""
    for name, gradient in zip(names, gradients, strict=True):
        if memory.own is not None and memory.owned is not None and name in memory.owned.residuals:
            held = memory.own.residuals.get(name)
            total = _zeros(gradient) if held is None else held
            memory.own.residuals[name] = _with_owned(memory, topology, name, total, rank, size)
            memory.owned.drop(name)


def _zeros(like: Gradient) -> Gradient:
    if isinstance(like, SparseTensor):
        return SparseTensor.trusted(Support.none(like.numel), HOST.to_accumulation_dtype(like.values[:0]), like.shape)
    return arrays_of(like).zeros(like)


def _with_owned(memory: ErrorFeedback, topology: Topology, name: str, total: Gradient, rank: int, size: int) -> Gradient:
    owned: Any = memory.owned.residuals[name] if memory.owned is not None else None
    low, _ = topology.owned_range(name, memory.numels[name], rank, size)
    if isinstance(total, SparseTensor) and isinstance(owned, SparseTensor):
        return sums.combined([total, sums.scaled(SparseTensor(owned.indices + low, owned.values, total.shape), size)])
    arrays = arrays_of(total)
    whole = arrays.zeros(total)
    piece = arrays.between(whole, low, low + prod(owned.shape), tuple(owned.shape))
    arrays.assign_(piece, arrays.moved(owned, total))
    return arrays.add_scaled(total, [(whole, float(size))])


def drop_residuals(memory: ErrorFeedback, names: Sequence[str]) -> None:
    """Drop the residuals of these tensors: they have arrived at all ranks."""
    for name in names:
        for held in (memory.own, memory.owned):
            if held is not None:
                held.drop(name)
