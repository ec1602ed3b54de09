"""For training loops without DDP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..errors import InputError
from ..step.trial import DENSE
from . import dense
from .state import DeepReduceState


def allreduce_(
    tensors: torch.Tensor | Sequence[torch.Tensor], state: DeepReduceState, names: Sequence[str] | None = None, *, last: bool = True
) -> None:
    """Replace gradients, dense or sparse COO, by their mean over all ranks; returns when it is done. One call is one step.

    Error feedback belongs to the index in the list, or to `names` if given. A step of several calls has names, and `last=False` in all of
    them but the last, or in all, and `state.end_step()` after them.

    >>> gradient = torch.tensor([3.0, -1.0, 2.0])
    >>> allreduce_(gradient, DeepReduceState("topr:1/raw/raw", small_tensor_numel=0))
    >>> gradient
    tensor([3., 0., 0.])
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    labels = _labels(len(listed)) if names is None else _checked(names, len(listed))
    if names is None and not last:
        raise InputError("a step of several calls needs names: error feedback belongs to them, and not to an index that calls share")
    for label, tensor in zip(labels, listed, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{label} is {tensor!r}, not a tensor: leave out a parameter without a gradient on all ranks, or give zeros")
    way = state.way()
    if way not in DENSE:
        state.reduce_now(labels, listed, last, way)
    else:
        ends = [last and index == len(listed) - 1 for index in range(len(listed))]
        started = [dense.all_reduce(state, *given, way) for given in zip(listed, zip(labels), zip(listed), ends, strict=True)]
        for reduced in started:
            reduced.wait()


def _checked(names: Sequence[str], count: int) -> Sequence[str]:
    if len(names) != count:
        raise InputError(f"{count} tensors, but {len(names)} names")
    if len(set(names)) != count:
        raise InputError(f"every tensor needs a name of its own, got {max(names, key=list(names).count)!r} twice")
    return list(names)


@lru_cache(maxsize=64)
def _labels(count: int) -> Sequence[str]:
    return [f"tensor {index}" for index in range(count)]
