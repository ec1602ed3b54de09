"""What a bucket needs on its way between the ranks, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..tensor import SparseTensor
from .frame import Buffer, Exchange, Failure, Payload, open_frames, seal
from .residual import ResidualMemory
from .seeds import StepSeed
from .stopwatch import Stopwatch
from .transport import Transport


@dataclass(frozen=True)
class Trip:
    """What a bucket needs on its way: the transport, the exchange, the seed of the step, what owners remember (None: nothing), and
    what a sum is divided by: the number of ranks for a mean."""

    transport: Transport
    exchange: Exchange
    seed: StepSeed
    owned: ResidualMemory | None
    watch: Stopwatch
    divisor: int

    def all_gather(self, payload: Payload) -> list[memoryview]:
        """Return the messages of all ranks."""
        start, exchange = perf_counter(), self.exchange
        frames = self.transport.all_gather(seal(payload, exchange), exchange)
        self.watch.add("exchange", start)
        return self._opened(payload, frames, exchange)

    def gather(self, payload: Payload) -> list[memoryview] | None:
        """Return the messages of all ranks at the root."""
        exchange = self.exchange.phase("gather")
        with self.watch("exchange"):
            frames = self.transport.gather(seal(payload, exchange), exchange)
        return None if frames is None else open_frames(frames, exchange, self.transport.rank)

    def broadcast(self, payload: Payload | None) -> memoryview:
        """Return the message of the root."""
        exchange = self.exchange.phase("broadcast")
        with self.watch("exchange"):
            frame = self.transport.broadcast(None if payload is None else seal(payload, exchange), exchange)
        return self._opened(payload or b"", [frame], exchange)[0]

    def all_to_all(self, payloads: Sequence[Payload]) -> list[memoryview]:
        """Return what every rank sent here."""
        exchange = self.exchange.phase("scatter")
        with self.watch("exchange"):
            frames = self.transport.all_to_all([seal(payload, exchange) for payload in payloads], exchange)
        return self._opened(payloads[0], frames, exchange)

    def _opened(self, payload: Payload, frames: Sequence[Buffer], exchange: Exchange) -> list[memoryview]:
        """Return the messages; a rank that failed raises its own error, of which all ranks know now."""
        if isinstance(payload, Failure):
            payload.raise_reported()
        return open_frames(frames, exchange, self.transport.rank)


@dataclass(frozen=True)
class Delivery:
    """For every item: what the others have of ours, and the parts that give the mean, each divided by `divisor` and added up.

    `update_owned` updates the residuals of the owners.
    """

    sent: Sequence[SparseTensor]
    parts: Sequence[Sequence[SparseTensor]]
    divisor: int
    is_finite: bool
    update_owned: Callable[[], None] | None = None
