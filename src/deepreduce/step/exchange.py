"""What the exchange of one bucket needs, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..tensor import SparseTensor
from .frame import FrameTag, Payload, read_frames, write_frame
from .residual import ResidualMemory
from .seeds import StepSeed
from .stopwatch import Stopwatch
from .threads import Threads
from .transport import Transport


@dataclass(frozen=True)
class ExchangeContext:
    """What the exchange of one bucket needs: transport, frame tag, seed of the step, residuals of the owned ranges (None: no error
    feedback), what a sum is divided by (the number of ranks for a mean), and the threads that share its tensors."""

    transport: Transport
    tag: FrameTag
    seed: StepSeed
    owned: ResidualMemory | None
    watch: Stopwatch
    divisor: int
    threads: Threads

    def all_gather(self, payload: Payload) -> list[memoryview]:
        """Return the messages of all ranks."""
        start, tag = perf_counter(), self.tag
        frames = self.transport.all_gather(write_frame(payload, tag), tag)
        self.watch.add("exchange", start)
        return read_frames(frames, tag, self.transport.rank, payload)

    def gather(self, payload: Payload) -> list[memoryview] | None:
        """Return the messages of all ranks at the root."""
        tag = self.tag.phase("gather")
        with self.watch("exchange"):
            frames = self.transport.gather(write_frame(payload, tag), tag)
        return None if frames is None else read_frames(frames, tag, self.transport.rank)

    def broadcast(self, payload: Payload | None) -> memoryview:
        """Return the message of the root."""
        tag = self.tag.phase("broadcast")
        with self.watch("exchange"):
            frame = self.transport.broadcast(None if payload is None else write_frame(payload, tag), tag)
        return read_frames([frame], tag, self.transport.rank, payload)[0]

    def all_to_all(self, payloads: Sequence[Payload]) -> list[memoryview]:
        """Return what every rank sent here."""
        tag = self.tag.phase("scatter")
        with self.watch("exchange"):
            frames = self.transport.all_to_all([write_frame(payload, tag) for payload in payloads], tag)
        return read_frames(frames, tag, self.transport.rank, payloads[0])


@dataclass(frozen=True)
class ExchangeResult:
    """For every tensor: what the others have of ours, and the parts that give the mean, each divided by `divisor` and added up.

    `update_owned` updates the residuals of the owners.
    """

    sent: Sequence[SparseTensor]
    parts: Sequence[Sequence[SparseTensor]]
    divisor: int
    is_finite: bool
    update_owned: Callable[[], None] | None = None
