"""The hooks for `DistributedDataParallel.register_comm_hook`, which reads their annotations: they must not be strings here."""

from concurrent.futures import Future as HostFuture
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ..errors import ConfigError
from ..step.trial import DENSE
from . import dense
from .state import DeepReduceState


def deepreduce_hook(state: DeepReduceState, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Encode, exchange and decode the gradients of a bucket off this thread; the future gives their mean over all ranks."""
    if isinstance(bucket, tuple):
        raise ConfigError(
            "torch.compile with optimize_ddp='python_reducer' gives its hooks single gradients, not the buckets of a step: "
            "set torch._dynamo.config.optimize_ddp to True or False before DistributedDataParallel is made"
        )
    buffer, mode = bucket.buffer(), state.next_mode()
    means = state.means_for(bucket, mode)
    if mode in DENSE and state.memory.is_empty:
        return dense.all_reduce(state, buffer, [], [], bucket.is_last(), mode, means)
    gradients, names = bucket.gradients(), [state.names.of(parameter) for parameter in bucket.parameters()]
    if mode in DENSE:
        return dense.all_reduce(state, buffer, names, gradients, bucket.is_last(), mode, means)
    reduced = _promised(buffer, state.reduce(names, gradients, bucket.is_last(), mode))

    def surface(reduced: Future[torch.Tensor]) -> torch.Tensor:
        return reduced.value()  # raises what the worker threads raised: DDP passes errors of a callback on to backward()

    return reduced.then(surface)


def noop_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """No communication at all: how fast a step would be on an infinitely fast network. Ranks drift apart."""
    ready: Future[torch.Tensor] = Future()
    ready.set_result(bucket.buffer())
    return ready


def _promised(buffer: torch.Tensor, work: HostFuture[None]) -> Future[torch.Tensor]:
    """A torch future of `buffer`, for when the work on it is done."""
    promise: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)

    def complete(work: HostFuture[None]) -> None:
        error = work.exception()
        if error is None:
            promise.set_result(buffer)
        else:
            promise.set_exception(error)  # type: ignore[arg-type]

    work.add_done_callback(complete)
    return promise
