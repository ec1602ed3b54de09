"""Plain allreduce with the same accounting: what everything else is compared with, and the dense fallback of `never_slower`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.futures import Future

from ..step.flush import add_residuals, drop_residuals
from ..step.stats import StepStats, ring_bytes
from ..step.trial import SendMode
from .mean_buffers import Means
from .transport import rank_and_size
from .views import view, write_gradient

if TYPE_CHECKING:
    from .state import DeepReduceState


def all_reduce(
    state: DeepReduceState,
    buffer: torch.Tensor,
    names: Sequence[str],
    gradients: Sequence[torch.Tensor],
    last: bool,
    mode: SendMode = "dense",
    means: Means | None = None,
) -> Future[torch.Tensor]:
    """Return the mean over all ranks by the group's own allreduce, as the hooks that come with torch do it, with all residuals.

    `gradients` are those that may have a residual, by name. In mode ``"bf16"``, values of more than 16 bits travel as bfloat16: its
    range is that of float32, so that nothing becomes infinite or zero on the way. The mean replaces the buffer, or goes to
    `means`, which become the gradients then.
    """
    sent = _flush(state, names, gradients)
    start, step = time.perf_counter(), state.step
    state.step += 1 if last else 0
    size = rank_and_size(state.options.process_group)[1]
    travels = buffer.to(torch.bfloat16) if mode == "bf16" and _exceeds_16_bits(buffer) else buffer
    travels = travels.div_(size) if means is None else torch.div(travels, size, out=means.buffer)
    summed = _all_reduced(travels, state.options.process_group)

    def count(reduced: Future[list[torch.Tensor]]) -> torch.Tensor:
        dense_bytes, message_bytes = (each.numel() * each.element_size() for each in (buffer, travels))
        seconds = time.perf_counter() - start
        cost = StepStats(step, dense_bytes, message_bytes, ring_bytes(message_bytes, size), exchange_seconds=seconds)
        state.stats().add(cost, last)
        mean = reduced.value()[0]
        if sent and _is_finite(mean):  # a step with NaN or Inf in it is skipped
            drop_residuals(state.memory, sent)
        if means is not None:
            means.become_gradients()
        return mean if mean.dtype == buffer.dtype else buffer.copy_(mean)

    reduced: Future[torch.Tensor] = summed.then(count)
    return reduced


def _exceeds_16_bits(buffer: torch.Tensor) -> bool:
    return buffer.layout == torch.strided and buffer.dtype in (torch.float32, torch.float64)


@torch.no_grad()
def _flush(state: DeepReduceState, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> list[str]:
    """Add to each gradient what was not sent of it yet, in place; return the names of those that had something."""
    if state.memory.is_empty:
        return []
    state.follow_scale()
    views = [view(name, gradient) for name, gradient in zip(names, gradients, strict=True)]
    rank, size = rank_and_size(state.options.process_group)
    changed = add_residuals(state.memory, state.reducer.topology, names, views, rank, size)
    for index, total in changed.items():
        write_gradient(gradients[index], total)
    return [names[index] for index in changed]


def _is_finite(mean: torch.Tensor) -> bool:
    values = mean.coalesce().values() if mean.layout == torch.sparse_coo else mean
    return bool(torch.isfinite(values).all())


def _all_reduced(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> Future[list[torch.Tensor]]:
    """Return the sum over all ranks, in place, when it is there."""
    if not dist.is_initialized():
        alone: Future[list[torch.Tensor]] = Future()
        alone.set_result([buffer])
        return alone
    summed: Future[list[torch.Tensor]] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return summed
