"""What is noted of every step beside the statistics of deepreduce. DDP reads the annotations of a hook: they must not be strings here."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future

from ...step.exchange import ExchangeContext, ExchangeResult
from ...step.frame import Failure
from ...step.items import EncodedMessage, OutgoingTensor
from ...step.seeds import StepSeed
from ...step.stats import StepStats, ring_bytes
from ...step.stopwatch import Stopwatch
from ...step.threads import ONE_THREAD, Threads
from ...step.topology import Topology
from ...step.transport import Transport
from ...torch import DeepReduceState, deepreduce_hook
from ...torch.transport import Gloo


class Probe:
    """Notes when the gradients of a step were ready, the exchanges of an allreduce, and how many elements are zero in one early step.

    The seconds of every allreduce go to the end of `exchanges`.
    """

    def __init__(self, probed_step: int, exchanges: list[float]) -> None:
        self.ready_at, self._exchanges = 0.0, exchanges
        self._probed_step, self._zeros, self._counted = probed_step, 0, 0
        self._busy_until = 0.0

    def hook(self, state: DeepReduceState, bucket: GradBucket) -> Future[torch.Tensor]:
        """For `register_comm_hook`."""
        self._note_ready(state.step, bucket.buffer())
        reduced = deepreduce_hook(state, bucket)
        return reduced if not state.options.dense else self._timed(reduced, self.ready_at)

    def fp16_hook(self, state: DeepReduceState, bucket: GradBucket) -> Future[torch.Tensor]:
        """PyTorch's hook for gradients in half precision, counted in the statistics of a state as its own steps are."""
        self._note_ready(state.step, bucket.buffer())
        start, last, numel, step = self.ready_at, bucket.is_last(), bucket.buffer().numel(), state.step
        dense_bytes, message_bytes = numel * bucket.buffer().element_size(), numel * torch.float16.itemsize
        state.step += 1 if last else 0

        def count(reduced: Future[torch.Tensor]) -> torch.Tensor:
            sent_bytes = ring_bytes(message_bytes, dist.get_world_size())
            cost = StepStats(step, dense_bytes, message_bytes, sent_bytes, exchange_seconds=time.perf_counter() - start)
            state.stats().add(cost, last)
            return reduced.value()

        reduced = fp16_compress_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
        return self._timed(reduced.then(count), start)

    def _note_ready(self, step: int, buffer: torch.Tensor) -> None:
        if step == self._probed_step:
            self._zeros += buffer.numel() - int(torch.count_nonzero(buffer))
            self._counted += buffer.numel()
        self.ready_at = time.perf_counter()

    def _timed(self, reduced: Future[torch.Tensor], start: float) -> Future[torch.Tensor]:
        """Buckets of an allreduce share the link: a moment in which two are under way counts once."""

        def note(reduced: Future[torch.Tensor]) -> torch.Tensor:
            end = time.perf_counter()
            self._exchanges.append(max(0.0, end - max(start, self._busy_until)))
            self._busy_until = max(end, self._busy_until)
            return reduced.value()

        return reduced.then(note)

    @property
    def zeros(self) -> float:
        """The share of zeros in the gradient of the probed step, before anything is left out."""
        return self._zeros / self._counted if self._counted else 0.0


class Paced(Stopwatch):
    """Lets nobody go on before all are through an exchange, and does not count that.

    Workers that share the cores of one machine would otherwise decode while others still exchange, and take the processor from them: on
    links of their own they have machines of their own.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._gloo = transport.backend if isinstance(transport, Gloo) else None

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        with super().__call__(part):
            yield
        self._pace(part)

    def add(self, part: str, start: float) -> None:
        super().add(part, start)
        self._pace(part)

    def _pace(self, part: str) -> None:
        if part == "exchange" and self._gloo is not None:
            self._gloo.barrier().wait()


@dataclass(frozen=True)
class Watched(Topology):
    """Another topology, with the seconds of every single exchange put into `exchanges`; `paced` for workers on shaped links."""

    name: ClassVar[str] = "watched"
    inner: Topology
    paced: bool
    exchanges: list[float] = field(repr=False)

    @property
    def has_owners(self) -> bool:  # type: ignore[override]
        """As the topology inside."""
        return self.inner.has_owners

    def encode(
        self, tensors: Sequence[OutgoingTensor], seed: StepSeed, size: int, threads: Threads = ONE_THREAD
    ) -> Sequence[EncodedMessage]:
        return self.inner.encode(tensors, seed, size, threads)

    def fail(self, failure: Failure, context: ExchangeContext) -> None:
        self.inner.fail(failure, context)

    def owned_range(self, name: str, numel: int, rank: int, size: int) -> tuple[int, int]:
        return self.inner.owned_range(name, numel, rank, size)

    def exchange(self, tensors: Sequence[OutgoingTensor], messages: Sequence[EncodedMessage], context: ExchangeContext) -> ExchangeResult:
        watch = Paced(context.transport) if self.paced else Stopwatch()
        result = self.inner.exchange(tensors, messages, replace(context, watch=watch))
        self.exchanges.append(watch.seconds["exchange"])
        for part, seconds in watch.seconds.items():
            context.watch.seconds[part] += seconds
        return result
