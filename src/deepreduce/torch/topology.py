"""How the messages of all ranks become one mean, which all ranks decode from the same bytes in the same order.

`AllGather` sends every message to every rank. `Server` and `Sharded` have owners that add up what they are sent and encode the sum again,
with error feedback of their own: one root for everything, or every rank for a range of every tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import ClassVar

import numpy as np

from ..errors import ConfigError
from ..indices.seeded import Seeded
from ..sparse import Positions, SparseTensor
from ..steps import Seed
from . import messages, sums
from .feedback import Feedback
from .link import Buffer, Failure, Link, Payload, Ticket
from .messages import Message
from .stopwatch import Stopwatch
from .units import Content, Unit, as_source


@dataclass(frozen=True)
class Parcel:
    """A bucket, the messages that it became, and what goes out of them."""

    units: Sequence[Unit]
    messages: Sequence[Message]
    payloads: Sequence[Payload]

    @classmethod
    def of(cls, units: Sequence[Unit], messages: Sequence[Message]) -> Parcel:
        """The parcel of these messages."""
        return cls(units, messages, [message.blob for message in messages])


@dataclass(frozen=True)
class Trip:
    """What a parcel needs on its way: the link, the seed of the step, the memory of owners, and one ticket for each exchange."""

    link: Link
    seed: Seed
    owned: Feedback
    ticket: Callable[[str], Ticket]
    watch: Stopwatch


@dataclass(frozen=True)
class Delivery:
    """For every unit: what the others have of ours, and the shares that add up to the mean. `settle` makes the owners remember."""

    sent: Sequence[SparseTensor]
    shares: Sequence[Sequence[SparseTensor]]
    finite: bool
    settle: Callable[[], None] = field(default=lambda: None)


class Topology(ABC):
    """One way to exchange."""

    name: ClassVar[str]

    def pack(self, units: Sequence[Unit], seed: Seed) -> Parcel:
        """Encode; this runs beside the exchange of the bucket before."""
        return Parcel.of(units, [messages.encode(units, seed)])

    def failed(self, error: BaseException, size: int) -> Parcel:
        """A parcel that tells the other ranks that there is none."""
        return Parcel([], [], [Failure(error)])

    @abstractmethod
    def ship(self, parcel: Parcel, trip: Trip) -> Delivery:
        """Exchange and decode."""


@dataclass(frozen=True)
class AllGather(Topology):
    """`allgather`: every rank sends its message to all others and adds up what it gets. One loss, one trip; volume grows with the ranks."""

    name: ClassVar[str] = "allgather"

    def ship(self, parcel: Parcel, trip: Trip) -> Delivery:
        with trip.watch("exchange"):
            received = trip.link.all_gather(parcel.payloads[0], trip.ticket("gather"))
        with trip.watch("decode"):
            parts = [messages.decode(blob, parcel.units, rank) for rank, blob in enumerate(received)]
            shares = [sums.shares(column) for column in zip(*parts, strict=True)]
        return Delivery(parts[trip.link.rank], shares, all(map(sums.finite, parts)))


@dataclass(frozen=True)
class Server(Topology):
    """`server`: rank 0 gathers, adds up, encodes the mean with everything that was sent, and broadcasts it."""

    name: ClassVar[str] = "server"

    def ship(self, parcel: Parcel, trip: Trip) -> Delivery:
        with trip.watch("exchange"):
            received = trip.link.gather(parcel.payloads[0], trip.ticket("gather"))
        owner = None if received is None else Owner.reduce(parcel.units, received, trip, budget=None)
        with trip.watch("exchange"):
            blob = trip.link.broadcast(None if owner is None else owner.payload, trip.ticket("broadcast"))
        with trip.watch("decode"):
            sent = parcel.messages[0].decoded(trip.link.rank)
            parts = messages.decode(blob, parcel.units, sender=0)
        return Delivery(sent, [[part] for part in parts], sums.finite(parts), lambda: owner.settle(parts) if owner else None)


@dataclass(frozen=True)
class Sharded(Topology):
    """`sharded`: every rank owns a range of every tensor, adds up what the others send for it, and sends the strongest of the sum to all.

    `budget` is what a rank sends, in multiples of its own message, however many ranks there are: owners keep what is beyond it for the next
    step. Two ranks send the whole sum, for 1.5 times their message at most. Tensors that travel dense are never cut down.
    """

    name: ClassVar[str] = "sharded"
    budget: float = 1.4

    def __post_init__(self) -> None:
        if not self.budget > 1:
            raise ConfigError(f"the budget of sharded is above 1, as a message goes out once in any case; got {self.budget}")

    def pack(self, units: Sequence[Unit], seed: Seed) -> Parcel:
        pieces = [_cut(unit, seed) for unit in units]
        return Parcel.of(units, [messages.encode([cut[owner] for cut in pieces], seed) for owner in range(seed.size)])

    def failed(self, error: BaseException, size: int) -> Parcel:
        return Parcel([], [], [Failure(error)] * size)

    def ship(self, parcel: Parcel, trip: Trip) -> Delivery:
        rank, size = trip.link.rank, trip.link.size
        with trip.watch("exchange"):
            received = trip.link.all_to_all(parcel.payloads, trip.ticket("scatter"))
        owner = Owner.reduce(parcel.messages[rank].units, received, trip, self.budget)
        with trip.watch("exchange"):
            blobs = trip.link.all_gather(owner.payload, trip.ticket("gather"))
        with trip.watch("decode"):
            own = [message.decoded(rank) for message in parcel.messages]
            parts = [
                messages.decode(blob, message.units, sender)
                for sender, (blob, message) in enumerate(zip(blobs, parcel.messages, strict=True))
            ]
            sent, wholes = _joined(own, parcel.units, size), _joined(parts, parcel.units, size)
        return Delivery(sent, [[whole] for whole in wholes], sums.finite(wholes), lambda: owner.settle(parts[rank]))


def _cut(unit: Unit, seed: Seed) -> list[Unit]:
    """The ranges of a tensor, by their owners. What is kept is selected in the whole tensor."""
    kept, bounds = unit.select(seed), sums.bounds(unit.numel, seed.size)
    ends = np.searchsorted(kept, bounds)
    pieces = []
    for low, high, first, last in zip(bounds, bounds[1:], ends, ends[1:], strict=False):
        content = sums.sliced(unit.content, low, high, sums.piece_shape(unit.shape, low, high))
        pieces.append(replace(unit, content=content, kept=kept[first:last] - low))
    return pieces


def _joined(pieces: Sequence[Sequence[SparseTensor]], units: Sequence[Unit], size: int) -> list[SparseTensor]:
    columns = zip(*pieces, strict=True)
    return [sums.joined(column, sums.bounds(unit.numel, size)[:-1], unit.shape) for unit, column in zip(units, columns, strict=True)]


@dataclass(frozen=True)
class Owner:
    """What a rank makes of the messages it was sent for the tensors it owns."""

    units: Sequence[Unit]
    owed: Sequence[Content]
    payload: Payload
    feedback: Feedback

    @classmethod
    def reduce(cls, units: Sequence[Unit], received: Sequence[Buffer], trip: Trip, budget: float | None) -> Owner:
        """The mean of what was received, with what this owner still owes, as one message. An error is sent to the other ranks."""
        try:
            with trip.watch("decode"):
                parts = [messages.decode(blob, units, rank) for rank, blob in enumerate(received)]
                columns = list(zip(*parts, strict=True))
                means = [sums.total(sums.shares(column), unit.content) for unit, column in zip(units, columns, strict=True)]
            with trip.watch("encode"):
                owed = [trip.owned.compensate(unit.label, mean) for unit, mean in zip(units, means, strict=True)]
                narrow = [sums.narrow(content, unit.content.dtype) for content, unit in zip(owed, units, strict=True)]
                fraction = _fraction(columns, sum(blob.size for blob in received), budget)
                outgoing = [
                    replace(unit, content=content, kept=_kept(unit, content, column, fraction))
                    for unit, content, column in zip(units, narrow, columns, strict=True)
                ]
                return cls(outgoing, owed, messages.encode(outgoing, trip.seed).blob, trip.owned)
        except Exception as error:
            return cls([], [], Failure(error), trip.owned)

    def settle(self, sent: Sequence[SparseTensor]) -> None:
        """Remember what was not sent."""
        for unit, owed, part in zip(self.units, self.owed, sent, strict=True):
            self.feedback.update(unit.label, owed, part)


def _kept(unit: Unit, content: Content, parts: Sequence[SparseTensor], fraction: float) -> Positions:
    """What an owner sends of a sum: all of it, or the strongest elements if it may send less."""
    if isinstance(unit.codec.index, Seeded):
        return np.arange(max(part.nnz for part in parts))  # as many as a rank sent are drawn again, at the same positions
    source = as_source(content)
    kept, limit = source.nonzero(), _limit(parts, fraction)
    if limit == 0:
        return kept[:0]  # nothing came, and what is owed from before goes along with the next that does
    return kept if kept.size <= limit else source.top(limit)


def _limit(parts: Sequence[SparseTensor], fraction: float) -> int:
    """How many elements of a tensor its owner may send: no more than it got positions, and than its fraction of the elements it got.

    >>> one, other = (SparseTensor([0, start, 99], np.ones(3, np.float32), (100,)) for start in (10, 20))
    >>> _limit([one, other], fraction=1.0), _limit([one, other], fraction=0.5)
    (4, 3)
    """
    if _is_dense(parts):
        return parts[0].numel
    positions = np.sort(np.concatenate([part.indices for part in parts]), kind="stable")  # sorted runs: they are only merged
    received = int(np.count_nonzero(np.diff(positions, prepend=-1)))
    return min(received, max(1, ceil(fraction * sum(part.nnz for part in parts))))


def _fraction(columns: Sequence[Sequence[SparseTensor]], received_bytes: int, budget: float | None) -> float:
    """The part of the elements it got that an owner may send, so that all it sends fits the budget. An element costs what it cost to get.

    What the ranks sent for one range is as much as one rank sent for all ranges: a whole message. Of the budget for it, the first exchange
    took all but the rank's own range, and the rest is for one copy of the sum to every other rank.

    >>> column = [SparseTensor(range(10), np.ones(10, np.float32), (1000,))] * 4
    >>> _fraction([column], received_bytes=800, budget=1.5)
    0.25
    """
    ranks = max((len(column) for column in columns), default=1)
    if budget is None or ranks < 3:
        return 1.0
    dense_bytes = sum(column[0].numel * column[0].dtype.itemsize for column in columns if _is_dense(column))
    sparse_bytes = received_bytes - ranks * dense_bytes
    allowed_bytes = received_bytes * (budget / (ranks - 1) - 1 / ranks) - dense_bytes
    return min(1.0, max(0.0, allowed_bytes / sparse_bytes)) if sparse_bytes > 0 else 1.0


def _is_dense(parts: Sequence[SparseTensor]) -> bool:
    return any(part.nnz == part.numel for part in parts)


TOPOLOGIES: dict[str, type[Topology]] = {kind.name: kind for kind in (AllGather, Server, Sharded)}
