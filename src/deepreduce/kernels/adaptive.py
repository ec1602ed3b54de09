"""Numbers under a model that learns on the way, bit by bit through the range coder.

A cell has the chance of a one, and in its low 8 bits how often it was asked; the more often, the slower it learns. The cell of a context is
trusted as far as it was asked, and the general one, which all contexts share, for the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .bits import bit_length
from .jit import inline, kernel
from .rangecoder import CODE, RANGE, Bytes, State, follow, narrow

Model = NDArray[np.uint32]

CONTEXTS = 8
LENGTHS = 22
"""Bit lengths of numbers, 0 among them: numbers lie below 2**21."""

_0 = np.uint64(0)
_CHANCE_BITS = np.uint64(16)
_CHANCE_PARTS = 1 << 16
_SURE = 32
_ASKED_BITS = 8
_MOST_ASKED = 254
_RATES = np.array([2**17 // (2 * asked + 3) for asked in range(_MOST_ASKED + 1)])
_TRUST = np.array([2**8 * asked // (asked + 8) for asked in range(_MOST_ASKED + 1)])
_TREE = 4
_NODES = _TREE + LENGTHS  # of a length: 0 asks whether a number is longer, 1 to 3 for the two bits after its highest, others for the rest
_CONTEXT_CELLS = LENGTHS * _NODES


def fresh_model() -> Model:
    """All cells of a model that has seen nothing."""
    return np.full((1 + CONTEXTS) * _CONTEXT_CELLS, _CHANCE_PARTS // 2 << _ASKED_BITS, np.uint32)


@inline
def _chance(model: Model, context: int, cell: int) -> np.uint64:
    chance = np.int64(model[cell]) >> _ASKED_BITS
    special = np.int64(model[cell + context * _CONTEXT_CELLS])
    chance += ((special >> _ASKED_BITS) - chance) * _TRUST[special & 255] >> 8
    return np.uint64(min(max(chance, _SURE), _CHANCE_PARTS - _SURE))


@inline
def _learn(model: Model, cell: int, bit: int) -> None:
    chance, asked = np.int64(model[cell]) >> _ASKED_BITS, np.int64(model[cell]) & 255
    chance += (bit * (_CHANCE_PARTS - 1) - chance) * _RATES[asked] >> 16
    model[cell] = np.uint32(chance << _ASKED_BITS | min(asked + 1, _MOST_ASKED))


@kernel
def _write_bit(state: State, out: Bytes, model: Model, context: int, cell: int, bit: int) -> None:
    ones = _chance(model, context, cell)
    if bit:
        narrow(state, out, _0, ones, _CHANCE_BITS)
    else:
        narrow(state, out, ones, np.uint64(_CHANCE_PARTS) - ones, _CHANCE_BITS)
    _learn(model, cell, bit)
    _learn(model, cell + context * _CONTEXT_CELLS, bit)


@kernel
def _read_bit(state: State, packed: Bytes, model: Model, context: int, cell: int) -> int:
    ones = _chance(model, context, cell)
    bit = 1 if state[CODE] < ones * (state[RANGE] >> _CHANCE_BITS) else 0
    if bit:
        follow(state, packed, _0, ones, _CHANCE_BITS)
    else:
        follow(state, packed, ones, np.uint64(_CHANCE_PARTS) - ones, _CHANCE_BITS)
    _learn(model, cell, bit)
    _learn(model, cell + context * _CONTEXT_CELLS, bit)
    return bit


# A number: its bit length in unary, then the bits after the highest one; of these, the second knows the first


@inline
def context_of(count_before: int) -> int:
    """1 to 8, by how full the row before is."""
    return 1 + min(count_before, 2 + bit_length(np.uint64(count_before >> 2)), CONTEXTS - 1)


@kernel
def write_count(state: State, out: Bytes, model: Model, context: int, count: int) -> None:
    """Write a number below 2**21."""
    cell = 0
    for _ in range(bit_length(np.uint64(count))):
        _write_bit(state, out, model, context, cell, 1)
        cell += _NODES
    _write_bit(state, out, model, context, cell, 0)
    node = 1
    for place in range(bit_length(np.uint64(count)) - 2, -1, -1):
        bit = count >> place & 1
        _write_bit(state, out, model, context, cell + (node if node < _TREE else _TREE + place), bit)
        node = 2 * node + bit


@kernel
def read_count(state: State, packed: Bytes, model: Model, context: int) -> int:
    """Any number below 2**21."""
    length, cell = 0, 0
    while length < LENGTHS - 1 and _read_bit(state, packed, model, context, cell):
        length += 1
        cell += _NODES
    node = 1
    for place in range(length - 2, -1, -1):
        node = 2 * node + _read_bit(state, packed, model, context, cell + (node if node < _TREE else _TREE + place))
    return node if length else 0
