"""A patch whose header has been read: its groups and whole tensors, decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..errors import CorruptError, InputError
from ..reader import Reader
from . import conditional, envelope, portable
from .envelope import Sections
from .kinds import Array, Kind, Shape, joined
from .records import GROUP, Action, Changes, Header, Piece, TensorRecord, groups, piece_at, piece_size
from .sources import TensorSource
from .symbols import read_planes

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Patch:
    """A patch with its sections."""

    def __init__(self, header: Header, sections: Sections) -> None:
        self.header, self._sections = header, sections

    @classmethod
    def of_bytes(cls, blob: Buffer) -> Patch:
        """The patch in these bytes."""
        return cls(*envelope.split(blob))

    @classmethod
    def of_file(cls, file: IO[bytes]) -> Patch:
        """The patch in a file, which stays open as long as it is read."""
        return cls(*envelope.split_file(file))

    @cached_property
    def records(self) -> Mapping[str, TensorRecord]:
        """The records by name."""
        return {record.name: record for record in self.header.tensors}

    @cached_property
    def groups(self) -> Sequence[list[Piece]]:
        """The pieces of each group."""
        return list(groups(self.header.tensors))

    @cached_property
    def group_of(self) -> Mapping[tuple[str, int], int]:
        """The group of each piece, by the name of its tensor and its number."""
        names = self.header.tensors
        return {(names[piece.tensor].name, piece.number): number for number, group in enumerate(self.groups) for piece in group}

    @cached_property
    def _group_starts(self) -> list[int]:
        return list(accumulate(self.header.group_sizes, initial=0))

    @cached_property
    def _whole_starts(self) -> Mapping[tuple[str, int], int]:
        wholes = [(record, number) for record in self.header.tensors for number in range(len(record.sizes))]
        starts = accumulate((record.sizes[number] for record, number in wholes), initial=self._group_starts[-1])
        return {(record.name, number): start for (record, number), start in zip(wholes, starts, strict=False)}

    def kind_of_group(self, number: int) -> Kind:
        """The dtype of a group."""
        return self.header.tensors[self.groups[number][0].tensor].kind

    def decode_group(self, number: int, old: Sequence[Array] | None) -> list[Changes]:
        """The changes of a group, piece by piece; `old` are the patterns of its pieces, which only a portable patch can do without."""
        group, tensors = self.groups[number], self.header.tensors
        counts = [tensors[piece.tensor].counts[piece.number] for piece in group]
        if not sum(counts):
            return [(piece, np.empty(0, np.uint32), np.empty(0, self.kind_of_group(number).unsigned)) for piece in group]
        section = Reader(self._sections.take(self._group_starts[number], self.header.group_sizes[number]))
        kind, size = self.kind_of_group(number), sum(map(piece_size, group))
        if self.header.codec is not None:
            positions, codes = portable.decode(section, self.header.codec, kind, size, sum(counts))
        elif old is None:
            raise InputError("a conditional patch can be read only with the weights it was made from")
        else:
            positions, codes = conditional.decode(section, joined(old), kind, sum(counts))
        return list(self._by_piece(group, counts, positions, codes))

    def _by_piece(self, group: Sequence[Piece], counts: Sequence[int], positions: Any, codes: Any) -> Iterator[Changes]:
        if len(group) == 1:
            yield group[0], positions, codes
            return
        offsets = list(accumulate(map(piece_size, group), initial=0))
        bounds = np.searchsorted(positions, np.array(offsets, np.uint32))
        if np.diff(bounds).tolist() != list(counts):
            raise CorruptError("the changes of a group are not in the tensors that they are announced for")
        for piece, offset, start, stop in zip(group, offsets, bounds, bounds[1:], strict=False):
            yield piece, positions[start:stop] - np.uint32(offset), codes[start:stop]

    def read_whole(self, name: str, number: int) -> Array:
        """The patterns of a piece of a tensor that travels whole."""
        record = self.records[name]
        section = Reader(self._sections.take(self._whole_starts[name, number], record.sizes[number]))
        return read_planes(section, piece_size(piece_at(record.numel, number)), record.kind.unsigned)


class Patched:
    """The result of a patch on a source, made a group at a time: what the base and the patch say, read as one.

    The base is not checked here. Read the tensors in the order of `names`: then every group is decoded once.
    """

    def __init__(self, base: TensorSource, patch: Patch) -> None:
        self._base, self._patch = base, patch
        self._number, self._group = -1, dict[tuple[str, int], Array]()

    @property
    def names(self) -> Sequence[str]:
        return [record.name for record in self._patch.header.tensors if record.action != Action.REMOVED]

    def describe(self, name: str) -> tuple[Kind, Shape]:
        record = self._patch.records[name]
        return record.kind, record.shape

    def read(self, name: str, start: int, stop: int) -> Array:
        record = self._patch.records[name]
        if record.action == Action.UNCHANGED:
            return self._base.read(name, start, stop)
        parts = [piece_at(record.numel, number) for number in range(start // GROUP, -(-stop // GROUP))]
        read = self._patch.read_whole if record.travels_whole else self._changed
        found = [read(name, piece.number)[max(0, start - piece.start) : stop - piece.start] for piece in parts]
        return joined(found)

    def _changed(self, name: str, number: int) -> Array:
        wanted = self._patch.group_of[name, number]
        if wanted != self._number:
            tensors = self._patch.header.tensors
            group = [(tensors[piece.tensor].name, piece) for piece in self._patch.groups[wanted]]
            old = [self._base.read(name, piece.start, piece.stop) for name, piece in group]
            flip, self._group = np.uint64(self._patch.kind_of_group(wanted).flip), {}
            for before, (piece, positions, codes) in zip(old, self._patch.decode_group(wanted, old), strict=True):
                after = before.copy()
                kernels.steps.move(after, positions, codes, flip)
                self._group[tensors[piece.tensor].name, piece.number] = after
            self._number = wanted
        return self._group[name, number]
