"""Gradients of torch as a step sees them: host arrays without a copy, tensors of a device as they are, COO tensors as sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ..errors import InputError
from ..pipeline import raise_named
from ..step import sums
from ..step.arrays import HOST, arrays_of
from ..tensor import SparseTensor
from . import arrays as _arrays  # noqa: F401  (registers the operations for tensors of a device)
from .convert import to_numpy
from .coo import coo_like
from .source import numpy_dtype, sparse_of


def view(name: str, gradient: torch.Tensor) -> Any:
    """Return the gradient for a step; it shares its memory. An error names it."""
    try:
        numpy_dtype(gradient.dtype)  # refuses what is not a float
        if gradient.layout == torch.sparse_coo:
            return sparse_of(gradient)
        if gradient.layout != torch.strided:
            raise InputError(f"a gradient is a strided or a sparse COO tensor, got layout {gradient.layout}")
        return to_numpy(gradient) if gradient.is_cpu else gradient.detach()
    except Exception as error:
        raise_named(error, name)


def write_mean(gradient: torch.Tensor, seen: Any, parts: Sequence[SparseTensor], divisor: int) -> None:
    """Write the sum of sparse tensors, each divided by a number, over a gradient of which `view` made `seen`, in place."""
    if isinstance(seen, SparseTensor):
        with torch.no_grad():
            gradient.zero_().add_(coo_like(gradient, sums.combined([sums.divided(part, divisor) for part in parts])))
    else:
        arrays_of(seen).fill_(seen, parts, divisor)


def write_gradient(gradient: torch.Tensor, total: Any) -> None:
    """Write what `view` gave, or a sum of the same kind, over a gradient, in place."""
    if isinstance(total, SparseTensor):
        with torch.no_grad():
            gradient.zero_().add_(coo_like(gradient, total))
    elif gradient.device.type == "cpu":
        HOST.assign_(to_numpy(gradient), total)
    else:
        arrays_of(gradient).assign_(gradient, total)


def wait_for(gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that waits until the devices have computed these gradients."""
    devices = set(map(_DEVICE, gradients))
    if devices <= _HOST:
        return _ready
    return partial(_wait, [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"])


def _wait(events: Sequence[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


def _ready() -> None:
    """Host memory is ready when it is given."""


_DEVICE = attrgetter("device")
_HOST = frozenset([torch.device("cpu")])
