"""From two versions of weights to the sections of a patch, in one pass over both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from .. import kernels
from ..codec import IndexCodec
from . import conditional, portable
from .digests import CHECK_BYTES, Entry, hasher, model_digest
from .kinds import Array, Kind
from .lanes import Lanes
from .records import GROUP, MARK_BYTES, MAX_HISTORY, Action, Header, Piece, TensorRecord, fits, pieces
from .sources import Source
from .symbols import write_planes

Positions = Any
Progress = Callable[[int], None]


class Sink(Protocol):
    """Takes the sections: those of groups, and those of tensors that travel whole, each kind in order."""

    def group(self, section: bytes) -> None:
        """The next group."""

    def whole(self, section: bytes) -> None:
        """The next piece of a tensor that travels whole."""


@dataclass
class MemorySink:
    """Sections in lists."""

    groups: list[bytes] = field(default_factory=list)
    wholes: list[bytes] = field(default_factory=list)

    def group(self, section: bytes) -> None:
        """The next group."""
        self.groups.append(section)

    def whole(self, section: bytes) -> None:
        """The next piece of a tensor that travels whole."""
        self.wholes.append(section)


@dataclass(frozen=True)
class Origin:
    """What a patch follows: its version, and marks of the versions before its base."""

    version: int = 0
    history: tuple[bytes, ...] = ()

    @classmethod
    def after(cls, header: Header) -> Origin:
        """That of the patch that follows this one."""
        return cls(header.version + 1, (header.base[:MARK_BYTES], *header.history)[:MAX_HISTORY])


def changes(pairs: list[tuple[Array, Array]], kind: Kind) -> tuple[list[int], Array, Array]:
    """The changes of some pieces as one group: how many in each, and the positions and step codes of all."""
    room_positions, room_codes = _room(kind)
    counts, total, offset = [], 0, 0
    for old, new in pairs:
        count = int(kernels.steps.find(old, new, np.uint64(kind.flip), room_positions[total:], room_codes[total:]))
        room_positions[total : total + count] += np.uint32(offset)
        counts.append(count)
        total, offset = total + count, offset + old.size
    return counts, room_positions[:total].copy(), room_codes[:total].copy()


_local = threading.local()


def _room(kind: Kind) -> tuple[Array, Array]:
    """Room for the changes of a group: kept by each thread, as new memory would cost more than the search."""
    if not hasattr(_local, "room"):
        _local.room = np.empty(GROUP, np.uint32), np.empty(GROUP, np.uint64)
    room: tuple[Array, Array] = _local.room
    return room[0], room[1].view(kind.unsigned)


def encode_group(pairs: list[tuple[Array, Array]], kind: Kind, codec: IndexCodec | None) -> tuple[list[int], bytes]:
    """The section of a group, and the changes of each piece."""
    counts, positions, codes = changes(pairs, kind)
    size = sum(old.size for old, _ in pairs)
    if not positions.size:
        return counts, b""
    if codec is not None:
        return counts, portable.encode(codec, size, positions, codes)
    old = pairs[0][0] if len(pairs) == 1 else np.concatenate([old for old, _ in pairs])
    return counts, conditional.encode(old, kind, positions, codes)


def _unchanged(piece: Piece) -> tuple[list[Piece], list[int], bytes]:
    return [piece], [0], b""


@dataclass(eq=False)
class Comparison:
    """The walk over both versions. `records` are complete when `run` is done."""

    old: Source
    new: Source
    sink: Sink
    codec: IndexCodec | None
    threads: int
    progress: Progress = lambda size_bytes: None
    records: list[TensorRecord] = field(default_factory=list)
    _group_sizes: list[int] = field(default_factory=list)
    _base: list[Entry] = field(default_factory=list)
    _result: list[Entry] = field(default_factory=list)
    _together: list[Piece] = field(default_factory=list)
    _pairs: list[tuple[Array, Array]] = field(default_factory=list)

    def run(self, origin: Origin) -> Header:
        """Compare all tensors; returns the header."""
        old_names, new_names = set(self.old.names), set(self.new.names)
        with Lanes(self.threads, self._deliver) as self._lanes:
            for name in self.new.names:
                if name in old_names and self.old.describe(name) == self.new.describe(name):
                    self._compare(name)
                else:
                    self._send_whole(name, name in old_names)
            for name in self.old.names:
                if name not in new_names:
                    self._remove(name)
            self._close_group()
        base, result = model_digest(self._base), model_digest(self._result)
        return Header(base, result, origin.version, origin.history, self.codec, tuple(self.records), tuple(self._group_sizes))

    def _compare(self, name: str) -> None:
        kind, shape = self.new.describe(name)
        record = TensorRecord(name, kind, shape, Action.UNCHANGED)
        self.records.append(record)
        before, after = hasher(), None
        parts = pieces(record.numel, len(self.records) - 1)
        for piece in parts:
            old, new = self.old.read(name, piece.start, piece.stop), self.new.read(name, piece.start, piece.stop)
            if kernels.steps.first_unequal(old, new) < old.size and after is None:
                after = before.copy()
                self._begin_changed(record, parts[: piece.number])
            before.update(old.view("u1").data)
            if after is not None:
                after.update(new.view("u1").data)
                self._add_to_group(record, piece, old, new)
            self.progress(old.nbytes)
        digest = before.digest()
        self._base.append((name, kind, shape, digest))
        self._result.append((name, kind, shape, digest if after is None else after.digest()))
        record.base_check = digest[:CHECK_BYTES]
        record.result_check = b"" if after is None else after.digest()[:CHECK_BYTES]

    def _begin_changed(self, record: TensorRecord, equal: list[Piece]) -> None:
        record.action, record.counts = Action.CHANGED, [0] * len(pieces(record.numel))
        if self._together and not fits(self.records, self._together, record):
            self._close_group()
        for piece in equal:
            self._lanes.run(partial(_unchanged, piece))

    def _add_to_group(self, record: TensorRecord, piece: Piece, old: Array, new: Array) -> None:
        self._together.append(piece)
        self._pairs.append((old, new))
        if record.numel > GROUP:
            self._close_group()

    def _close_group(self) -> None:
        if self._together:
            together, pairs, kind = self._together, self._pairs, self.records[self._together[0].tensor].kind
            self._together, self._pairs = [], []
            self._lanes.run(lambda: (together, *encode_group(pairs, kind, self.codec)))

    def _deliver(self, done: tuple[list[Piece], list[int], bytes]) -> None:
        together, counts, section = done
        for piece, count in zip(together, counts, strict=True):
            self.records[piece.tensor].counts[piece.number] = count
        self._group_sizes.append(len(section))
        self.sink.group(section)

    def _send_whole(self, name: str, replaced: bool) -> None:
        kind, shape = self.new.describe(name)
        record = TensorRecord(name, kind, shape, Action.REPLACED if replaced else Action.ADDED)
        self.records.append(record)
        state = hasher()
        for piece in pieces(record.numel):
            part = self.new.read(name, piece.start, piece.stop)
            state.update(part.view("u1").data)
            section = write_planes(part)
            record.sizes.append(len(section))
            self.sink.whole(section)
            self.progress(part.nbytes)
        self._result.append((name, kind, shape, state.digest()))
        record.result_check = state.digest()[:CHECK_BYTES]
        if replaced:
            record.base_check = self._digest_base(name)[:CHECK_BYTES]

    def _remove(self, name: str) -> None:
        kind, shape = self.old.describe(name)
        self.records.append(TensorRecord(name, kind, shape, Action.REMOVED, base_check=self._digest_base(name)[:CHECK_BYTES]))

    def _digest_base(self, name: str) -> bytes:
        kind, shape = self.old.describe(name)
        digest = digest_of(self.old, name)
        self._base.append((name, kind, shape, digest))
        return digest


def digest_of(source: Source, name: str, progress: Progress = lambda size_bytes: None) -> bytes:
    """The digest of a tensor, read in pieces."""
    state = hasher()
    for piece in pieces(int(np.prod(source.describe(name)[1], dtype=np.int64))):
        part = source.read(name, piece.start, piece.stop)
        state.update(part.view("u1").data)
        progress(part.nbytes)
    return bytes(state.digest())
