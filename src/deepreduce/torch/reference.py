"""Plain allreduce with the same accounting: what everything else is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.futures import Future

from ..accounting import StepStats

if TYPE_CHECKING:
    from .state import DeepReduceState


def all_reduce(
    state: DeepReduceState, buffer: torch.Tensor, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool
) -> Future[torch.Tensor]:
    """The mean over all ranks by the group's own allreduce, as the hook that comes with torch does it, with all that is still owed."""
    state.pay(names, gradients)
    size = dist.get_world_size(state.process_group)
    start, step = time.perf_counter(), state.step
    state.step += 1 if last else 0
    work = dist.all_reduce(buffer.div_(size), group=state.process_group, async_op=True)

    def count(reduced: Future[list[torch.Tensor]]) -> torch.Tensor:
        dense_bytes = buffer.numel() * buffer.element_size()
        ring_bytes = 2 * (size - 1) * dense_bytes // size
        state.stats().add(StepStats(step, dense_bytes, dense_bytes, ring_bytes, exchange_seconds=time.perf_counter() - start), last)
        return reduced.value()[0]

    reduced: Future[torch.Tensor] = work.get_future().then(count)
    return reduced
