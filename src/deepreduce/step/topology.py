"""How the messages of all ranks become one mean, which all ranks decode from the same bytes in the same order.

`AllGather` sends every message to every rank. `Server` and `Sharded` have owners that add up what they are sent and encode the sum again,
with error feedback of their own: one root for everything, or every rank for a range of each large tensor and for
some of the small ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from math import ceil
from time import perf_counter
from typing import ClassVar, TypeVar
from zlib import crc32

from ..errors import ConfigError, FormatError
from ..parameters import shown
from ..tensor import SparseTensor, Support
from . import items, sums
from .exchange import ExchangeContext, ExchangeResult
from .frame import Failure, PeerFailure, UnknownLength
from .items import EncodedMessage, OutgoingTensor
from .owner import Owner
from .seeds import StepSeed
from .threads import ONE_THREAD, Threads
from .transport import ROOT

T = TypeVar("T")


class Topology(ABC):
    """How messages are exchanged."""

    name: ClassVar[str]
    has_owners: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    """How many exchanges follow one another in a step."""

    def encode(
        self, tensors: Sequence[OutgoingTensor], seed: StepSeed, size: int, threads: Threads = ONE_THREAD
    ) -> Sequence[EncodedMessage]:
        """Return the messages of a bucket; this runs beside the exchange of the bucket before."""
        return items.encode([tensors], seed, threads)

    @abstractmethod
    def exchange(self, tensors: Sequence[OutgoingTensor], messages: Sequence[EncodedMessage], context: ExchangeContext) -> ExchangeResult:
        """Exchange and decode."""

    @abstractmethod
    def fail(self, failure: Failure, context: ExchangeContext) -> None:
        """Tell all ranks that this one has no messages, in the exchange that they are in, and raise its error as one that was reported."""

    def owned_range(self, name: str, numel: int, rank: int, size: int) -> tuple[int, int]:
        """Return the range of a tensor that a rank owns."""
        return 0, 0


@dataclass(frozen=True)
class AllGather(Topology):
    """`allgather`: every rank sends its message to all others and sums what it gets. One loss, one round; volume grows with the ranks."""

    name: ClassVar[str] = "allgather"

    def exchange(self, tensors: Sequence[OutgoingTensor], messages: Sequence[EncodedMessage], context: ExchangeContext) -> ExchangeResult:
        received = context.all_gather(messages[0].blob)
        start = perf_counter()
        by_rank = items.decode(items.read_all(received, [tensors] * len(received), messages[0]), context.threads)
        is_finite = sums.is_finite(list(chain.from_iterable(by_rank)))
        result = ExchangeResult(by_rank[context.transport.rank], list(zip(*by_rank, strict=True)), context.divisor, is_finite)
        context.watch.add("decode", start)
        return result

    def fail(self, failure: Failure, context: ExchangeContext) -> None:
        context.all_gather(failure)


@dataclass(frozen=True)
class Server(Topology):
    """`server`: rank 0 gathers, adds up, encodes the mean with everything that was sent, and broadcasts it."""

    name: ClassVar[str] = "server"
    has_owners: ClassVar[bool] = True
    rounds: ClassVar[int] = 2

    def exchange(self, tensors: Sequence[OutgoingTensor], messages: Sequence[EncodedMessage], context: ExchangeContext) -> ExchangeResult:
        try:
            received = context.gather(messages[0].blob)
            owner = None if received is None else Owner.reduce(messages[0], received, context, [None] * len(tensors))
        except (FormatError, PeerFailure) as error:  # at the root: the others wait for the broadcast
            owner = Failure(error)
        blob = context.broadcast(owner.message.blob if isinstance(owner, Owner) else owner)
        with context.watch("decode"):
            sent, means = items.decode([messages[0], items.read(blob, tensors, ROOT)], context.threads)
        update = (lambda: owner.update(means)) if isinstance(owner, Owner) else None
        return ExchangeResult(sent, [[mean] for mean in means], 1, sums.is_finite(means), update)

    def fail(self, failure: Failure, context: ExchangeContext) -> None:
        try:
            context.gather(failure)
        except UnknownLength:
            raise
        except (FormatError, PeerFailure):
            pass  # the root reads its own failure too, and the others still wait for the broadcast
        with suppress(PeerFailure):  # by which the root tells all ranks
            context.broadcast(failure if context.transport.rank == ROOT else None)
        failure.raise_reported()

    def owned_range(self, name: str, numel: int, rank: int, size: int) -> tuple[int, int]:
        return (0, numel) if rank == ROOT else (0, 0)


@dataclass(frozen=True)
class Sharded(Topology):
    """`sharded`: a sparse allreduce. Every rank owns a range of each tensor, adds up what the others send for it, and sends the largest
    elements of the sum to all.

    A tensor of at most 2,048 elements is not split: a hash of its name says which rank owns it.

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

    def encode(
        self, tensors: Sequence[OutgoingTensor], seed: StepSeed, size: int, threads: Threads = ONE_THREAD
    ) -> Sequence[EncodedMessage]:
        pieces: list[list[OutgoingTensor]] = [[] for _ in range(size)]
        for tensor, selected in zip(tensors, items.select(tensors, seed, threads), strict=True):
            owner = _single_owner(tensor.name, tensor.numel, size)
            if owner is not None:
                pieces[owner].append(tensor._replace(selected=selected))
                continue
            for of_owner, piece in zip(pieces, _cut(tensor, selected, size), strict=True):
                of_owner.append(piece)
        return items.encode(pieces, seed, threads)

    def exchange(self, tensors: Sequence[OutgoingTensor], messages: Sequence[EncodedMessage], context: ExchangeContext) -> ExchangeResult:
        rank = context.transport.rank
        try:
            received = context.all_to_all([message.blob for message in messages])
            owner = Owner.reduce(messages[rank], received, context, self._allowed(tensors, messages, rank))
        except FormatError as error:  # here alone: the others wait for the second exchange
            owner = Failure(error)
        blobs = context.all_gather(owner.message.blob if isinstance(owner, Owner) else owner)
        assert isinstance(owner, Owner)  # else `all_gather` has raised
        with context.watch("decode"):
            of_owners = items.read_all(blobs, [message.tensors for message in messages], owner.message)
            decoded = items.decode([*messages, *of_owners], context.threads)
            own, parts = decoded[: len(messages)], decoded[len(messages) :]
            sent, means = _joined(own, tensors), _joined(parts, tensors)
        return ExchangeResult(sent, [[mean] for mean in means], 1, sums.is_finite(means), lambda: owner.update(parts[rank]))

    def fail(self, failure: Failure, context: ExchangeContext) -> None:
        context.all_to_all([failure] * context.transport.size)

    def owned_range(self, name: str, numel: int, rank: int, size: int) -> tuple[int, int]:
        owner = _single_owner(name, numel, size)
        if owner is not None:
            return (0, numel) if rank == owner else (0, 0)
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

    def _allowed(self, tensors: Sequence[OutgoingTensor], messages: Sequence[EncodedMessage], rank: int) -> list[int | None]:
        """How many elements this owner may send of each of its tensors: by what it selected itself, so that all owners send as much."""
        fraction = self.fraction(len(messages))
        allowed: list[int | None] = []
        for tensor, records in zip(tensors, _columns([message.records for message in messages], tensors), strict=True):
            if _single_owner(tensor.name, tensor.numel, len(messages)) in (None, rank):
                share = fraction * len(messages) / len(records) * sum(record.nnz for record in records)
                allowed.append(ceil(share) if fraction < 1 and share else None)
        return allowed


_LARGEST_WHOLE = 2048


@lru_cache(maxsize=4096)
def _single_owner(name: str, numel: int, size: int) -> int | None:
    """The owner of a tensor that is not cut; None for one of which every rank owns a range."""
    return crc32(name.encode("utf-8", "backslashreplace")) % size if numel <= max(_LARGEST_WHOLE, size) else None


def _cut(tensor: OutgoingTensor, selected: Support, size: int) -> list[OutgoingTensor]:
    """The ranges of a tensor, by their owners, with what was selected of the whole; its values are read once."""
    whole = SparseTensor.trusted(selected, tensor.source.gather(selected), tensor.shape)
    return [_piece(tensor, whole, low, high) for low, high in pairwise(sums.bounds(tensor.numel, size))]


def _piece(tensor: OutgoingTensor, whole: SparseTensor, low: int, high: int) -> OutgoingTensor:
    shape = sums.range_shape(tensor.shape, low, high)
    part = sums.between(whole, low, high, shape)
    if isinstance(tensor.content, SparseTensor):
        return tensor.holding(sums.between(tensor.content, low, high, shape), part.support)
    piece = tensor.holding(tensor.arrays.between(tensor.content, low, high, shape), part.support)
    piece.source.keep(part.support, part.values)
    return piece


def _columns(by_owner: Sequence[Sequence[T]], tensors: Sequence[OutgoingTensor]) -> Iterator[list[T]]:
    """Yield, for each tensor, its entries by owner: one if a single rank owns it, else one per rank."""
    rows = list(map(iter, by_owner))
    for tensor in tensors:
        owner = _single_owner(tensor.name, tensor.numel, len(rows))
        yield [next(row) for row in (rows if owner is None else [rows[owner]])]


def _joined(pieces: Sequence[Sequence[SparseTensor]], tensors: Sequence[OutgoingTensor]) -> list[SparseTensor]:
    columns = list(_columns(pieces, tensors))
    cut = [(column, tensor.shape) for column, tensor in zip(columns, tensors, strict=True) if len(column) > 1]
    whole = iter(sums.joined(*zip(*cut, strict=True)) if cut else ())
    return [column[0] if len(column) == 1 else next(whole) for column in columns]


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
