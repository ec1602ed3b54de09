"""Plain allreduce with the same accounting: what everything else is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.futures import Future

from ..accounting import StepStats, ring_bytes

if TYPE_CHECKING:
    from .state import DeepReduceState


def all_reduce(
    state: DeepReduceState, buffer: torch.Tensor, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool
) -> Future[torch.Tensor]:
    """The mean over all ranks by the group's own allreduce, as the hook that comes with torch does it, with all that is still owed."""
    owed = state.pay(names, gradients)
    start, step = time.perf_counter(), state.step
    state.step += 1 if last else 0
    size, summed = _all_reduced(buffer, state.process_group)

    def count(reduced: Future[list[torch.Tensor]]) -> torch.Tensor:
        dense_bytes = buffer.numel() * buffer.element_size()
        seconds = time.perf_counter() - start
        state.stats().add(StepStats(step, dense_bytes, dense_bytes, ring_bytes(dense_bytes, size), exchange_seconds=seconds), last)
        mean = reduced.value()[0]
        if owed and bool(torch.isfinite(mean).all()):  # a step with NaN or Inf in it is skipped
            state.paid(owed)
        return mean

    reduced: Future[torch.Tensor] = summed.then(count)
    return reduced


def _all_reduced(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, Future[list[torch.Tensor]]]:
    """The number of ranks, and their mean when it is there."""
    if not dist.is_initialized():
        alone: Future[list[torch.Tensor]] = Future()
        alone.set_result([buffer])
        return 1, alone
    size = dist.get_world_size(group)
    return size, dist.all_reduce(buffer.div_(size), group=group, async_op=True).get_future()
