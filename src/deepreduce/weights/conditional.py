"""Changes of weights whose old values the reader has: how likely a weight changes, and how far, follows from its exponent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..errors import CorruptError
from ..reader import Reader, varint
from . import symbols
from .kinds import Array, Kind
from .tables import levels_of, read_levels, write_levels

Positions = NDArray[np.uint32]
Codes = NDArray[Any]

CONTEXTS = 12
_TOKENS = 256
_CLASSES = 256
_TOP_LEVEL = 86
_HAZARDS = np.array([0, *(round(2 ** (level / 4)) for level in range(1, _TOP_LEVEL + 1))], np.uint32)
_SAMPLED = 1 << 17
_LONG_STEPS = 0.02


@dataclass(frozen=True, eq=False)
class Model:
    """The hazard of each class as a level, the highest class with long steps, and the token levels of each context."""

    levels: NDArray[np.uint8]
    first: int
    tokens: tuple[NDArray[np.uint8], ...]

    @property
    def hazards(self) -> NDArray[np.uint32]:
        """The hazard of each class."""
        hazards = np.zeros(_CLASSES, np.uint32)
        hazards[: self.levels.size] = _HAZARDS[self.levels]
        return hazards

    @property
    def contexts(self) -> NDArray[np.uint8]:
        """The context of each class: 0 where nearly all steps are 1, then one for each octave below, the last for all the rest."""
        return np.clip(self.first - np.arange(_CLASSES), 0, CONTEXTS - 1).astype(np.uint8)

    def write(self) -> bytes:
        """The model as bytes."""
        return write_levels(self.levels) + varint(self.first) + b"".join(map(write_levels, self.tokens))

    @classmethod
    def read(cls, reader: Reader) -> Model:
        """The inverse of `write`."""
        levels = read_levels(reader, _CLASSES, _TOP_LEVEL)
        first = reader.varint(limit=_CLASSES)
        return cls(levels, first, tuple(read_levels(reader, _TOKENS) for _ in range(CONTEXTS)))


def fit_hazards(totals: NDArray[np.int64], counts: NDArray[np.int64]) -> Model:
    """The model of `totals` weights by class, with `counts` changes and, among them, long steps by class; without tokens yet."""
    changed, long = counts[:, 0], np.flatnonzero(counts[:, 1] > _LONG_STEPS * counts[:, 0])
    chances = np.minimum(changed / np.maximum(np.maximum(totals, changed), 1), 1 - 2.0**-12)
    levels = np.rint(4 * np.log2(np.maximum(-np.log2(1 - chances) * kernels.hazard.OCTAVE, 1)))
    first = int(long[-1]) + 1 if long.size else 0
    return Model(np.where(changed > 0, np.clip(levels, 1, _TOP_LEVEL), 0).astype(np.uint8), first, ())


def count_classes(old: Array, kind: Kind) -> NDArray[np.int64]:
    """About how many weights each class has: a sample is enough, with some more for classes that it could miss."""
    totals, stride = np.zeros(_CLASSES, np.int64), max(1, old.size // _SAMPLED)
    kernels.hazard.count_classes(old, np.uint64(kind.mask), np.uint64(kind.shift), stride, totals)
    return totals if stride == 1 else totals + 4 * stride


def encode(old: Array, kind: Kind, positions: Positions, codes: Codes) -> bytes:
    """The changes of these patterns; there is one at least."""
    tokens, extra_bits = symbols.split(codes)
    mask, shift = np.uint64(kind.mask), np.uint64(kind.shift)
    classes, counts = np.empty(positions.size, np.uint8), np.zeros((_CLASSES, 2), np.int64)
    kernels.hazard.count_changed(old, mask, shift, positions, tokens, classes, counts)
    model = fit_hazards(count_classes(old, kind), counts)
    contexts, by_context = model.contexts[classes], np.zeros((CONTEXTS, _TOKENS), np.int64)
    kernels.rans.count(tokens, contexts, by_context)
    model = replace(model, tokens=tuple(map(levels_of, by_context)))
    starts, widths, escapes = (np.empty(positions.size, np.uint32) for _ in range(3))
    kernels.hazard.intervals(old, mask, shift, model.hazards, positions, classes, starts, widths, escapes)
    words = np.empty(positions.size + int(escapes.sum(dtype=np.int64)) // 4 + 8, np.uint32)
    first, state = kernels.hazard.encode(starts, widths, escapes, words)
    coded = words[first:].astype("<u4", copy=False)
    front = [model.write(), int(state).to_bytes(8, "little"), varint(coded.size), coded.tobytes()]
    return b"".join([*front, symbols.write_stream(tokens, contexts, model.tokens), symbols.write_extras(codes, tokens, extra_bits)])


def decode(section: Reader, old: Array, kind: Kind, count: int) -> tuple[Positions, Codes]:
    """The positions, increasing, and the codes of `count` changes of these patterns."""
    model = Model.read(section)
    state = int.from_bytes(section.take(8), "little")
    if not kernels.hazard.LOWEST <= state < 2**63:
        raise CorruptError(f"the changes of a group begin with state {state}, which no writer leaves")
    size = section.varint(limit=section.remaining // 4)
    words = np.zeros(size + 1, np.uint32)
    words[:size] = section.array("<u4", size)
    positions, classes = np.empty(count, np.uint32), np.empty(count, np.uint8)
    mask, shift = np.uint64(kind.mask), np.uint64(kind.shift)
    if kernels.hazard.decode(old, mask, shift, model.hazards, words, size, np.uint64(state), positions, classes):
        raise CorruptError(f"{size} words do not hold {count} changes of {old.size} weights exactly")
    tokens = symbols.read_stream(section, model.contexts[classes], model.tokens)
    return positions, symbols.join(tokens, section.rest(), kind.unsigned)
