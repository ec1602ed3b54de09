"""A step on the host: gradients into one message, and the messages of all workers into sums. Plain numpy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import steps
from ..accounting import Stats, StepStats
from ..errors import CorruptError, FormatError, PeerError
from ..pipeline import restore
from ..policy import Policy
from ..steps import Seed
from ..tensor import Shape, SparseTensor, Values
from .gradients import Dense, Rows

Words = NDArray[np.int32]
"""Messages travel as int32, which every collective takes: the length in bytes (negative: why there is no message), then the bytes."""


@dataclass(frozen=True)
class Slot:
    """What is known of a gradient beforehand: one that is `sliced` comes as two arrays, values and indices; a debt is one more."""

    label: str
    number: int
    shape: Shape
    dtype: np.dtype[Any]
    sliced: bool
    owing: bool

    def take(self, arrays: list[Any]) -> Dense | Rows:
        """This gradient, from the front of the list."""
        first = arrays.pop(0)
        indices = arrays.pop(0) if self.sliced else None
        owed = arrays.pop(0) if self.owing else None
        return Dense.of(first, owed) if indices is None else Rows.of(first, indices, owed, self.shape)


class Messenger:
    """Encodes and decodes every step of an optimizer; keeps nothing but the stats."""

    def __init__(self, policy: Policy, seed: int, history: int) -> None:
        self.policy, self.seed, self.stats = policy, seed, Stats(history)
        self._open: dict[int, tuple[StepStats, float]] = {}

    def pack(self, slots: Sequence[Slot], size: int, step: Any, rank: Any, *arrays: Values) -> list[Words]:
        """The message of this worker, alone in a list. If there is none, the reason is sent instead, as the others wait for it."""
        start, stats = time.perf_counter(), StepStats(int(step))
        try:
            words = to_words(self._encode(slots, Seed(self.seed + int(step), int(rank), size), list(arrays), stats))
        except Exception as error:
            words = to_words(f"{type(error).__name__}: {error}".encode(), failed=True)
        stats.encode_seconds = time.perf_counter() - start
        self._open[int(rank)] = stats, time.perf_counter()
        return [words]

    def _encode(self, slots: Sequence[Slot], seed: Seed, arrays: list[Any], stats: StepStats) -> bytes:
        records = []
        for slot in slots:
            records.append(steps.chosen_record(self.policy, slot.label, slot.number, slot.take(arrays).content, seed))
            stats.count(slot.label, records[-1])
        blob = steps.write(records)
        stats.message_bytes = len(blob)
        return blob

    def unpack(self, slots: Sequence[Slot], size: int, gathered: Words, rank: Any, *arrays: Values) -> list[Values]:
        """For each gradient its sum over all workers, and then what is owed of it. Given the same arrays as `pack`."""
        stats, packed_at = self._open.pop(int(rank))
        start = time.perf_counter()
        blobs = from_words(gathered)
        if len(blobs) != size:
            raise CorruptError(f"{len(blobs)} messages came from {size} workers")
        everyone = [decode(blob, slots, sender) for sender, blob in enumerate(blobs)]
        finite = all(bool(np.isfinite(part.values).all()) for parts in everyone for part in parts)
        left, results = list(arrays), []
        for place, slot in enumerate(slots):
            gradient = slot.take(left)
            results += gradient.total([parts[place] for parts in everyone])
            results += gradient.rest(everyone[int(rank)][place] if finite else None)
        stats.exchange_seconds, stats.decode_seconds = start - packed_at, time.perf_counter() - start
        stats.sent_bytes = _ring_bytes(gathered)
        self.stats.add(stats)
        return results


def to_words(payload: bytes, failed: bool = False) -> Words:
    """A message, or the reason why there is none, padded to whole words.

    >>> to_words(b"12345").tolist()
    [5, 875770417, 53]
    """
    length = np.array([-len(payload) if failed else len(payload)], np.int32)
    return np.concatenate([length, np.frombuffer(payload + bytes(-len(payload) % 4), np.int32)])


def from_words(words: Words) -> list[memoryview]:
    """The messages of all workers, in their order.

    >>> [bytes(blob) for blob in from_words(np.concatenate([to_words(b"12345"), to_words(b"6")]))]
    [b'12345', b'6']
    """
    blobs: list[memoryview] = []
    while words.size:
        length, body = int(words[0]), words[1:].view(np.uint8)
        if abs(length) > body.size:
            raise CorruptError(f"worker {len(blobs)} announces {abs(length)} bytes, {body.size} came")
        if length < 0:
            raise PeerError(f"worker {len(blobs)} could not send its gradients: {bytes(body[:-length]).decode(errors='replace')}")
        blobs.append(body[:length].data)
        words = words[1 + -(-length // 4) :]
    return blobs


def decode(blob: memoryview, slots: Sequence[Slot], sender: int) -> list[SparseTensor]:
    """The tensors of a message, which must be for these gradients."""
    try:
        return [restore(record) for record in steps.read(blob, [slot.label for slot in slots], slots)]
    except FormatError as error:
        raise type(error)(f"message of worker {sender}: {error}") from error


def _ring_bytes(gathered: Words) -> int:
    """What a worker puts on the network: an all-gather pads to the longest message, and passes one on to each other worker."""
    sizes = [4 + len(blob) + -len(blob) % 4 for blob in from_words(gathered)]
    return max(sizes) * (len(sizes) - 1)
