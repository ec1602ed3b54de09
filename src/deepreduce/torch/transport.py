"""Frames over the collectives of torch.distributed, in a gloo group of its own. Bytes are counted as gloo sends them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import ConfigError, PeerError
from ..parameters import shown
from ..step.frame import HEADER_BYTES, Buffer, FrameTag
from ..step.transport import ROOT, Padded, SingleRank, Transport, checked_bytes, padded

_log = logging.getLogger("deepreduce")


def connect(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Transport:
    """Return the transport between the members of a group, all of which must call this; one rank alone needs no network.

    It has connections of its own, so that frames never mix with other collectives, whatever thread they come from. It works on host
    memory, whatever the backend of the given group.
    """
    if not dist.is_initialized():
        return without_group()
    members = members_of(process_group)
    if len(members) == 1:
        return SingleRank()
    return Gloo(gloo_between(members, timeout), members.index(dist.get_rank()), len(members))


@cache
def without_group() -> SingleRank:
    """Return the transport of a process without a process group. Refused where a launcher started several, as these would train apart."""
    processes = os.environ.get("WORLD_SIZE") or "1"
    if processes != "1":
        raise ConfigError(
            f"WORLD_SIZE is {processes}, but there is no process group, so that every process would train by itself: "
            "call torch.distributed.init_process_group first"
        )
    return SingleRank()


def checked_timeout(timeout: timedelta | None) -> timedelta | None:
    """Return a timeout that a user gave; None stands for the default.

    >>> checked_timeout(5)
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: timeout is a timedelta above 0, got 5
    """
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta()):
        raise ConfigError(f"timeout is a timedelta above 0, got {shown(timeout)}")
    return timeout


def rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in a group, and how many there are, without connecting to them; alone where there is no group.

    >>> rank_and_size(None)
    (0, 1)
    """
    if not dist.is_initialized():
        return 0, 1
    members = members_of(process_group)
    return members.index(dist.get_rank()), len(members)


def members_of(process_group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group, of which this process must be one; None is the group of all."""
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if dist.get_rank() not in members:
        raise PeerError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
    return members


def _interface() -> str:
    """Return where gloo will listen: the interface that was named, or the address of this machine's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        return f"the interface {name}, as GLOO_SOCKET_IFNAME says"
    try:
        return f"the address {socket.gethostbyname(socket.gethostname())} of this host's name; GLOO_SOCKET_IFNAME names another interface"
    except OSError:
        return "the loopback interface, as this host's name has no address; GLOO_SOCKET_IFNAME names another interface"


def gloo_between(members: Sequence[int], timeout: timedelta | None) -> Any:
    """Return a gloo backend between these ranks, all of which must call this; it ends when nothing holds it.

    `dist.new_group` would reuse the name of a group that was closed, and find its old addresses in the store. Seen in torch 2.6 to 2.13:
    the class is public, the store of the default group is not.
    """
    _log.info("rank %d sends over gloo on %s", dist.get_rank(), _interface())
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        store, backend = _get_default_store(), dist.ProcessGroupGloo
    except (ImportError, AttributeError) as error:
        raise PeerError(f"deepreduce needs torch with gloo and its default store, found torch {torch.__version__}: {error}") from error
    group = f"deepreduce/{','.join(map(str, members))}"
    number = (store.add(group, 1) - 1) // len(members)  # nobody asks for the next connection before all have come to this one
    own_store = dist.PrefixStore(f"{group}/{number}", store)  # type: ignore[attr-defined]
    return backend(own_store, members.index(dist.get_rank()), len(members), timeout or timedelta(minutes=30))


class Gloo(Padded):
    """Ranks that are connected by gloo."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        super().__init__()
        self.backend, self.rank, self.size = backend, rank, size
        self._pair_capacities: dict[tuple[int, str], list[int]] = {}

    def close(self) -> None:
        self.backend = None  # its connections and threads end with it

    def gather(self, frame: bytes, tag: FrameTag) -> list[Buffer] | None:
        headers = self._all_gather(padded(frame[:HEADER_BYTES], HEADER_BYTES), tag)
        sizes = [checked_bytes(header, rank, tag) for rank, header in enumerate(headers)]
        buffer = torch.from_numpy(padded(frame, max(sizes)))
        gathered = [torch.empty_like(buffer) for _ in sizes] if self.rank == ROOT else []
        self._run(tag, lambda gloo: [gloo.gather(gathered, buffer, ROOT)])
        if not gathered:
            self.sent_bytes += buffer.numel()
            return None
        return [each.numpy()[:size] for each, size in zip(gathered, sizes, strict=True)]

    def broadcast(self, frame: bytes | None, tag: FrameTag) -> Buffer:
        capacity, frame = self.capacity(tag), frame or b""
        front = self._broadcast(padded(frame[:capacity], capacity), tag)
        size = checked_bytes(front, ROOT, tag)
        if size > capacity:
            front = np.concatenate([front, self._broadcast(padded(frame[capacity:], size - capacity), tag)])
        self.update_capacity(tag, size)
        return front[:size]

    def all_to_all(self, frames: Sequence[bytes], tag: FrameTag) -> list[Buffer]:
        """As in the contract. Each pair of ranks keeps the capacities of its last exchange."""
        capacities_out, capacities_in = (
            self._pair_capacities.get((tag.channel, direction), [HEADER_BYTES] * self.size) for direction in ("to", "from")
        )
        outgoing = [padded(frame[:capacity], capacity) for frame, capacity in zip(frames, capacities_out, strict=True)]
        fronts = self._all_to_all(outgoing, capacities_in, tag)
        sizes = [checked_bytes(front, rank, tag) for rank, front in enumerate(fronts)]
        missing = [max(0, size - capacity) for size, capacity in zip(sizes, capacities_in, strict=True)]
        rests = self._swap([frame[capacity:] for frame, capacity in zip(frames, capacities_out, strict=True)], missing, tag)
        for direction, capacities, used in (("to", capacities_out, [len(frame) for frame in frames]), ("from", capacities_in, sizes)):
            self._pair_capacities[tag.channel, direction] = [
                max(self.with_headroom(size), capacity - capacity // 32) for size, capacity in zip(used, capacities, strict=True)
            ]
        return [np.concatenate([front[:size], rest]) for front, rest, size in zip(fronts, rests, sizes, strict=True)]

    # The collectives, on equal sizes

    def _all_gather(self, buffer: Buffer, tag: FrameTag) -> list[Buffer]:
        gathered = np.empty(self.size * buffer.size, np.uint8)
        self._run(tag, lambda gloo: [gloo._allgather_base(torch.from_numpy(gathered), torch.from_numpy(buffer))])
        self.sent_bytes += (self.size - 1) * buffer.size
        return list(gathered.reshape(self.size, -1))

    def _broadcast(self, buffer: Buffer, tag: FrameTag) -> Buffer:
        self._run(tag, lambda gloo: [gloo.broadcast(torch.from_numpy(buffer), ROOT)])
        self.sent_bytes += _children(self.rank, self.size) * buffer.size
        return buffer

    def _all_to_all(self, outgoing: Sequence[Buffer], sizes_in: list[int], tag: FrameTag) -> list[Buffer]:
        incoming, sizes_out = np.empty(sum(sizes_in), np.uint8), [buffer.size for buffer in outgoing]
        joined = torch.from_numpy(np.concatenate(outgoing))
        self._run(tag, lambda gloo: [gloo.alltoall_base(torch.from_numpy(incoming), joined, sizes_in, sizes_out)])
        self.sent_bytes += sum(sizes_out) - sizes_out[self.rank]
        return np.split(incoming, np.cumsum(sizes_in)[:-1])

    def _swap(self, outgoing: Sequence[bytes], sizes_in: Sequence[int], tag: FrameTag) -> list[Buffer]:
        """Send each rank what did not fit; most have nothing to send, and know that the others have not either."""
        incoming = [np.empty(size, np.uint8) for size in sizes_in]
        incoming[self.rank] = np.frombuffer(outgoing[self.rank], np.uint8)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        sends = {peer: torch.from_numpy(padded(outgoing[peer], len(outgoing[peer]))) for peer in peers if outgoing[peer]}
        receives = {peer: torch.from_numpy(incoming[peer]) for peer in peers if incoming[peer].size}

        def move(gloo: Any) -> list[Any]:
            out = [gloo.send([tensor], peer, 0) for peer, tensor in sends.items()]
            return out + [gloo.recv([tensor], peer, 0) for peer, tensor in receives.items()]

        self._run(tag, move)
        self.sent_bytes += sum(map(len, outgoing)) - len(outgoing[self.rank])
        return incoming

    def _run(self, tag: FrameTag, start: Callable[[Any], Sequence[Any]]) -> None:
        """Start collectives and wait for them."""
        where = f"rank {self.rank} could not exchange {tag.description} in step {tag.step}"
        if self.backend is None:
            raise PeerError(f"{where}: its connections are closed (by close(), or after an earlier failure)")
        problem = None
        try:
            for work in start(self.backend):
                work.wait()
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            # Raised here, as the traceback of `error` would hold the backend, and so keep it open after `close`.
            raise PeerError(
                f"{where}: a peer failed, is gone or is too slow ({problem}), or does not make this call; with several network "
                "interfaces, GLOO_SOCKET_IFNAME names the one to use"
            )


def _children(rank: int, size: int) -> int:
    """Return to how many ranks this rank passes a broadcast from rank 0 on, in a binomial tree.

    >>> [_children(rank, 8) for rank in range(8)]
    [3, 2, 1, 1, 0, 0, 0, 0]
    """
    return sum(1 for power in range(rank.bit_length(), size.bit_length()) if rank + 2**power < size)
