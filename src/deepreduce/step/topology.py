"""How the messages of all ranks become one mean, which all ranks decode from the same bytes in the same order.

`AllGather` sends every message to every rank. `Server` and `Sharded` have owners that add up what they are sent and encode the sum again,
with error feedback of their own: one root for everything, or every rank for a range of every tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import ceil
from time import perf_counter
from typing import ClassVar, NoReturn

import numpy as np

from ..errors import ConfigError, FormatError
from ..indices.seeded import Seeded
from ..parameters import shown
from ..tensor import SparseTensor, Support
from . import items, sums
from .arrays import arrays_of
from .frame import Buffer, Exchange, Failure, Payload, PeerFailure, open_frames, seal
from .items import Encoded, Item
from .residual import Gradient, ResidualMemory
from .seeds import StepSeed
from .stopwatch import Stopwatch
from .transport import ROOT, Transport


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

    def all_gather(self, payload: Payload, phase: str = "gather") -> list[memoryview]:
        """Return the messages of all ranks."""
        exchange = self.exchange.phase(phase)
        with self.watch("exchange"):
            frames = self.transport.all_gather(seal(payload, exchange), exchange)
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
        """Return the messages; a rank that failed raises its own error, not what the others make of it."""
        if isinstance(payload, Failure):
            raise payload.error
        return open_frames(frames, exchange, self.transport.rank)


@dataclass(frozen=True)
class Delivery:
    """For every item: what the others have of ours, and the parts that give the mean, each divided by `divisor` and added up.

    `settle` updates what owners remember.
    """

    sent: Sequence[SparseTensor]
    parts: Sequence[Sequence[SparseTensor]]
    divisor: int
    is_finite: bool
    settle: Callable[[], None] = field(default=lambda: None)


class Topology(ABC):
    """One way to exchange."""

    name: ClassVar[str]
    has_owners: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    """How many exchanges follow one another in a step."""

    def encode(self, tensors: Sequence[Item], seed: StepSeed, size: int) -> Sequence[Encoded]:
        """Return the messages of a bucket; this runs beside the exchange of the bucket before."""
        return [items.encode(tensors, seed)]

    @abstractmethod
    def exchange(self, tensors: Sequence[Item], messages: Sequence[Encoded], trip: Trip) -> Delivery:
        """Exchange and decode."""

    @abstractmethod
    def fail(self, failure: Failure, trip: Trip) -> None:
        """Tell all ranks that this one has no messages, in the exchange that they are in."""

    def owned_range(self, numel: int, rank: int, size: int) -> tuple[int, int]:
        """Return the range of a tensor that a rank owns."""
        return 0, 0


@dataclass(frozen=True)
class AllGather(Topology):
    """`allgather`: every rank sends its message to all others and adds up what it gets. One loss, one trip; volume grows with the ranks."""

    name: ClassVar[str] = "allgather"

    def exchange(self, tensors: Sequence[Item], messages: Sequence[Encoded], trip: Trip) -> Delivery:
        received = trip.all_gather(messages[0].blob)
        start = perf_counter()
        by_rank = items.decode_all(received, messages[0], trip.transport.rank)
        delivery = Delivery(
            by_rank[trip.transport.rank], list(zip(*by_rank, strict=True)), trip.divisor, sums.is_finite(list(chain.from_iterable(by_rank)))
        )
        trip.watch.add("decode", start)
        return delivery

    def fail(self, failure: Failure, trip: Trip) -> None:
        trip.all_gather(failure)


@dataclass(frozen=True)
class Server(Topology):
    """`server`: rank 0 gathers, adds up, encodes the mean with everything that was sent, and broadcasts it."""

    name: ClassVar[str] = "server"
    has_owners: ClassVar[bool] = True
    rounds: ClassVar[int] = 2

    def exchange(self, tensors: Sequence[Item], messages: Sequence[Encoded], trip: Trip) -> Delivery:
        try:
            received: list[memoryview] | None = trip.gather(messages[0].blob)
        except (FormatError, PeerFailure) as error:
            self._refuse(Failure(error), trip)
        owner = None if received is None else Owner.reduce(tensors, received, trip, [None] * len(tensors))
        blob = trip.broadcast(owner.blob if isinstance(owner, Owner) else owner)
        with trip.watch("decode"):
            sent, means = messages[0].decoded(trip.transport.rank), items.decode(blob, tensors, ROOT)
        settle = (lambda: owner.settle(means)) if isinstance(owner, Owner) else (lambda: None)
        return Delivery(sent, [[mean] for mean in means], 1, sums.is_finite(means), settle)

    def fail(self, failure: Failure, trip: Trip) -> None:
        trip.gather(failure)
        trip.broadcast(failure if trip.transport.rank == ROOT else None)

    def _refuse(self, failure: Failure, trip: Trip) -> NoReturn:
        """Tell the ranks that wait for the mean why there is none."""
        trip.broadcast(failure)
        raise failure.error

    def owned_range(self, numel: int, rank: int, size: int) -> tuple[int, int]:
        return (0, numel) if rank == ROOT else (0, 0)


@dataclass(frozen=True)
class Sharded(Topology):
    """`sharded`: every rank owns a range of every tensor, adds up what the others send for it, and sends the strongest of the sum to all.

    `budget` is what a rank sends, in multiples of its own message, however many ranks there are: owners keep what is beyond it for the next
    step. Where the sparsifier keeps everything (`none`, `nonzero`), owners send the whole sum.
    """

    name: ClassVar[str] = "sharded"
    has_owners: ClassVar[bool] = True
    rounds: ClassVar[int] = 2
    budget: float = 1.25

    def __post_init__(self) -> None:
        if not self.budget > 1:
            raise ConfigError(f"the budget of sharded is above 1, as a message goes out once in any case; got {self.budget}")

    def encode(self, tensors: Sequence[Item], seed: StepSeed, size: int) -> Sequence[Encoded]:
        pieces = [_cut(tensor, seed, size) for tensor in tensors]
        return [items.encode([cut[owner] for cut in pieces], seed) for owner in range(size)]

    def exchange(self, tensors: Sequence[Item], messages: Sequence[Encoded], trip: Trip) -> Delivery:
        rank = trip.transport.rank
        try:
            received = trip.all_to_all([message.blob for message in messages])
            owner = Owner.reduce(messages[rank].items, received, trip, self._allowed(messages))
        except FormatError as error:  # here alone: the others wait for the second exchange
            owner = Failure(error)
        blobs = trip.all_gather(owner.blob if isinstance(owner, Owner) else owner)
        with trip.watch("decode"):
            own = [message.decoded(rank) for message in messages]
            parts = [items.decode(blob, message.items, sender) for sender, (blob, message) in enumerate(zip(blobs, messages, strict=True))]
            sent, means = _joined(own, tensors), _joined(parts, tensors)
        settle = (lambda: owner.settle(parts[rank])) if isinstance(owner, Owner) else (lambda: None)
        return Delivery(sent, [[mean] for mean in means], 1, sums.is_finite(means), settle)

    def fail(self, failure: Failure, trip: Trip) -> None:
        trip.all_to_all([failure] * trip.transport.size)

    def owned_range(self, numel: int, rank: int, size: int) -> tuple[int, int]:
        ends = sums.bounds(numel, size)
        return ends[rank], ends[rank + 1]

    def fraction(self, size: int) -> float:
        """Return how much an owner among `size` ranks sends to each of them, as a part of what it selects of a whole tensor.

        The first exchange takes all of that but the rank's own range, and what the budget leaves is for one copy of the sum to every other
        rank. Two ranks send the whole sum: that is 1.5 times their message at most.

        >>> Sharded(budget=1.25).fraction(2), Sharded(budget=1.25).fraction(6)
        (1.0, 0.08333333333333334)
        """
        return 1.0 if size < 3 else self.budget / (size - 1) - 1 / size

    def _allowed(self, messages: Sequence[Encoded]) -> list[int | None]:
        """How many elements this owner may send of each tensor: by what it selected itself, so that all owners send as much."""
        fraction = self.fraction(len(messages))
        selected = (sum(record.nnz for record in column) for column in zip(*(message.records for message in messages), strict=True))
        return [ceil(fraction * nnz) if fraction < 1 and nnz else None for nnz in selected]


def _cut(tensor: Item, seed: StepSeed, size: int) -> list[Item]:
    """The ranges of a tensor, by their owners. Positions are selected in the whole tensor."""
    ends = sums.bounds(tensor.numel, size)
    selected = Support(np.empty(0, np.int64), tensor.numel) if tensor.idle else tensor.select(seed)
    return [_piece(tensor, part, low, high) for part, (low, high) in zip(sums.cut(selected, ends), pairwise(ends), strict=True)]


def _piece(tensor: Item, selected: Support, low: int, high: int) -> Item:
    shape = sums.range_shape(tensor.shape, low, high)
    if isinstance(tensor.content, SparseTensor):
        return replace(tensor, content=sums.between(tensor.content, low, high, shape), selected=selected, given=None)
    return replace(tensor, content=tensor.arrays.between(tensor.content, low, high, shape), selected=selected, given=None)


def _joined(pieces: Sequence[Sequence[SparseTensor]], tensors: Sequence[Item]) -> list[SparseTensor]:
    return [sums.joined(column, tensor.shape) for tensor, column in zip(tensors, zip(*pieces, strict=True), strict=True)]


@dataclass(frozen=True)
class Owner:
    """What a rank makes of the messages it was sent for the tensors it owns."""

    tensors: Sequence[Item]
    compensated: Sequence[Gradient]
    blob: bytes
    owned: ResidualMemory | None

    @classmethod
    def reduce(cls, tensors: Sequence[Item], received: Sequence[memoryview], trip: Trip, allowed: Sequence[int | None]) -> Owner | Failure:
        """Return the mean of what was received, plus the residual of this owner, as one message; or why there is none."""
        try:
            with trip.watch("decode"):
                by_rank = [items.decode(blob, tensors, rank) for rank, blob in enumerate(received)]
                columns = list(zip(*by_rank, strict=True))
            with trip.watch("encode"):
                means = [_mean(column, tensor, trip.divisor) for column, tensor in zip(columns, tensors, strict=True)]
                if trip.owned is not None:
                    means = [trip.owned.compensate(tensor.name, mean) for tensor, mean in zip(tensors, means, strict=True)]
                outgoing = [_outgoing(*given) for given in zip(tensors, means, columns, allowed, strict=True)]
                return cls(outgoing, means, items.encode(outgoing, trip.seed).blob, trip.owned)
        except Exception as error:
            return Failure(error)

    def settle(self, sent: Sequence[SparseTensor]) -> None:
        """Remember what was not sent."""
        if self.owned is not None:
            for tensor, compensated, part in zip(self.tensors, self.compensated, sent, strict=True):
                self.owned.remember(tensor.name, compensated, part)


def _mean(parts: Sequence[SparseTensor], tensor: Item, divisor: int) -> Gradient:
    if isinstance(tensor.content, SparseTensor):
        return sums.combined([sums.divided(part, divisor) for part in parts])
    return tensor.arrays.total(parts, tensor.content, divisor)


def _outgoing(tensor: Item, mean: Gradient, parts: Sequence[SparseTensor], most: int | None) -> Item:
    if isinstance(mean, SparseTensor):
        content: Gradient = SparseTensor.trusted(mean.support, arrays_of(mean.values).narrow(mean.values, tensor.dtype), mean.shape)
    else:
        content = tensor.arrays.narrow(mean, tensor.dtype)
    outgoing = replace(tensor, content=content, idle=False, given=None)
    return replace(outgoing, selected=_selected(outgoing, parts, most))


def _selected(tensor: Item, parts: Sequence[SparseTensor], most: int | None) -> Support:
    """What an owner sends of a sum: the positions it got, or as many of the strongest elements, and at most `most`."""
    if isinstance(tensor.codec.index, Seeded):
        drawn = np.arange(max(part.nnz for part in parts))  # as many as a rank sent are drawn again, at the same positions
        return Support.trusted(drawn, tensor.numel)
    received = sums.union(parts)
    if tensor.codec.sparsifier.lossless:
        return received
    limit = received.nnz if most is None else min(received.nnz, most)
    return tensor.source.top(limit) if limit else received


TOPOLOGIES: dict[str, type[Topology]] = {kind.name: kind for kind in (AllGather, Server, Sharded)}


def topology_of(topology: str | Topology, *others: str) -> Topology:
    """Return what a user gave as a topology; `others` are names that the caller handles itself.

    >>> topology_of("sharded")
    Sharded(budget=1.25)
    """
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str) or topology not in TOPOLOGIES:
        names = [*TOPOLOGIES, *others]
        raise ConfigError(f"topology is one of {', '.join(names[:-1])} or {names[-1]}, got {shown(topology)}")
    return TOPOLOGIES[topology]()
