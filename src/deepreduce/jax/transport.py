"""Frames between the processes of `jax.distributed`.

Outside `jit` they travel by a collective of JAX. A running program may hold the device and the threads that a collective needs, so inside
`jit`, where the host is called back in the middle of one, they travel by the key-value store of JAX's coordinator instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..errors import PeerError
from ..step.frame import Buffer, FrameTag
from ..step.transport import ROOT, Padded, SingleRank, Transport

_LEAST_CAPACITY = 256
_STORE_METHODS = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_delete")
_numbers = itertools.count()  # of exchanges by the coordinator: all processes count the same ones


def connect(traced: bool, timeout: timedelta) -> Transport:
    """Return the transport between all processes, for calls outside `jit` or from a program that is running."""
    if jax.process_count() == 1:
        return SingleRank()
    return Coordinator(timeout) if traced else Collective()


class Collective(Padded):
    """Processes that call a collective together. Bytes are counted as a ring sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = jax.process_index(), jax.process_count()

    def with_headroom(self, size_bytes: int) -> int:
        """Return a capacity for frames like this one. There are few different ones, as every new size is compiled anew.

        >>> [Collective().with_headroom(size) for size in (10, 5_000, 100_000)]
        [256, 5632, 106496]
        """
        wanted = size_bytes + size_bytes // 32
        unit = max(_LEAST_CAPACITY, 1 << max(0, wanted.bit_length() - 4))
        return -(-wanted // unit) * unit

    def update_capacity(self, tag: FrameTag, longest: int) -> None:
        self._capacities[tag.channel] = self.with_headroom(longest)

    def _all_gather(self, buffer: Buffer, tag: FrameTag) -> list[Buffer]:
        try:
            rows = multihost_utils.process_allgather(buffer)
        except jax.errors.JaxRuntimeError as error:
            raise PeerError(f"rank {self.rank} could not exchange {tag.description} in step {tag.step}: {error}") from error
        self.sent_bytes += (self.size - 1) * buffer.size
        return list(np.ascontiguousarray(rows))


class Coordinator(Transport):
    """Processes that write to and read from the key-value store of process 0.

    Bytes are counted where they come from: a frame goes to the store, and from there to every process that reads it.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()
        self._timeout_ms = max(1, int(timeout.total_seconds() * 1000))
        self._unread: dict[str, tuple[int, set[int]]] = {}

    def all_gather(self, frame: bytes, tag: FrameTag) -> list[Buffer]:
        number = next(_numbers)
        self._put(number, frame, self._others)
        return [self._get(number, sender, tag, "all", frame) for sender in range(self.size)]

    def gather(self, frame: bytes, tag: FrameTag) -> list[Buffer] | None:
        number = next(_numbers)
        if self.rank != ROOT:
            self._put(number, frame, [ROOT])
            return None
        return [self._get(number, sender, tag, "all", frame) for sender in range(self.size)]

    def broadcast(self, frame: bytes | None, tag: FrameTag) -> Buffer:
        number, own = next(_numbers), frame or b""
        if self.rank == ROOT:
            self._put(number, own, self._others)
        return self._get(number, ROOT, tag, "all", own)

    def all_to_all(self, frames: Sequence[bytes], tag: FrameTag) -> list[Buffer]:
        number = next(_numbers)
        for reader in self._others:
            self._put(number, frames[reader], [reader], str(reader))
        return [self._get(number, sender, tag, str(self.rank), frames[self.rank]) for sender in range(self.size)]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _put(self, number: int, frame: bytes, readers: Iterable[int], address: str = "all") -> None:
        key, waiting = _key(number, self.rank, address), set(readers)
        store().key_value_set_bytes(key, frame)
        self._unread[key] = number, waiting
        trips = len(waiting - {ROOT}) + (self.rank != ROOT)  # process 0 holds the store
        self.sent_bytes += trips * len(frame)

    def _get(self, number: int, sender: int, tag: FrameTag, address: str, own: bytes) -> Buffer:
        if sender == self.rank:
            return np.frombuffer(own, np.uint8)
        try:
            frame = store().blocking_key_value_get_bytes(_key(number, sender, address), self._timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            raise PeerError(
                f"rank {self.rank} got nothing from rank {sender} for {tag.description} in step {tag.step}: "
                f"it failed, is gone or is too slow ({error})"
            ) from error
        self._delete_read(number, sender)
        return np.frombuffer(frame, np.uint8)

    def _delete_read(self, number: int, reader: int) -> None:
        """Delete from the store what is read: a process that takes part in an exchange is done with those before it."""
        for key, (written, readers) in list(self._unread.items()):
            if written < number:
                readers.discard(reader)
                if not readers:
                    store().key_value_delete(key)
                    del self._unread[key]


def store() -> Any:
    """Return the key-value store of JAX's coordinator. JAX shows it nowhere in public; this is where it is in JAX 0.10."""
    try:
        from jax._src import distributed

        client = distributed.global_state.client
        missing = [name for name in _STORE_METHODS if not hasattr(client, name)]
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        raise PeerError(
            f"inside jit, deepreduce needs the key-value store of jax.distributed, which is not where it was in JAX 0.10 "
            f"(found JAX {jax.__version__}, without {', '.join(missing)}): call update outside jit, or use that version"
        )
    return client


def _key(number: int, sender: int, address: str) -> str:
    return f"deepreduce/{number}/{sender}/{address}"
