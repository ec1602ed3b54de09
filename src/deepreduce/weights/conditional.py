"""Changes of weights whose old values the reader has: how likely a weight changes, and how far, follows from its exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..errors import CorruptError
from ..wire import Reader, varint
from . import symbols
from .kinds import Array, Kind
from .tables import frequencies_of, levels_of, read_levels, table_of, write_levels

Positions = NDArray[np.uint32]
Codes = NDArray[np.uint64]

CONTEXTS = 6
_CLASSES = 256
_TOP_LEVEL = 86
_HAZARDS = np.array([0, *(round(2 ** (level / 4)) for level in range(1, _TOP_LEVEL + 1))], np.uint32)
_SAMPLED = 1 << 18
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

    @property
    def frequencies(self) -> NDArray[np.uint32]:
        """The token frequencies of each context."""
        return np.stack([frequencies_of(levels) for levels in self.tokens])

    def write(self) -> bytes:
        """The model as bytes."""
        lead = int(np.flatnonzero(self.levels)[0])
        return varint(lead) + write_levels(self.levels[lead:]) + varint(self.first) + b"".join(map(write_levels, self.tokens))

    @classmethod
    def read(cls, reader: Reader) -> Model:
        """The inverse of `write`."""
        lead = reader.varint(limit=_CLASSES)
        levels = np.concatenate([np.zeros(lead, np.uint8), read_levels(reader, _CLASSES - lead, _TOP_LEVEL)])
        first = reader.varint(limit=_CLASSES)
        return cls(levels, first, tuple(read_levels(reader, kernels.tokens.ALPHABET) for _ in range(CONTEXTS)))


def fit(totals: NDArray[np.int64], changed: NDArray[np.int64]) -> Model:
    """The model of `totals` weights by class, of which `changed` changed, by class and token."""
    counts = changed.sum(1)
    chances = np.minimum(counts / np.maximum(np.maximum(totals, counts), 1), 1 - 2.0**-12)
    hazards = -np.log2(1 - chances) * kernels.hazard.OCTAVE
    levels = np.rint(4 * np.log2(np.maximum(hazards, 1)))
    long = np.flatnonzero(changed[:, 2:].sum(1) > _LONG_STEPS * counts)
    first = int(long[-1]) + 1 if long.size else 0
    model = Model(np.where(counts > 0, np.clip(levels, 1, _TOP_LEVEL), 0).astype(np.uint8), first, ())
    tokens = (levels_of(changed[model.contexts == context].sum(0)) for context in range(CONTEXTS))
    return Model(model.levels, first, tuple(tokens))


def encode(old: Array, kind: Kind, positions: Positions, codes: Codes) -> bytes:
    """The changes of these patterns; there is one at least."""
    tokens, extra_bits = symbols.split(codes)
    mask, shift = np.uint64(kind.mask), np.uint64(kind.shift)
    totals, changed = np.zeros(_CLASSES, np.int64), np.zeros((_CLASSES, kernels.tokens.ALPHABET), np.int64)
    kernels.hazard.count_classes(old, mask, shift, max(1, old.size // _SAMPLED), totals)
    kernels.hazard.count_changed(old, mask, shift, positions, tokens, changed)
    model = fit(totals, changed)
    starts, widths, escapes = (np.empty(positions.size, np.uint32) for _ in range(3))
    classes = np.empty(positions.size, np.uint8)
    kernels.hazard.intervals(old, mask, shift, model.hazards, positions, starts, widths, escapes, classes)
    words = np.empty(2 * positions.size + int(escapes.sum(dtype=np.int64)) // 4 + 8, np.uint32)
    contexts = model.contexts[classes]
    first, state = kernels.hazard.encode(starts, widths, escapes, contexts, tokens, model.frequencies, words)
    extras = symbols.write_extras(codes, tokens, extra_bits)
    coded = words[first:].astype("<u4", copy=False).tobytes()
    return b"".join([model.write(), varint(len(extras)), int(state).to_bytes(8, "little"), coded, extras])


def decode(section: Reader, old: Array, kind: Kind, count: int) -> tuple[Positions, Codes]:
    """The positions, increasing, and the codes of `count` changes of these patterns."""
    model = Model.read(section)
    extra_bytes = section.varint(limit=section.remaining)
    state = int.from_bytes(section.take(8), "little")
    size = (section.remaining - extra_bytes) // 4
    words = np.zeros(size + 2, np.uint32)
    words[:size] = section.array("<u4", size)
    if section.remaining != extra_bytes or not kernels.hazard.LOWEST <= state < 2**63:
        raise CorruptError("the changes of a group begin with a state that no writer leaves, or are no whole words")
    positions, tokens = np.empty(count, np.uint32), np.empty(count, np.uint8)
    tables: Any = np.stack([table_of(row) for row in model.frequencies])
    problem = kernels.hazard.decode(
        old, np.uint64(kind.mask), np.uint64(kind.shift), model.hazards, model.contexts, tables, words, size, np.uint64(state), positions, tokens
    )
    if problem:
        raise CorruptError(f"{size} words do not hold {count} changes of {old.size} weights exactly")
    if count and int(tokens.max()) >= kernels.tokens.ALPHABET:
        raise CorruptError(f"token {tokens.max()} of {kernels.tokens.ALPHABET}")
    return positions, symbols.join(tokens, section.rest(), limit=2 ** (8 * kind.itemsize) - 1)
