"""From two versions of weights to the sections of a patch, in one pass over both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import prod
from typing import Protocol

import numpy as np

from .. import kernels
from ..codec import IndexCodec
from ..errors import InputError
from . import conditional, portable
from .digests import BLOCK_BYTES, CHECK_BYTES, Entry, PairHasher, hasher, model_digest
from .kinds import Array, Kind, joined
from .pool import OrderedPool
from .records import GROUP, MARK_BYTES, MAX_HISTORY, Action, Changes, Header, TensorRecord, fits, piece_size, pieces
from .sources import Progress, TensorSource, silent
from .symbols import write_planes


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
    """What a patch follows: its version, marks of the versions before its base, and the digest of its base where that is known."""

    version: int = 1
    history: tuple[bytes, ...] = ()
    base: bytes | None = None

    @classmethod
    def after(cls, header: Header) -> Origin:
        """That of the patch that follows this one."""
        return cls(header.version + 1, (header.base[:MARK_BYTES], *header.history)[:MAX_HISTORY], header.result)


def encode_group(changes: Sequence[Changes], kind: Kind, codec: IndexCodec | None, old: Sequence[Array] = ()) -> bytes:
    """The section of a group. Without a codec, it is conditional on `old`, the patterns of the pieces."""
    offsets = list(accumulate((piece_size(piece) for piece, _, _ in changes), initial=0))
    positions = joined([where + np.uint32(offset) if offset else where for offset, (_, where, _) in zip(offsets, changes, strict=False)])
    codes = joined([codes for _, _, codes in changes])
    if not positions.size:
        return b""
    if codec is not None:
        return portable.encode(codec, offsets[-1], positions, codes)
    return conditional.encode(joined(old), kind, positions, codes)


@dataclass(eq=False)
class Comparison:
    """Compares the two versions. `records` are complete when `run` is done."""

    old: TensorSource
    new: TensorSource
    sink: Sink
    codec: IndexCodec | None
    threads: int
    progress: Progress = silent
    records: list[TensorRecord] = field(default_factory=list)
    _group_sizes: list[int] = field(default_factory=list)
    _base: list[Entry] = field(default_factory=list)
    _result: list[Entry] = field(default_factory=list)
    _together: list[Changes] = field(default_factory=list)
    _old: list[Array] = field(default_factory=list)
    _together_numel: int = 0
    _positions: Array = field(default_factory=lambda: np.empty(GROUP, np.uint32))
    _codes: Array = field(default_factory=lambda: np.empty(GROUP, np.uint64))

    def run(self, origin: Origin) -> Header:
        """Compare all tensors; returns the header. `InputError` where the old weights are not what `origin` says."""
        old_names, new_names = set(self.old.names), set(self.new.names)
        with OrderedPool(self.threads, self._deliver) as self._pool:
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
        if origin.base not in (None, base):
            raise InputError("the old weights are not the result of the patch that this one is to follow (after)")
        return Header(base, result, origin.version, origin.history, self.codec, tuple(self.records), tuple(self._group_sizes))

    def _compare(self, name: str) -> None:
        kind, shape = self.new.describe(name)
        record = TensorRecord(name, kind, shape, Action.UNCHANGED)
        self.records.append(record)
        states, parts = PairHasher(), pieces(record.numel, len(self.records) - 1)
        for piece in parts:
            old, new = self.old.read(name, piece.start, piece.stop), self.new.read(name, piece.start, piece.stop)
            positions, codes = self._find(old, new, kind, states)
            if positions.size and record.action == Action.UNCHANGED:
                self._begin_changed(record, len(parts), piece.number)
            if record.action == Action.CHANGED:
                record.counts[piece.number] = positions.size
                self._add_to_group(record, (piece, positions, codes), old)
            self.progress(old.nbytes)
        before, after = states.old.digest(), states.new.digest()
        self._base.append((name, kind, shape, before))
        self._result.append((name, kind, shape, after))
        record.base_check = before[:CHECK_BYTES]
        record.result_check = after[:CHECK_BYTES] if record.action == Action.CHANGED else b""

    def _find(self, old: Array, new: Array, kind: Kind, states: PairHasher) -> tuple[Array, Array]:
        """Where two pieces differ, and the codes of the steps. Both are hashed block by block, while they are in the cache."""
        positions, codes, flip = self._positions, self._codes.view(kind.unsigned), np.uint64(kind.flip)
        old_bytes, new_bytes = old.view("u1").data, new.view("u1").data
        count, block = 0, BLOCK_BYTES // kind.itemsize
        for start in range(0, old.size, block):
            after = kernels.steps.find(old, new, (start, min(start + block, old.size)), flip, positions, codes, count)
            hashed = slice(start * kind.itemsize, (start + block) * kind.itemsize)
            states.update(old_bytes[hashed], new_bytes[hashed], equal=after == count)
            count = after
        return positions[:count].copy(), codes[:count].copy()

    def _begin_changed(self, record: TensorRecord, parts: int, equal: int) -> None:
        record.action, record.counts = Action.CHANGED, [0] * parts
        if self._together and not self._fits(record):
            self._close_group()
        for _ in range(equal):
            self._pool.run(bytes)

    def _fits(self, record: TensorRecord) -> bool:
        return fits(self.records[self._together[0][0].tensor], self._together_numel, record)

    def _add_to_group(self, record: TensorRecord, changes: Changes, old: Array) -> None:
        self._together.append(changes)
        self._old.append(old)
        self._together_numel += piece_size(changes[0])
        if record.numel > GROUP:
            self._close_group()

    def _close_group(self) -> None:
        if self._together:
            kind = self.records[self._together[0][0].tensor].kind
            self._pool.run(partial(encode_group, self._together, kind, self.codec, self._old))
            self._together, self._old, self._together_numel = [], [], 0

    def _deliver(self, section: bytes) -> None:
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


def digest_of(source: TensorSource, name: str, progress: Progress = silent) -> bytes:
    """The digest of a tensor, read in pieces."""
    state = hasher()
    for piece in pieces(prod(source.describe(name)[1])):
        part = source.read(name, piece.start, piece.stop)
        state.update(part.view("u1").data)
        progress(part.nbytes)
    return bytes(state.digest())
