"""Plain allreduce with the same accounting: what everything else is compared with, and the dense fallback of `never_slower`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.futures import Future

from ..step.flush import flushed, settled
from ..step.stats import StepStats, ring_bytes
from .views import view, write_gradient

if TYPE_CHECKING:
    from .state import DeepReduceState


def all_reduce(
    state: DeepReduceState, buffer: torch.Tensor, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool
) -> Future[torch.Tensor]:
    """Return the mean over all ranks by the group's own allreduce, as the hook that comes with torch does it, with all residuals."""
    sent = _flush(state, names, gradients)
    start, step = time.perf_counter(), state.step
    state.step += 1 if last else 0
    size, summed = _all_reduced(buffer, state.options.process_group)

    def count(reduced: Future[list[torch.Tensor]]) -> torch.Tensor:
        dense_bytes = buffer.numel() * buffer.element_size()
        seconds = time.perf_counter() - start
        state.stats().add(StepStats(step, dense_bytes, dense_bytes, ring_bytes(dense_bytes, size), exchange_seconds=seconds), last)
        mean = reduced.value()[0]
        if sent and _is_finite(mean):  # a step with NaN or Inf in it is skipped
            settled(state.memory, sent)
        return mean

    reduced: Future[torch.Tensor] = summed.then(count)
    return reduced


@torch.no_grad()
def _flush(state: DeepReduceState, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> list[str]:
    """Add to each gradient what was not sent of it yet, in place; return the names of those that had something."""
    if state.memory.is_empty:
        return []
    state.follow_scale()
    views = [view(name, gradient) for name, gradient in zip(names, gradients, strict=True)]
    transport = state.transport
    changed = flushed(state.memory, state.reducer.topology, names, views, transport.rank, transport.size)
    for index, total in changed.items():
        write_gradient(gradients[index], total)
    return [names[index] for index in changed]


def _is_finite(mean: torch.Tensor) -> bool:
    values = mean.coalesce().values() if mean.layout == torch.sparse_coo else mean
    return bool(torch.isfinite(values).all())


def _all_reduced(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, Future[list[torch.Tensor]]]:
    """The number of ranks, and their mean when it is there."""
    if not dist.is_initialized():
        alone: Future[list[torch.Tensor]] = Future()
        alone.set_result([buffer])
        return 1, alone
    size = dist.get_world_size(group)
    return size, dist.all_reduce(buffer.div_(size), group=group, async_op=True).get_future()
