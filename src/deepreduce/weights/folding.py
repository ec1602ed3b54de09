"""Several patches as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import kernels
from ..codec import IndexCodec
from ..errors import CorruptError, InputError
from ..message import DEFAULT_MAX_NUMEL
from . import envelope
from .api import Mode, codec_of_mode, patched
from .applying import check_whole_numel
from .checking import check_base, check_chain, entries
from .comparing import Comparison, MemorySink, Origin, Sink, encode_group
from .kinds import Array, Kind, steps_of
from .opened import Patch
from .pool import default_threads
from .records import Action, Header, Piece, TensorRecord, groups, pieces
from .sources import NamedArrays, Progress, TensorSource, numel_of, silent
from .symbols import write_planes

if TYPE_CHECKING:
    from typing_extensions import Buffer


def fold(
    patches: Sequence[Buffer],
    base: Mapping[str, Array] | None = None,
    *,
    mode: Mode | None = None,
    threads: int | None = None,
    max_numel: int = DEFAULT_MAX_NUMEL,
) -> bytes:
    """Return one patch that does what these do one after the other.

    Portable patches are folded by themselves. Conditional ones need the weights that the first was made from, `base`. `mode` is that of the
    first patch unless it is given. The tensors that a patch adds or replaces may have as many elements together as the base, and
    `max_numel` more.

    >>> import numpy as np
    >>> from deepreduce.weights import apply, diff
    >>> versions = [{"w": np.float32([n, 2])} for n in range(3)]
    >>> steps = [diff(old, new, mode="portable") for old, new in zip(versions, versions[1:])]
    >>> apply(versions[0], fold(steps))["w"]
    array([2., 2.], dtype=float32)
    """
    opened = [Patch.of_bytes(blob) for blob in patches]
    sink = MemorySink()
    source = None if base is None else NamedArrays(base)
    header = fold_into(opened, source, mode, sink, threads or default_threads(), max_numel)
    return envelope.join(header, [*sink.groups, *sink.wholes])


def fold_into(
    patches: Sequence[Patch],
    base: TensorSource | None,
    mode: Mode | None,
    sink: Sink,
    threads: int,
    max_numel: int,
    progress: Progress = silent,
) -> Header:
    """Fold patches, section by section, into a sink; returns the header."""
    if not patches:
        raise InputError("there is no patch to fold")
    headers = [patch.header for patch in patches]
    codec = codec_of_mode(mode or headers[0].mode, "rice")
    check_chain(headers)
    for header in headers:
        check_whole_numel(header, max_numel + (0 if base is None else numel_of(base)))
    if base is None and (codec is None or any(header.codec is None for header in headers)):
        raise InputError("conditional patches are folded with the weights that the first was made from: give the base")
    if base is None:
        return _Fold(patches, sink).run()
    check_base(headers[0], entries(base, threads, progress))
    if codec is not None:
        codec = headers[0].codec or codec
    comparison = Comparison(base, patched(base, patches), sink, codec, threads, progress)
    folded = comparison.run(Origin(headers[-1].version, headers[0].history))
    if folded.result != headers[-1].result:
        raise CorruptError("the weights after the last patch are not what it promises")
    return folded


class _Fold:
    """Portable patches, merged piece by piece without the weights."""

    def __init__(self, patches: Sequence[Patch], sink: Sink) -> None:
        self._patches, self._sink = patches, sink
        self._cache: dict[int, tuple[int, dict[tuple[str, int], tuple[Array, Array]]]] = {}

    def run(self) -> Header:
        """Merge everything; returns the header."""
        first, last = self._patches[0].header, self._patches[-1].header
        names = dict.fromkeys(record.name for patch in reversed(self._patches) for record in patch.header.tensors)
        tensors = [record for name in names if (record := self._record(name)) is not None]
        codec = first.codec
        assert codec is not None
        merged = [record for record in tensors if record.action == Action.CHANGED]
        for record in merged:
            record.counts = [self._merged(record.name, piece.number, record.kind)[0].size for piece in pieces(record.numel)]
            if not record.changed:
                record.action, record.result_check, record.counts = Action.UNCHANGED, b"", []
        sizes = [self._write_group(tensors, group, codec) for group in groups(tensors)]
        for record in tensors:
            if record.travels_whole:
                self._write_whole(record)
        return Header(first.base, last.result, last.version, first.history, codec, tuple(tensors), tuple(sizes))

    def _record(self, name: str) -> TensorRecord | None:
        """What becomes of a tensor in all."""
        found = [record for patch in self._patches if (record := patch.records.get(name)) is not None]
        in_base, gone = found[0].in_base, found[-1].action == Action.REMOVED
        if name not in self._patches[0].records:
            in_base = False
        if gone and not in_base:
            return None
        last = found[-1]
        record = TensorRecord(name, last.kind, last.shape, Action.CHANGED, base_check=found[0].base_check if in_base else b"")
        if gone:
            record.action, record.kind, record.shape = Action.REMOVED, found[0].kind, found[0].shape
            return record
        if all(each.action == Action.UNCHANGED for each in found):
            record.action = Action.UNCHANGED
            return record
        if any(each.action not in (Action.UNCHANGED, Action.CHANGED) for each in found):
            record.action = Action.REPLACED if in_base else Action.ADDED
        record.result_check = last.result_check or last.base_check
        return record

    def _changes(self, index: int, name: str, number: int) -> tuple[Array, Array] | None:
        """The changes that one patch makes to a piece."""
        patch = self._patches[index]
        record = patch.records.get(name)
        if record is None or record.action != Action.CHANGED:
            return None
        group = patch.group_of[name, number]
        if self._cache.get(index, (-1,))[0] != group:
            tensors = patch.header.tensors
            decoded = patch.decode_group(group, None)
            self._cache[index] = group, {(tensors[at.tensor].name, at.number): (where, codes) for at, where, codes in decoded}
        return self._cache[index][1][name, number]

    def _merged(self, name: str, number: int, kind: Kind) -> tuple[Array, Array]:
        """The positions and the step codes of all patches together."""
        found = [changes for index in range(len(self._patches)) if (changes := self._changes(index, name, number)) is not None]
        if len(found) == 1:
            return found[0]
        return merge([where for where, _ in found], [codes for _, codes in found], kind)

    def _write_group(self, tensors: Sequence[TensorRecord], group: Sequence[Piece], codec: IndexCodec) -> int:
        kind = tensors[group[0].tensor].kind
        section = encode_group([(piece, *self._merged(tensors[piece.tensor].name, piece.number, kind)) for piece in group], kind, codec)
        self._sink.group(section)
        return len(section)

    def _write_whole(self, record: TensorRecord) -> None:
        """A tensor that travelled whole, with the changes that came later."""
        start = max(
            index for index, patch in enumerate(self._patches) if record.name in patch.records and patch.records[record.name].travels_whole
        )
        for piece in pieces(record.numel):
            patterns = self._patches[start].read_whole(record.name, piece.number)
            for index in range(start + 1, len(self._patches)):
                changes = self._changes(index, record.name, piece.number)
                if changes is not None:
                    kernels.steps.move(patterns, *changes, np.uint64(record.kind.flip))
            section = write_planes(patterns)
            record.sizes.append(len(section))
            self._sink.whole(section)


def merge(positions: Sequence[Array], codes: Sequence[Array], kind: Kind) -> tuple[Array, Array]:
    """Changes that follow one another as one: steps at the same position add up, and vanish where they add up to nothing.

    >>> from .kinds import KINDS
    >>> merge([np.uint32([1, 5]), np.uint32([1, 7])], [np.uint16([0, 0]), np.uint16([1, 2])], KINDS[1])
    (array([5, 7], dtype=uint32), array([0, 2], dtype=uint16))
    """
    where, which = np.unique(np.concatenate(positions), return_inverse=True)
    total = np.zeros(where.size, np.uint64)
    np.add.at(total, which, steps_of(np.concatenate(codes)))
    width = np.uint64(8 * kind.itemsize)
    total &= np.uint64(2 ** int(width) - 1)
    kept = total != 0
    total = total[kept]
    negative = total >> (width - np.uint64(1))
    sizes = np.where(negative != 0, np.uint64(0) - total, total) & np.uint64(2 ** int(width) - 1)
    return where[kept], (((sizes - np.uint64(1)) << np.uint64(1)) + negative).astype(kind.unsigned)
