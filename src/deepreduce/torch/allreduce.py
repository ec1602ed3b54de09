"""For training loops without DDP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..errors import InputError
from ..step.trial import DENSE, SendMode
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
    mode = state.next_mode()
    if mode in DENSE:
        _dense_allreduce_(labels, listed, state, last, mode)
    else:
        state.reduce_now(labels, listed, last, mode)


@torch.no_grad()
def _dense_allreduce_(names: Sequence[str], tensors: Sequence[torch.Tensor], state: DeepReduceState, last: bool, mode: SendMode) -> None:
    """Replace tensors by their means, all dense ones of a dtype and device in one buffer."""
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        together = (tensor.dtype, tensor.device) if tensor.layout == torch.strided else index
        groups.setdefault(together, []).append(index)
    started = []
    for number, group in enumerate(groups.values(), 1):
        own = [tensors[index] for index in group]
        buffer, parts = _joined(own)
        ends = last and number == len(groups)
        started.append((dense.all_reduce(state, buffer, [names[index] for index in group], parts, ends, mode), own, parts))
    for reduced, own, parts in started:
        reduced.wait()
        for tensor, part in zip(own, parts, strict=True):
            if part is not tensor:
                tensor.copy_(part)


def _joined(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return one buffer of tensors, and each of them as a part of it; a single one is its own buffer if it can be."""
    if len(tensors) == 1 and (tensors[0].layout != torch.strided or tensors[0].is_contiguous()):
        return tensors[0], tensors
    buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
    cut = buffer.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return buffer, [part.view(tensor.shape) for part, tensor in zip(cut, tensors, strict=True)]


def _checked(names: Sequence[str], count: int) -> Sequence[str]:
    if len(names) != count:
        raise InputError(f"{count} tensors, but {len(names)} names")
    if len(set(names)) != count:
        raise InputError(f"every tensor needs a name of its own, got {max(names, key=list(names).count)!r} twice")
    return list(names)


@lru_cache(maxsize=64)
def _labels(count: int) -> Sequence[str]:
    return [f"tensor {index}" for index in range(count)]
