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
from ..steps import Seed
from ..tensor import Positions, SparseTensor
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
        owner = None if received is None else Owner.reduce(parcel.units, received, trip, [None] * len(parcel.units))
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
    step. Where the sparsifier keeps everything (`none`, `nonzero`), owners send the whole sum.
    """

    name: ClassVar[str] = "sharded"
    budget: float = 1.25

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
        owner = Owner.reduce(parcel.messages[rank].units, received, trip, self._allowed(parcel))
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

    def fraction(self, size: int) -> float:
        """How much an owner among `size` ranks sends to each of them, as a part of what it keeps of a whole tensor.

        The first exchange takes all of that but the rank's own range, and what the budget leaves is for one copy of the sum to every other
        rank. Two ranks send the whole sum: that is 1.5 times their message at most.

        >>> Sharded(budget=1.25).fraction(2), Sharded(budget=1.25).fraction(6)
        (1.0, 0.08333333333333334)
        """
        return 1.0 if size < 3 else self.budget / (size - 1) - 1 / size

    def _allowed(self, parcel: Parcel) -> list[int | None]:
        """How many elements this owner may send of each tensor: by what it kept itself, so that all owners send messages of one length."""
        fraction = self.fraction(len(parcel.messages))
        kept = (sum(record.nnz for record in column) for column in zip(*(message.records for message in parcel.messages), strict=True))
        return [ceil(fraction * nnz) if fraction < 1 and nnz else None for nnz in kept]


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
    def reduce(cls, units: Sequence[Unit], received: Sequence[Buffer], trip: Trip, allowed: Sequence[int | None]) -> Owner:
        """The mean of what was received, with what this owner still owes, as one message. An error is sent to the other ranks."""
        try:
            with trip.watch("decode"):
                parts = [messages.decode(blob, units, rank) for rank, blob in enumerate(received)]
                columns = list(zip(*parts, strict=True))
                means = [sums.total(sums.shares(column), unit.content) for unit, column in zip(units, columns, strict=True)]
            with trip.watch("encode"):
                owed = [trip.owned.compensate(unit.label, mean) for unit, mean in zip(units, means, strict=True)]
                narrow = [sums.narrow(content, unit.content.dtype) for content, unit in zip(owed, units, strict=True)]
                outgoing = [
                    replace(unit, content=content, kept=_kept(unit, content, column, most))
                    for unit, content, column, most in zip(units, narrow, columns, allowed, strict=True)
                ]
                return cls(outgoing, owed, messages.encode(outgoing, trip.seed).blob, trip.owned)
        except Exception as error:
            return cls([], [], Failure(error), trip.owned)

    def settle(self, sent: Sequence[SparseTensor]) -> None:
        """Remember what was not sent."""
        for unit, owed, part in zip(self.units, self.owed, sent, strict=True):
            self.feedback.update(unit.label, owed, part)


def _kept(unit: Unit, content: Content, parts: Sequence[SparseTensor], most: int | None) -> Positions:
    """What an owner sends of a sum: all of it, or the strongest elements. It sends no more positions than it got, and at most `most`."""
    if isinstance(unit.codec.index, Seeded):
        return np.arange(max(part.nnz for part in parts))  # as many as a rank sent are drawn again, at the same positions
    source = as_source(content)
    kept, limit = source.nonzero().positions, _positions(parts)
    limit = limit if most is None else min(limit, most)
    if unit.codec.sparsifier.lossless or kept.size <= limit:
        return kept
    return source.top(limit).positions if limit else kept[:0]  # nothing came: what is owed from before goes along with the next that does


def _positions(parts: Sequence[SparseTensor]) -> int:
    """How many positions there are in all of these.

    >>> _positions([SparseTensor([0, start, 99], np.ones(3, np.float32), (100,)) for start in (10, 20)])
    4
    """
    positions = np.sort(np.concatenate([part.indices for part in parts]), kind="stable")  # sorted runs: they are only merged
    return int(np.count_nonzero(np.diff(positions, prepend=-1)))


TOPOLOGIES: dict[str, type[Topology]] = {kind.name: kind for kind in (AllGather, Server, Sharded)}
