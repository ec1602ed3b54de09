"""Messages of unequal sizes between the processes of `jax.distributed`.

Outside `jit` they go through a collective of JAX. A running program may hold the device and the threads that a collective needs, so inside
`jit`, where the host is called back in the middle of one, they go through the key-value store of JAX's coordinator instead.
"""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..errors import CorruptError, PeerError

_HEAD = struct.Struct("<QIIB")
_MESSAGE, _FAILURE = 0, 1
_LEAST_CAPACITY = 256
_MAX_FAILURE_BYTES = 2000
_numbers = itertools.count()  # of exchanges by the coordinator: all processes count the same ones


@dataclass(frozen=True)
class Ticket:
    """Which exchange this is: all processes must hold the same one. No message is longer than `limit_bytes`."""

    channel: int
    step: int
    limit_bytes: int


class Link(ABC):
    """A way to all processes. `sent_bytes` counts what this process puts on the network."""

    sent_bytes: int = 0

    @property
    def rank(self) -> int:
        """The number of this process."""
        return int(jax.process_index())

    @property
    def size(self) -> int:
        """How many processes there are."""
        return int(jax.process_count())

    @abstractmethod
    def gather(self, frame: bytes, limit_bytes: int) -> list[bytes]:
        """The frames of all processes, in their order. A frame begins with its size."""


def exchange(link: Link, payload: bytes | Exception, ticket: Ticket) -> list[bytes]:
    """The messages of all processes. An error in place of a message is raised here, and as a `PeerError` everywhere else."""
    here = (ticket.channel, ticket.step % 2**32)
    failed = isinstance(payload, Exception)
    body = f"{type(payload).__name__}: {payload}".encode()[:_MAX_FAILURE_BYTES] if isinstance(payload, Exception) else payload
    frame = _HEAD.pack(_HEAD.size + len(body), *here, _FAILURE if failed else _MESSAGE) + body
    frames = [frame] if link.size == 1 else link.gather(frame, _HEAD.size + ticket.limit_bytes)
    if isinstance(payload, Exception):
        raise payload
    return [_opened(frame, rank, link.rank, here) for rank, frame in enumerate(frames)]


def _opened(frame: bytes, sender: int, rank: int, here: tuple[int, int]) -> bytes:
    _, channel, step, kind = _HEAD.unpack_from(frame)
    body = frame[_HEAD.size :]
    if kind == _FAILURE:
        raise PeerError(f"process {sender} failed: {body.decode(errors='replace')}")
    if (channel, step) != here:
        raise PeerError(
            f"process {sender} is at step {step} of exchange {channel:08x}, process {rank} at step {here[1]} of {here[0]:08x}: "
            "all processes need the same model and checkpoint"
        )
    return body


class Collective(Link):
    """An all-gather of JAX. The buffer has the capacity that the previous exchange suggests; what does not fit follows in a second one."""

    def __init__(self) -> None:
        self._capacity = _LEAST_CAPACITY

    def gather(self, frame: bytes, limit_bytes: int) -> list[bytes]:
        fronts = self._gather(frame[: self._capacity], self._capacity)
        sizes = [_checked_size(front, rank, limit_bytes) for rank, front in enumerate(fronts)]
        rest_bytes = max(sizes) - self._capacity
        if rest_bytes > 0:
            rests = self._gather(frame[self._capacity :], _roomy(rest_bytes))
            fronts = [front + rest for front, rest in zip(fronts, rests, strict=True)]
        self._capacity = _roomy(max(sizes))
        return [front[:size] for front, size in zip(fronts, sizes, strict=True)]

    def _gather(self, content: bytes, size_bytes: int) -> list[bytes]:
        padded = np.frombuffer(content.ljust(size_bytes, b"\0"), np.uint8)
        self.sent_bytes += (self.size - 1) * size_bytes  # as a ring does
        return [bytes(row) for row in multihost_utils.process_allgather(padded)]


class Coordinator(Link):
    """The key-value store that process 0 keeps: every frame goes there once, and from there to every other process."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def gather(self, frame: bytes, limit_bytes: int) -> list[bytes]:
        client, number = _client(), next(_numbers)
        client.key_value_set_bytes(_key(number, self.rank), frame)
        frames = [frame if rank == self.rank else self._fetch(client, number, rank) for rank in range(self.size)]
        if number:
            client.key_value_delete(_key(number - 1, self.rank))  # who is at this exchange has read the one before
        for rank, each in enumerate(frames):
            _checked_size(each, rank, limit_bytes)
        self.sent_bytes += self._served(frames) if self.rank == 0 else len(frame)
        return frames

    def _fetch(self, client: Any, number: int, rank: int) -> bytes:
        try:
            return bytes(client.blocking_key_value_get_bytes(_key(number, rank), int(self._timeout.total_seconds() * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise PeerError(
                f"process {self.rank} got nothing from process {rank}, which failed, is gone or is too slow ({error})"
            ) from error

    def _served(self, frames: Sequence[bytes]) -> int:
        """What the store sends: every frame to all that neither made it nor hold the store."""
        return sum(len(frame) * (self.size - 1 - (rank > 0)) for rank, frame in enumerate(frames))


def _client() -> Any:
    from jax._src import distributed  # JAX shows its store nowhere else

    return distributed.global_state.client


def _key(number: int, rank: int) -> str:
    return f"deepreduce/{number}/{rank}"


def _checked_size(frame: bytes, rank: int, limit_bytes: int) -> int:
    size_bytes = int(_HEAD.unpack_from(frame)[0]) if len(frame) >= _HEAD.size else 0
    if not _HEAD.size <= size_bytes <= limit_bytes:
        raise CorruptError(f"process {rank} announces a frame of {size_bytes} bytes, allowed are {_HEAD.size} to {limit_bytes}")
    return size_bytes


def _roomy(size_bytes: int) -> int:
    """A capacity for messages like this one. There are few different ones, as every new size is compiled anew.

    >>> [_roomy(size) for size in (10, 5_000, 100_000)]
    [256, 5120, 106496]
    """
    step = max(_LEAST_CAPACITY, 1 << max(0, size_bytes.bit_length() - 4))
    return -(-size_bytes // step) * step
