"""Gradients of torch as a step sees them: host arrays without a copy, tensors of a device as they are, COO tensors as sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..step import sums
from ..step.arrays import HOST, arrays_of
from ..step.items import naming
from ..tensor import SparseTensor
from . import arrays as _arrays  # noqa: F401  (registers the operations for tensors of a device)
from .convert import to_numpy
from .coo import coo_like
from .source import numpy_dtype, sparse_of


def view(name: str, gradient: torch.Tensor) -> Any:
    """Return the gradient for a step; it shares its memory. An error names it."""
    with naming(name):
        numpy_dtype(gradient.dtype)  # refuses what is not a float
        if gradient.layout == torch.sparse_coo:
            return sparse_of(gradient)
        return to_numpy(gradient) if gradient.device.type == "cpu" else gradient.detach()


def write_mean(gradient: torch.Tensor, parts: Sequence[SparseTensor], divisor: int) -> None:
    """Write the sum of sparse tensors, each divided by a number, over a gradient, in place."""
    if gradient.layout == torch.sparse_coo:
        gradient.zero_().add_(coo_like(gradient, sums.combined([sums.divided(part, divisor) for part in parts])))
    elif gradient.device.type == "cpu":
        HOST.fill_(to_numpy(gradient), parts, divisor)
    else:
        arrays_of(gradient).fill_(gradient, parts, divisor)


def write_gradient(gradient: torch.Tensor, total: Any) -> None:
    """Write what `view` gave, or a sum of the same kind, over a gradient, in place."""
    if isinstance(total, SparseTensor):
        gradient.zero_().add_(coo_like(gradient, total))
    elif gradient.device.type == "cpu":
        HOST.assign_(to_numpy(gradient), total)
    else:
        arrays_of(gradient).assign_(gradient, total)


def wait_for(gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return what to wait for, so that gradients are not read while a device is still computing them."""
    if not gradients or not gradients[0].is_cuda:
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def follow(gradients: Sequence[torch.Tensor]) -> None:
    """Let the stream of this thread wait for what other threads, which work on the default stream, wrote over gradients of a device."""
    if gradients and gradients[0].is_cuda:
        device = gradients[0].device
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
