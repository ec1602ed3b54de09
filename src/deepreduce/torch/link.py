"""Messages of unequal sizes over the collectives of torch.distributed.

Every payload travels behind a head of fixed size: how long it is, which exchange it belongs to, and whether its sender failed. A buffer has
the capacity that the sizes of the previous exchange suggest, so that one collective is enough; what does not fit follows. (Only `gather`
exchanges its sizes first.) Bytes are counted as gloo sends them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import CorruptError, PeerError

Buffer = NDArray[np.uint8]
Move = tuple[Callable[..., Any], torch.Tensor, int]

_HEAD = struct.Struct("<QIIBI")
_MESSAGE, _FAILURE = 0, 1
_ROOT = 0
_MAX_FAILURE_BYTES = 2000


@dataclass(frozen=True)
class Failure:
    """What a rank sends in place of a message that it could not make, so that nobody waits for it."""

    error: BaseException

    def text(self) -> bytes:
        """The reason, for the others."""
        return f"{type(self.error).__name__}: {self.error}".encode()[:_MAX_FAILURE_BYTES]


Payload = bytes | Failure


@dataclass(frozen=True)
class Ticket:
    """Which exchange this is: all ranks must hold the same one. No message is longer than `limit_bytes`."""

    what: str
    channel: int
    step: int
    limit_bytes: int


@dataclass(frozen=True)
class Head:
    """The fixed part in front of a payload."""

    size_bytes: int
    channel: int
    step: int
    kind: int

    @classmethod
    def read(cls, start: Buffer) -> Head:
        """The head at the front of a buffer."""
        *fields, checksum = _HEAD.unpack_from(start.data)
        if zlib.crc32(start.data[: _HEAD.size - 4]) != checksum:
            raise CorruptError("the head of a message was changed on its way")
        return cls(*fields)

    def write(self) -> bytes:
        """The head as bytes."""
        start = _HEAD.pack(self.size_bytes, self.channel, self.step, self.kind, 0)[:-4]
        return start + zlib.crc32(start).to_bytes(4, "little")


@dataclass
class Link:
    """The ranks of one process group, for bytes. `sent_bytes` counts what this rank puts on the network.

    >>> link = Link(group=None, rank=0, size=1)
    >>> [bytes(message) for message in link.all_gather(b"hello", Ticket("demo", channel=1, step=0, limit_bytes=10))]
    [b'hello']
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sent_bytes: int = field(default=0, init=False)
    _capacities: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _pair_capacities: dict[tuple[int, str], list[int]] = field(default_factory=dict, init=False, repr=False)
    _failure: Failure | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Link:
        """A group of our own with the members of this one: messages never mix with other collectives, whatever thread they come from.

        It works on host memory, whatever the backend of the given group. All members must open it.
        """
        if not dist.is_initialized():
            return cls(None, 0, 1)
        members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        group = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
        if not isinstance(group, dist.ProcessGroup):
            raise PeerError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
        return cls(group, dist.get_rank(group), len(members))

    def close(self) -> None:
        """Hang up: peers that wait for this rank get an error at once."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def all_gather(self, payload: Payload, ticket: Ticket) -> list[Buffer]:
        """The messages of all ranks, in the order of the ranks."""
        head, body = self._sealed(payload, ticket)
        capacity = self._capacities.get(ticket.channel, 0)
        fronts = self._all_gather(_padded(head.write() + body[:capacity], _HEAD.size + capacity), ticket)
        heads = [self._checked(front, rank, ticket) for rank, front in enumerate(fronts)]
        longest = max(head.size_bytes for head in heads)
        messages = [front[_HEAD.size : _HEAD.size + head.size_bytes] for front, head in zip(fronts, heads, strict=True)]
        if longest > capacity:
            rests = self._all_gather(_padded(body[capacity:], longest - capacity), ticket)
            messages = [
                np.concatenate([message, rest[: max(0, head.size_bytes - capacity)]])
                for message, rest, head in zip(messages, rests, heads, strict=True)
            ]
        self._capacities[ticket.channel] = _roomy(longest, capacity)
        return self._unsealed(heads, messages)

    def gather(self, payload: Payload, ticket: Ticket) -> list[Buffer] | None:
        """The messages of all ranks at the root, None elsewhere. All ranks learn the sizes first."""
        head, body = self._sealed(payload, ticket)
        fronts = self._all_gather(np.frombuffer(head.write(), np.uint8).copy(), ticket)
        heads = [self._checked(front, rank, ticket) for rank, front in enumerate(fronts)]
        longest = max(head.size_bytes for head in heads)
        buffers = self._gather(_padded(body, longest), ticket)
        if buffers is None:
            messages = [np.empty(0, np.uint8) for _ in heads]
            self._unsealed(heads, messages)
            return None
        return self._unsealed(heads, [buffer[: head.size_bytes] for buffer, head in zip(buffers, heads, strict=True)])

    def broadcast(self, payload: Payload | None, ticket: Ticket) -> Buffer:
        """The message of the root; the others give None."""
        capacity = self._capacities.get(ticket.channel, 0)
        head, body = self._sealed(b"" if payload is None else payload, ticket)
        front = self._broadcast(_padded(head.write() + body[:capacity], _HEAD.size + capacity), ticket)
        head = self._checked(front, _ROOT, ticket)
        message = front[_HEAD.size : _HEAD.size + head.size_bytes]
        if head.size_bytes > capacity:
            rest = self._broadcast(_padded(body[capacity:], head.size_bytes - capacity), ticket)
            message = np.concatenate([message, rest])
        self._capacities[ticket.channel] = _roomy(head.size_bytes, capacity)
        return self._unsealed([head], [message])[0]

    def all_to_all(self, payloads: Sequence[Payload], ticket: Ticket) -> list[Buffer]:
        """One message to every rank, and one from every rank. Each two know how much room they gave each other before."""
        sealed = [self._sealed(payload, ticket) for payload in payloads]
        there, here = (self._pair_capacities.get((ticket.channel, way), [0] * self.size) for way in ("to", "from"))
        fronts = [_padded(head.write() + body[:room], _HEAD.size + room) for (head, body), room in zip(sealed, there, strict=True)]
        incoming = self._all_to_all(fronts, [_HEAD.size + room for room in here], ticket)
        heads = [self._checked(front, rank, ticket) for rank, front in enumerate(incoming)]
        missing = [max(0, head.size_bytes - room) for head, room in zip(heads, here, strict=True)]
        rests = self._swap([body[room:] for (_, body), room in zip(sealed, there, strict=True)], missing, ticket)
        self._pair_capacities[ticket.channel, "to"] = [_roomy(head.size_bytes, room) for (head, _), room in zip(sealed, there, strict=True)]
        self._pair_capacities[ticket.channel, "from"] = [_roomy(head.size_bytes, room) for head, room in zip(heads, here, strict=True)]
        fits = (front[_HEAD.size : _HEAD.size + head.size_bytes] for front, head in zip(incoming, heads, strict=True))
        return self._unsealed(heads, [np.concatenate(parts) for parts in zip(fits, rests, strict=True)])

    # What goes and what comes

    def _sealed(self, payload: Payload, ticket: Ticket) -> tuple[Head, bytes]:
        body, kind = (payload, _MESSAGE) if isinstance(payload, bytes) else (payload.text(), _FAILURE)
        if isinstance(payload, Failure):
            self._failure = payload
        return Head(len(body), ticket.channel, ticket.step % 2**32, kind), body

    def _checked(self, front: Buffer, rank: int, ticket: Ticket) -> Head:
        """The head at the front of what a rank sent. All sizes come from it: nothing is allocated or received by one that is not right."""
        try:
            head = Head.read(front)
        except CorruptError as error:
            raise CorruptError(f"message of rank {rank} for {ticket.what}: {error}") from error
        here = Head(0, ticket.channel, ticket.step % 2**32, 0)
        if (head.channel, head.step) != (here.channel, here.step):
            raise PeerError(
                f"rank {rank} is at step {head.step} in exchange {head.channel:08x}, rank {self.rank} at step {here.step} in "
                f"{here.channel:08x} ({ticket.what}): all ranks need the same model, spec, topology and checkpoint"
            )
        limit_bytes = ticket.limit_bytes if head.kind == _MESSAGE else _MAX_FAILURE_BYTES
        if head.size_bytes > limit_bytes or head.kind not in (_MESSAGE, _FAILURE):
            raise CorruptError(f"rank {rank} announces {head.size_bytes} bytes of kind {head.kind} for {ticket.what}, limit {limit_bytes}")
        return head

    def _unsealed(self, heads: list[Head], messages: list[Buffer]) -> list[Buffer]:
        self._raise_own_failure()
        for rank, (head, message) in enumerate(zip(heads, messages, strict=True)):
            if head.kind == _FAILURE:
                raise PeerError(f"rank {rank} failed: {bytes(message).decode(errors='replace') or 'see its own error'}")
        return messages

    def _raise_own_failure(self) -> None:
        """A rank that failed raises its own error, not what the others make of it: they hang up as soon as they know."""
        if self._failure is not None:
            raise self._failure.error

    # The collectives, on equal sizes

    def _all_gather(self, buffer: Buffer, ticket: Ticket) -> list[Buffer]:
        if self.size == 1:
            return [buffer]
        gathered = np.empty(self.size * buffer.size, np.uint8)
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        self._run(ticket, collective, torch.from_numpy(gathered), torch.from_numpy(buffer))
        self.sent_bytes += (self.size - 1) * buffer.size
        return np.split(gathered, self.size)

    def _gather(self, buffer: Buffer, ticket: Ticket) -> list[Buffer] | None:
        if self.size == 1:
            return [buffer]
        gathered = [np.empty_like(buffer) for _ in range(self.size)] if self.rank == _ROOT else None
        into = None if gathered is None else [torch.from_numpy(each) for each in gathered]
        self._run(ticket, dist.gather, torch.from_numpy(buffer), into, group_dst=_ROOT)
        self.sent_bytes += buffer.size if gathered is None else 0
        return gathered

    def _broadcast(self, buffer: Buffer, ticket: Ticket) -> Buffer:
        if self.size > 1:
            self._run(ticket, dist.broadcast, torch.from_numpy(buffer), group_src=_ROOT)
            self.sent_bytes += _children(self.rank, self.size) * buffer.size
        return buffer

    def _all_to_all(self, outgoing: Sequence[Buffer], sizes_in: list[int], ticket: Ticket) -> list[Buffer]:
        if self.size == 1:
            return list(outgoing)
        incoming, sizes_out = np.empty(sum(sizes_in), np.uint8), [buffer.size for buffer in outgoing]
        joined = torch.from_numpy(np.concatenate(outgoing))
        self._run(ticket, dist.all_to_all_single, torch.from_numpy(incoming), joined, sizes_in, sizes_out)
        self.sent_bytes += sum(sizes_out) - sizes_out[self.rank]
        return np.split(incoming, np.cumsum(sizes_in)[:-1])

    def _swap(self, outgoing: Sequence[bytes], sizes_in: Sequence[int], ticket: Ticket) -> list[Buffer]:
        """What is left for each rank, from rank to rank: most have nothing to send, and know that the others have not either."""
        incoming = [np.empty(size, np.uint8) for size in sizes_in]
        moves: list[Move] = []
        incoming[self.rank] = np.frombuffer(outgoing[self.rank], np.uint8)
        for peer in (rank for rank in range(self.size) if rank != self.rank):
            if outgoing[peer]:
                moves.append((dist.isend, torch.from_numpy(_padded(outgoing[peer], len(outgoing[peer]))), peer))
            if incoming[peer].size:
                moves.append((dist.irecv, torch.from_numpy(incoming[peer]), peer))
        if moves:
            self._run(ticket, _move_all, moves)
        self.sent_bytes += sum(map(len, outgoing)) - len(outgoing[self.rank])
        return incoming

    def _run(self, ticket: Ticket, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        where = f"rank {self.rank} could not exchange {ticket.what} in step {ticket.step}"
        if self.group is None:  # torch would take the default group, and mix our messages with what the user sends there
            self._raise_own_failure()
            raise PeerError(f"{where}: it hung up after an earlier failure")
        problem = None
        try:
            collective(*arguments, group=self.group, **options)
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            self._raise_own_failure()
            # Raised here, as the traceback of `error` would hold the group, and so keep it open after `close`.
            raise PeerError(f"{where}: a peer failed, is gone or is too slow ({problem})")


def _move_all(moves: Sequence[Move], group: dist.ProcessGroup | None) -> None:
    works = [move(tensor, group=group, **{"group_dst" if move is dist.isend else "group_src": peer}) for move, tensor, peer in moves]
    for work in works:
        work.wait()


def _padded(content: bytes, size_bytes: int) -> Buffer:
    buffer = np.zeros(size_bytes, np.uint8)
    buffer[: len(content)] = np.frombuffer(content, np.uint8)
    return buffer


def _roomy(size_bytes: int, before: int) -> int:
    """The capacity for the next message of a channel: some padding costs less than a second collective, so peaks are remembered a while.

    >>> _roomy(3200, before=0), _roomy(1600, before=3364)
    (3364, 3259)
    """
    return max(size_bytes + size_bytes // 32 + 64, before - before // 32)


def _children(rank: int, size: int) -> int:
    """To how many ranks this rank passes a broadcast from rank 0 on, in a binomial tree.

    >>> [_children(rank, 8) for rank in range(8)]
    [3, 2, 1, 1, 0, 0, 0, 0]
    """
    return sum(1 for power in range(rank.bit_length(), size.bit_length()) if rank + 2**power < size)
