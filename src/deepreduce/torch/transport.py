"""Frames over the collectives of torch.distributed, in a gloo group of its own. Bytes are counted as gloo sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import PeerError
from ..step.frame import HEAD_BYTES, Buffer, Exchange
from ..step.transport import ROOT, Alone, Padded, Transport, checked_bytes, padded

Move = tuple[Callable[..., Any], torch.Tensor, int]


def connect(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Transport:
    """Return the transport between the members of a group, all of which must call this; without torch.distributed there is one rank.

    It has a group of its own, so that frames never mix with other collectives, whatever thread they come from. It works on host memory,
    whatever the backend of the given group.
    """
    if not dist.is_initialized():
        return Alone()
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    group = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise PeerError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
    return Gloo(group)


class Gloo(Padded):
    """The ranks of one gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group: dist.ProcessGroup | None = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._pair_capacities: dict[tuple[int, str], list[int]] = {}

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def gather(self, frame: bytes, exchange: Exchange) -> list[Buffer] | None:
        heads = self._all_gather(padded(frame[:HEAD_BYTES], HEAD_BYTES), exchange)
        sizes = [checked_bytes(head, rank, exchange) for rank, head in enumerate(heads)]
        buffer = torch.from_numpy(padded(frame, max(sizes)))
        gathered = [torch.empty_like(buffer) for _ in sizes] if self.rank == ROOT else None
        self._run(exchange, dist.gather, buffer, gathered, group_dst=ROOT)
        if gathered is None:
            self.sent_bytes += buffer.numel()
            return None
        return [each.numpy()[:size] for each, size in zip(gathered, sizes, strict=True)]

    def broadcast(self, frame: bytes | None, exchange: Exchange) -> Buffer:
        capacity, frame = self.capacity(exchange), frame or b""
        front = self._broadcast(padded(frame[:capacity], capacity), exchange)
        size = checked_bytes(front, ROOT, exchange)
        if size > capacity:
            front = np.concatenate([front, self._broadcast(padded(frame[capacity:], size - capacity), exchange)])
        self.remember(exchange, size)
        return front[:size]

    def all_to_all(self, frames: Sequence[bytes], exchange: Exchange) -> list[Buffer]:
        """As in the contract. Each two ranks know how much room they gave each other before."""
        there, here = (self._pair_capacities.get((exchange.channel, way), [HEAD_BYTES] * self.size) for way in ("to", "from"))
        fronts = self._all_to_all([padded(frame[:room], room) for frame, room in zip(frames, there, strict=True)], here, exchange)
        sizes = [checked_bytes(front, rank, exchange) for rank, front in enumerate(fronts)]
        missing = [max(0, size - room) for size, room in zip(sizes, here, strict=True)]
        rests = self._swap([frame[room:] for frame, room in zip(frames, there, strict=True)], missing, exchange)
        for way, rooms, used in (("to", there, [len(frame) for frame in frames]), ("from", here, sizes)):
            roomy = [max(self.roomy(size), room - room // 32) for size, room in zip(used, rooms, strict=True)]
            self._pair_capacities[exchange.channel, way] = roomy
        return [np.concatenate([front[:size], rest]) for front, rest, size in zip(fronts, rests, sizes, strict=True)]

    # The collectives, on equal sizes

    def _all_gather(self, buffer: Buffer, exchange: Exchange) -> list[Buffer]:
        gathered = np.empty(self.size * buffer.size, np.uint8)
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        self._run(exchange, collective, torch.from_numpy(gathered), torch.from_numpy(buffer))
        self.sent_bytes += (self.size - 1) * buffer.size
        return np.split(gathered, self.size)

    def _broadcast(self, buffer: Buffer, exchange: Exchange) -> Buffer:
        self._run(exchange, dist.broadcast, torch.from_numpy(buffer), group_src=ROOT)
        self.sent_bytes += _children(self.rank, self.size) * buffer.size
        return buffer

    def _all_to_all(self, outgoing: Sequence[Buffer], sizes_in: list[int], exchange: Exchange) -> list[Buffer]:
        incoming, sizes_out = np.empty(sum(sizes_in), np.uint8), [buffer.size for buffer in outgoing]
        joined = torch.from_numpy(np.concatenate(outgoing))
        self._run(exchange, dist.all_to_all_single, torch.from_numpy(incoming), joined, sizes_in, sizes_out)
        self.sent_bytes += sum(sizes_out) - sizes_out[self.rank]
        return np.split(incoming, np.cumsum(sizes_in)[:-1])

    def _swap(self, outgoing: Sequence[bytes], sizes_in: Sequence[int], exchange: Exchange) -> list[Buffer]:
        """Send each rank what did not fit; most have nothing to send, and know that the others have not either."""
        incoming = [np.empty(size, np.uint8) for size in sizes_in]
        moves: list[Move] = []
        incoming[self.rank] = np.frombuffer(outgoing[self.rank], np.uint8)
        for peer in (rank for rank in range(self.size) if rank != self.rank):
            if outgoing[peer]:
                moves.append((dist.isend, torch.from_numpy(padded(outgoing[peer], len(outgoing[peer]))), peer))
            if incoming[peer].size:
                moves.append((dist.irecv, torch.from_numpy(incoming[peer]), peer))
        if moves:
            self._run(exchange, _move_all, moves)
        self.sent_bytes += sum(map(len, outgoing)) - len(outgoing[self.rank])
        return incoming

    def _run(self, exchange: Exchange, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        where = f"rank {self.rank} could not exchange {exchange.what} in step {exchange.step}"
        if self.group is None:  # torch would take the default group, and mix our frames with what the user sends there
            raise PeerError(f"{where}: it hung up after an earlier failure")
        problem = None
        try:
            collective(*arguments, group=self.group, **options)
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            # Raised here, as the traceback of `error` would hold the group, and so keep it open after `close`.
            raise PeerError(
                f"{where}: a peer failed, is gone or is too slow ({problem}); on a machine with several network interfaces, "
                "GLOO_SOCKET_IFNAME names the one to use"
            )


def _move_all(moves: Sequence[Move], group: dist.ProcessGroup | None) -> None:
    works = [move(tensor, group=group, **{"group_dst" if move is dist.isend else "group_src": peer}) for move, tensor, peer in moves]
    for work in works:
        work.wait()


def _children(rank: int, size: int) -> int:
    """Return to how many ranks this rank passes a broadcast from rank 0 on, in a binomial tree.

    >>> [_children(rank, 8) for rank in range(8)]
    [3, 2, 1, 1, 0, 0, 0, 0]
    """
    return sum(1 for power in range(rank.bit_length(), size.bit_length()) if rank + 2**power < size)
