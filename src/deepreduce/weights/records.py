"""The header of a patch: which tensors there are, what becomes of each, and what they are checked against.

docs/format.md is normative. Changed tensors of one dtype are coded together in groups; how they are grouped follows from their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import NamedTuple

from ..codec import IndexCodec
from ..errors import CorruptError, InputError
from ..message import MAX_DIMENSIONS, name_text, shape_problem
from ..reader import Reader, varint
from .digests import CHECK_BYTES, DIGEST_BYTES
from .kinds import Array, Kind, Shape, kind_by_code
from .portable import read_codec, write_codec

KIND = 2
"""The kind of a message that is a patch."""

GROUP = 1 << 22
"""Weights in a group at most; a larger tensor is cut."""

MAX_PIECES = 1 << 19
"""Tensors of a patch at most, and pieces of all that change or travel whole: each takes some microseconds to read."""

MARK_BYTES = 8
MAX_HISTORY = 64
_CONDITIONAL, _PORTABLE = 0, 1


class Action(IntEnum):
    """What becomes of a tensor."""

    UNCHANGED = 0
    CHANGED = 1
    ADDED = 2
    REPLACED = 3
    REMOVED = 4


@dataclass(eq=False)
class TensorRecord:
    """One tensor: what it is after the patch (before it, where it is removed), what becomes of it, and its checks.

    `counts` are the changes of each piece of a changed tensor; `sizes` are the bytes of each piece of a tensor that travels whole.
    """

    name: str
    kind: Kind
    shape: Shape
    action: Action
    base_check: bytes = b""
    result_check: bytes = b""
    counts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * self.kind.itemsize

    @property
    def changed(self) -> int:
        """Number of elements that change, or that travel whole."""
        return self.numel if self.travels_whole else sum(self.counts)

    @property
    def piece_count(self) -> int:
        """Number of pieces that the patch says something of."""
        return len(self.counts) + len(self.sizes)

    @property
    def travels_whole(self) -> bool:
        """Whether all elements travel."""
        return self.action in (Action.ADDED, Action.REPLACED)

    @property
    def in_base(self) -> bool:
        """Whether the base has a tensor of this name."""
        return self.action != Action.ADDED


@dataclass(frozen=True, eq=False)
class Header:
    """All that a patch says before its sections. `codec` is None where the old weights are needed to read it.

    `version` counts the patches of a chain from 1; `history` marks the versions before the base, the latest first.
    """

    base: bytes
    result: bytes
    version: int
    history: tuple[bytes, ...]
    codec: IndexCodec | None
    tensors: tuple[TensorRecord, ...]
    group_sizes: tuple[int, ...]

    @property
    def mode(self) -> str:
        """``conditional`` or ``portable``."""
        return "conditional" if self.codec is None else "portable"


class Piece(NamedTuple):
    """A part of a tensor, by the index of its record: elements `start` to `stop`; `number` counts the pieces of the tensor."""

    tensor: int
    number: int
    start: int
    stop: int


Changes = tuple[Piece, Array, Array]
"""The changes of a piece: their positions in it, and the codes of their steps."""


def pieces(numel: int, tensor: int = 0) -> list[Piece]:
    """The pieces of a tensor: all of it, or GROUP elements each."""
    return [piece_at(numel, number, tensor) for number in range(-(-numel // GROUP))]


def piece_at(numel: int, number: int, tensor: int = 0) -> Piece:
    """One of the pieces of a tensor."""
    return Piece(tensor, number, number * GROUP, min((number + 1) * GROUP, numel))


def groups(tensors: Sequence[TensorRecord]) -> Iterator[list[Piece]]:
    """Which pieces are coded together: changed neighbours of one dtype, as long as they fit; every piece of a larger tensor alone.

    >>> from .kinds import KINDS
    >>> record = lambda numel: TensorRecord("w", KINDS[1], (numel,), Action.CHANGED)
    >>> [[piece.stop - piece.start for piece in group] for group in groups([record(5), record(GROUP + 1), record(7), record(8)])]
    [[5], [4194304], [1], [7, 8]]
    """
    together: list[Piece] = []
    together_numel = 0
    for index, record in enumerate(tensors):
        if record.action != Action.CHANGED:
            continue
        if together and not fits(tensors[together[0].tensor], together_numel, record):
            yield together
            together, together_numel = [], 0
        if record.numel > GROUP:
            yield from ([piece] for piece in pieces(record.numel, index))
        else:
            together += pieces(record.numel, index)
            together_numel += record.numel
    if together:
        yield together


def fits(first: TensorRecord, together_numel: int, record: TensorRecord) -> bool:
    """Whether a tensor can join the group that begins with `first` and has `together_numel` elements so far."""
    return first.kind == record.kind and together_numel + record.numel <= GROUP


def piece_size(piece: Piece) -> int:
    """Elements of a piece."""
    return piece.stop - piece.start


# To bytes and back


def write(header: Header) -> bytes:
    """The header as bytes."""
    coded = bytes((KIND, _CONDITIONAL)) if header.codec is None else bytes((KIND, _PORTABLE)) + write_codec(header.codec)
    counts = len(header.tensors), sum(record.piece_count for record in header.tensors)
    if max(counts) > MAX_PIECES:
        raise InputError(f"{counts[0]} tensors, of which {counts[1]} pieces change: a patch has at most {MAX_PIECES} of each")
    parts = [coded, varint(header.version), header.base, header.result, varint(len(header.history)), *header.history]
    parts += [varint(len(header.tensors)), *map(_write_tensor, header.tensors)]
    parts += [varint(size) for size in header.group_sizes]
    return b"".join(parts)


def _write_tensor(record: TensorRecord) -> bytes:
    problem = shape_problem(record.shape)
    if problem:
        raise InputError(f"tensor {record.name!r} {problem}")
    front = [name_text(record.name), bytes((record.kind.code, record.action)), varint(len(record.shape)), *map(varint, record.shape)]
    return b"".join([*front, record.base_check, record.result_check, *map(varint, record.counts), *map(varint, record.sizes)])


def read(reader: Reader) -> Header:
    """The header in these bytes."""
    kind, mode = reader.byte(), reader.byte()
    if kind != KIND or mode not in (_CONDITIONAL, _PORTABLE):
        raise CorruptError(f"message of kind {kind}.{mode}, a patch is of kind {KIND}.{_CONDITIONAL} or {KIND}.{_PORTABLE}")
    codec = read_codec(reader) if mode == _PORTABLE else None
    version = reader.varint()
    base, result = bytes(reader.take(DIGEST_BYTES)), bytes(reader.take(DIGEST_BYTES))
    history = tuple(bytes(reader.take(MARK_BYTES)) for _ in range(reader.varint(limit=MAX_HISTORY)))
    tensors = _read_tensors(reader, reader.varint(limit=MAX_PIECES))
    if len({record.name for record in tensors}) != len(tensors):
        raise CorruptError("a patch names a tensor twice")
    group_sizes = tuple(reader.varints())
    changes = [sum(tensors[piece.tensor].counts[piece.number] for piece in group) for group in groups(tensors)]
    if list(map(bool, changes)) != list(map(bool, group_sizes)):
        raise CorruptError(f"{len(group_sizes)} group sizes for {len(changes)} groups, or changes in 0 bytes, or bytes without changes")
    return Header(base, result, version, history, codec, tensors, group_sizes)


def _read_tensors(reader: Reader, count: int) -> tuple[TensorRecord, ...]:
    tensors: list[TensorRecord] = []
    max_pieces = MAX_PIECES
    for _ in range(count):
        tensors.append(_read_tensor(reader, max_pieces))
        max_pieces -= tensors[-1].piece_count
    return tuple(tensors)


def _read_tensor(reader: Reader, max_pieces: int) -> TensorRecord:
    name, kind, code = reader.text(), kind_by_code(reader.byte()), reader.byte()
    if code > max(Action):
        raise CorruptError(f"action {code} for tensor {name!r}, known are 0 to {max(Action)}")
    shape = tuple(reader.varint() for _ in range(reader.varint(limit=MAX_DIMENSIONS)))
    record = TensorRecord(name, kind, shape, Action(code))
    problem = shape_problem(shape)
    if problem:
        raise CorruptError(f"tensor {name!r} {problem}")
    numel = record.numel
    starts = range(0, numel, GROUP)
    if numel >= 2**56 or (len(starts) > max_pieces and record.action not in (Action.UNCHANGED, Action.REMOVED)):
        raise CorruptError(f"tensor {name!r} of {numel} elements: a patch has at most {MAX_PIECES} pieces of {GROUP}")
    if record.in_base:
        record.base_check = bytes(reader.take(CHECK_BYTES))
    if record.action in (Action.CHANGED, Action.ADDED, Action.REPLACED):
        record.result_check = bytes(reader.take(CHECK_BYTES))
    if record.action == Action.CHANGED:
        record.counts = [reader.varint(limit=min(GROUP, numel - start)) for start in starts]
        if not record.changed:
            raise CorruptError(f"tensor {name!r} is said to change, but no element does")
    if record.travels_whole:
        record.sizes = [reader.varint() for _ in starts]
    return record
