"""Positions in a table, coded by how full its rows are and how popular its columns.

Row by row, a range coder takes the number of kept columns under an adaptive model of such numbers, then the columns, increasing, under
weights learned from the rows before. With k columns still to come and W(c) the sum of the weights from column c on, the next one is c
or a later one with probability (W(c) / W(first))**k, as it is for the least of k independent draws. Half of the weight of the other
k - 1 is taken from both sums, which makes this nearly exact for draws without replacement. A power of a fraction needs only products:
all arithmetic is in integers, and the same on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, TruncatedError
from .huffman import bit_length
from .jit import inline, kernel

Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]
Positions = NDArray[np.int64]
Sums = NDArray[np.uint64]
State = NDArray[np.uint64]
Model = NDArray[np.uint32]

MAX_COLUMNS = 2**20 - 1
"""The most columns that a row may have: each gets one part or more of the 2**28 that the range is cut in."""

FLUSH_BYTES = 2
"""What `encode` returns is never shorter."""

MAX_ROWS_A_BYTE = 2**14
"""A row takes 2**-11 bits or more, as no choice of two is surer than `_SURE` parts in 2**16."""

_ENDS_EARLY, _CORRUPT = -1, -2

_0, _1, _8 = np.uint64(0), np.uint64(1), np.uint64(8)
_TOP_BYTE = np.uint64(56)
_LEAST_RANGE = np.uint64(1 << 56)
_FULL_RANGE = np.uint64(2**64 - 1)
_FLUSHED_BITS = np.uint64(48)
_FLUSH_STEP = np.uint64((1 << 48) - 1)

_COLUMN_BITS = np.uint64(28)
_COLUMN_PARTS = np.uint64(1 << 28)
_ONE_Q32 = np.uint64(1 << 32)
_Q32 = np.uint64(32)
_ONE_Q62 = np.uint64(1 << 62)
_Q62_TO_Q32 = np.uint64(30)
_SEEN_WEIGHT = np.uint64(4)  # of a column for each time it was kept, besides 1
_MAX_SUM = np.uint64(1 << 28)

_CHANCE_BITS = np.uint64(16)
_CHANCE_PARTS = 1 << 16
_SURE = 32
_ASKED_BITS = 8
_MOST_ASKED = 254
_RATES = np.array([2**17 // (2 * asked + 3) for asked in range(_MOST_ASKED + 1)])
_TRUST = np.array([2**8 * asked // (asked + 8) for asked in range(_MOST_ASKED + 1)])

_CONTEXTS = 8
_LENGTHS = 22
_TREE = 4
_NODES = (
    _TREE + _LENGTHS
)  # of a length: 0 asks whether a number is longer, 1 to 3 for the two bits after its highest one, others for the rest
_CONTEXT_CELLS = _LENGTHS * _NODES

_MOST_LOOKS = 16

_LOW, _RANGE, _AT, _CODE, _WRONG = range(5)


# The range coder: from `low` on, `range` is left of the numbers that begin with the first `at` bytes


@kernel
def _carry(out: Bytes, at: int) -> None:
    at -= 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += 1


@inline
def _narrow(state: State, out: Bytes, start: np.uint64, size: np.uint64, parts_bits: np.uint64) -> None:
    part = state[_RANGE] >> parts_bits
    low = state[_LOW] + start * part
    if low < state[_LOW]:
        _carry(out, int(np.int64(state[_AT])))
    left, at = size * part, state[_AT]
    while left < _LEAST_RANGE:
        out[at] = low >> _TOP_BYTE
        at += _1
        low <<= _8
        left <<= _8
    state[_LOW], state[_RANGE], state[_AT] = low, left, at


@kernel
def _flush(state: State, out: Bytes) -> int:
    """Two bytes after which all continuations are inside the range: so what is written is never the beginning of something else."""
    low, at = state[_LOW] + _FLUSH_STEP, int(np.int64(state[_AT]))
    if low < state[_LOW]:
        _carry(out, at)
    out[at], out[at + 1] = low >> _TOP_BYTE, low >> _FLUSHED_BITS
    return at + FLUSH_BYTES


@kernel
def _open(state: State, packed: Bytes) -> None:
    state[_RANGE], state[_AT] = _FULL_RANGE, _8
    for i in range(8):
        state[_CODE] = state[_CODE] << _8 | (np.uint64(packed[i]) if i < packed.size else _0)


@inline
def _follow(state: State, packed: Bytes, start: np.uint64, size: np.uint64, parts_bits: np.uint64) -> None:
    """The mirror of `_narrow`; `code` is the number behind `low`. There are zeros after the last byte."""
    part = state[_RANGE] >> parts_bits
    code, left, at = state[_CODE] - start * part, size * part, state[_AT]
    if code >= left:
        state[_WRONG] = _1
    while left < _LEAST_RANGE:
        code = code << _8 | (np.uint64(packed[at]) if at < np.uint64(packed.size) else _0)
        at += _1
        left <<= _8
    state[_CODE], state[_RANGE], state[_AT] = code, left, at


# Choices of two. A cell has the chance of a one, and in its low 8 bits how often it was asked; the more often, the slower it learns.
# The cell of a context is trusted as far as it was asked, and the general one, which all contexts share, for the rest.


def _fresh_model() -> Model:
    return np.full((1 + _CONTEXTS) * _CONTEXT_CELLS, _CHANCE_PARTS // 2 << _ASKED_BITS, np.uint32)


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
        _narrow(state, out, _0, ones, _CHANCE_BITS)
    else:
        _narrow(state, out, ones, np.uint64(_CHANCE_PARTS) - ones, _CHANCE_BITS)
    _learn(model, cell, bit)
    _learn(model, cell + context * _CONTEXT_CELLS, bit)


@kernel
def _read_bit(state: State, packed: Bytes, model: Model, context: int, cell: int) -> int:
    ones = _chance(model, context, cell)
    bit = 1 if state[_CODE] < ones * (state[_RANGE] >> _CHANCE_BITS) else 0
    if bit:
        _follow(state, packed, _0, ones, _CHANCE_BITS)
    else:
        _follow(state, packed, ones, np.uint64(_CHANCE_PARTS) - ones, _CHANCE_BITS)
    _learn(model, cell, bit)
    _learn(model, cell + context * _CONTEXT_CELLS, bit)
    return bit


# How full a row is: the bit length in unary, then the bits after the highest one; of these, the second knows the first


@inline
def _context(count_before: int) -> int:
    """1 to 8, by how full the row before is."""
    return 1 + min(count_before, 2 + bit_length(np.uint64(count_before >> 2)), _CONTEXTS - 1)


@kernel
def _write_count(state: State, out: Bytes, model: Model, context: int, count: int) -> None:
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
def _read_count(state: State, packed: Bytes, model: Model, context: int) -> int:
    """Any number below 2**21."""
    length, cell = 0, 0
    while length < _LENGTHS - 1 and _read_bit(state, packed, model, context, cell):
        length += 1
        cell += _NODES
    node = 1
    for place in range(length - 2, -1, -1):
        node = 2 * node + _read_bit(state, packed, model, context, cell + (node if node < _TREE else _TREE + place))
    return node if length else 0


# The weights of the columns, and the parts of the range that they get


@kernel
def _sum_weights(counts: Sums, sums: Sums) -> None:
    """sums[c] becomes the sum of the weights from column c on. Counts are halved after it grew above `_MAX_SUM`."""
    total = _0
    for column in range(counts.size - 1, -1, -1):
        total += _SEEN_WEIGHT * counts[column] + _1
        sums[column] = total
    if total > _MAX_SUM:
        for column in range(counts.size):
            counts[column] >>= _1


@inline
def _is_time_to_sum(unsummed: int, seen: int, columns: int) -> bool:
    """Often while little is known, then after a quarter of the columns, and at last so seldom that it costs nothing."""
    return unsummed > 0 and 4 * unsummed >= min(columns, seen) and 16 * unsummed >= seen


@inline
def _half_of_others(sums: Sums, first: int, left: int) -> np.uint64:
    half: np.uint64 = sums[first] * np.uint64(left - 1) // np.uint64(2 * (sums.size - 1 - first))
    return half


@inline
def _power(fraction: np.uint64, exponent: int) -> np.uint64:
    """In parts of 2**32, rounded down; a smaller fraction never has the greater power, as all products are rounded alike."""
    power = _ONE_Q32
    while exponent > 1:
        if exponent & 1:
            power = power * fraction >> _Q32
        fraction = fraction * fraction >> _Q32
        exponent >>= 1
    return power * fraction >> _Q32


@inline
def _start_of(step: int, steps: int, left: int, weight: np.uint64, others: np.uint64, reciprocal: np.uint64) -> np.uint64:
    """The first part of column `first + step`, from which on there is `weight`; each of the `steps` columns has one part or more."""
    if step == 0:
        return _0
    if step == steps:
        return _COLUMN_PARTS
    later = _0
    if weight > others:
        later = _power((weight - others) * reciprocal >> _Q62_TO_Q32, left)
    return ((_ONE_Q32 - later) * (_COLUMN_PARTS - np.uint64(steps)) >> _Q32) + np.uint64(step)


@kernel
def _encode(row_counts: Counts, kept_columns: Counts, columns: int, model: Model, out: Bytes) -> int:
    state = np.zeros(5, np.uint64)
    state[_RANGE] = _FULL_RANGE
    counts, sums = np.zeros(columns, np.uint64), np.zeros(columns + 1, np.uint64)
    _sum_weights(counts, sums)
    begin, unsummed, count_before = 0, 0, 0
    for count in row_counts:
        _write_count(state, out, model, _context(count_before), count)
        first, end = 0, begin + count
        for i in range(begin, end):
            column, left = kept_columns[i], end - i
            steps = columns - first - left + 1
            if steps > 1:
                others = _half_of_others(sums, first, left)
                reciprocal = _ONE_Q62 // (sums[first] - others)
                start = _start_of(column - first, steps, left, sums[column], others, reciprocal)
                stop = _start_of(column - first + 1, steps, left, sums[column + 1], others, reciprocal)
                _narrow(state, out, start, stop - start, _COLUMN_BITS)
            counts[column] += _1
            first = column + 1
        begin, unsummed, count_before = end, unsummed + count, count
        if _is_time_to_sum(unsummed, begin, columns):
            _sum_weights(counts, sums)
            unsummed = 0
    return _flush(state, out)


# A reader guesses the column, then looks at the parts around its guess: only its speed depends on the guess


def _log_table() -> Counts:
    """log2(1 + i / 256) in parts of 2**24, rounded down; bit by bit, by squaring."""
    number = (256 + np.arange(256, dtype=np.uint64)) << np.uint64(23)
    log = np.zeros(256, np.int64)
    for _ in range(24):
        number = number * number >> np.uint64(31)
        bit = number >> _Q32
        number >>= bit
        log = 2 * log + bit.astype(np.int64)
    return np.append(log, 1 << 24)


_LOG = _log_table()
_EXP = (np.exp2(np.arange(257) / -256) * 2**32).astype(np.int64)


@inline
def _log2(number: np.uint64) -> np.int64:
    """In parts of 2**24, nearly; the number is not 0, and below 2**48."""
    high = bit_length(number) - 1
    behind = np.int64(number << np.uint64(48 - high)) & ((1 << 48) - 1)
    i, rest = behind >> 40, behind >> 16 & 0xFFFFFF
    log: np.int64 = (high << 24) + _LOG[i] + ((_LOG[i + 1] - _LOG[i]) * rest >> 24)
    return log


@inline
def _root(fraction: np.uint64, degree: int) -> np.uint64:
    """In parts of 2**32, nearly; the fraction is not 0."""
    fall = ((32 << 24) - _log2(fraction)) // degree
    i, rest = fall >> 16 & 255, fall & 0xFFFF
    return np.uint64((_EXP[i] + ((_EXP[i + 1] - _EXP[i]) * rest >> 16)) >> (fall >> 24))


@kernel
def _point_to_columns(sums: Sums, guide: Counts) -> np.uint64:
    """guide[sum >> shift] becomes a column at which, or not far after which, the sum of the weights is so much; returns the shift."""
    shift = _0
    while sums[0] >> shift >= np.uint64(guide.size):
        shift += _1
    column = 0
    for cell in range(np.int64(sums[0] >> shift), -1, -1):
        while sums[column + 1] >> shift > np.uint64(cell):
            column += 1
        guide[cell] = column
    return shift


@inline
def _guess(target: np.uint64, first: int, steps: int, left: int, sums: Sums, others: np.uint64, guide: Counts, shift: np.uint64) -> int:
    later = _ONE_Q32 - (target << (_Q32 - _COLUMN_BITS))
    weight = others + ((sums[first] - others) * (_root(later, left) if left > 1 else later) >> _Q32)
    column = max(guide[weight >> shift], first)
    last_look = min(first + steps - 1, column + _MOST_LOOKS)
    while column < last_look and sums[column + 1] >= weight:
        column += 1
    return int(max(column - first, 1))


@kernel
def _decode(packed: Bytes, columns: int, model: Model, row_counts: Counts, kept_columns: Counts) -> int:
    """Fills both arrays. Returns 0 or one of the negative codes."""
    state = np.zeros(5, np.uint64)
    _open(state, packed)
    all_read = np.uint64(packed.size + 8 - FLUSH_BYTES)
    counts, sums, guide = np.zeros(columns, np.uint64), np.zeros(columns + 1, np.uint64), np.zeros(2 * columns, np.int64)
    _sum_weights(counts, sums)
    shift = _point_to_columns(sums, guide)
    begin, unsummed, count_before = 0, 0, 0
    for row in range(row_counts.size):
        count = _read_count(state, packed, model, _context(count_before))
        if state[_AT] > all_read:
            return _ENDS_EARLY
        if state[_WRONG] or count > min(columns, kept_columns.size - begin):
            return _CORRUPT
        first, end = 0, begin + count
        for i in range(begin, end):
            left = end - i
            steps = columns - first - left + 1
            step = 0
            if steps > 1:
                target = state[_CODE] // (state[_RANGE] >> _COLUMN_BITS)
                if target >= _COLUMN_PARTS:
                    return _CORRUPT
                others = _half_of_others(sums, first, left)
                reciprocal = _ONE_Q62 // (sums[first] - others)
                start, stop, beyond, stride = _0, _COLUMN_PARTS, steps, 1
                probe = _guess(target, first, steps, left, sums, others, guide, shift)
                while beyond - step > 1:
                    if probe <= step or probe >= beyond:
                        probe = (step + beyond) >> 1
                    at = _start_of(probe, steps, left, sums[first + probe], others, reciprocal)
                    if at <= target:
                        step, start = probe, at
                        probe += stride
                    else:
                        beyond, stop = probe, at
                        probe -= stride
                    stride *= 2
                _follow(state, packed, start, stop - start, _COLUMN_BITS)
            kept_columns[i] = first + step
            counts[first + step] += _1
            first += step + 1
        row_counts[row] = count
        begin, unsummed, count_before = end, unsummed + count, count
        if _is_time_to_sum(unsummed, begin, columns):
            _sum_weights(counts, sums)
            shift = _point_to_columns(sums, guide)
            unsummed = 0
    if state[_AT] > all_read:
        return _ENDS_EARLY
    as_flushed = not state[_WRONG] and state[_CODE] <= _FLUSH_STEP
    return 0 if as_flushed and state[_AT] == all_read and begin == kept_columns.size else _CORRUPT


# Positions to rows and columns and back


@kernel
def _count(kept: Positions, columns: int, row_counts: Counts, column_counts: Counts) -> None:
    for position in kept:
        row = position // columns
        row_counts[row] += 1
        column_counts[position - row * columns] += 1


@kernel
def _columns_by_row(kept: Positions, columns: int, out: Counts) -> None:
    for i in range(kept.size):
        out[i] = kept[i] % columns


@kernel
def _rows_by_column(kept: Positions, columns: int, column_counts: Counts, out: Counts) -> None:
    ends = np.cumsum(column_counts)
    for i in range(kept.size - 1, -1, -1):
        row = kept[i] // columns
        column = kept[i] - row * columns
        ends[column] -= 1
        out[ends[column]] = row


@kernel
def _join_rows(row_counts: Counts, kept_columns: Counts, columns: int, out: Positions) -> None:
    i = 0
    for row in range(row_counts.size):
        for _ in range(row_counts[row]):
            out[i] = row * columns + kept_columns[i]
            i += 1


@kernel
def _join_columns(column_counts: Counts, kept_rows: Counts, rows: int, out: Positions) -> None:
    starts = np.zeros(rows + 1, np.int64)
    for row in kept_rows:
        starts[row + 1] += 1
    starts = np.cumsum(starts)
    i = 0
    for column in range(column_counts.size):
        for _ in range(column_counts[column]):
            row = kept_rows[i]
            out[starts[row]] = row * column_counts.size + column
            starts[row] += 1
            i += 1


def count(kept: Positions, rows: int, columns: int) -> tuple[Counts, Counts]:
    """How many positions every row and every column has.

    >>> count(np.array([0, 5, 6]), rows=3, columns=3)
    (array([1, 1, 1]), array([2, 0, 1]))
    """
    row_counts, column_counts = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    _count(kept, columns, row_counts, column_counts)
    return row_counts, column_counts


def encode(kept: Positions, rows: int, columns: int, by_column: bool) -> bytes:
    """The positions of a table, row by row, or column by column. A row, or else a column, has at most `MAX_COLUMNS` elements."""
    outer_counts, inner_counts = count(kept, rows, columns)
    inner = np.empty(kept.size, np.int64)
    if by_column:
        _rows_by_column(kept, columns, inner_counts, inner)
        outer_counts, inner_counts = inner_counts, outer_counts
    else:
        _columns_by_row(kept, columns, inner)
    out = np.empty(max_bytes(kept.size, outer_counts.size), np.uint8)
    size_bytes = _encode(outer_counts, inner, inner_counts.size, _fresh_model(), out)
    return out[:size_bytes].tobytes()


def max_bytes(nnz: int, rows: int) -> int:
    """A bound on the size: a choice of two takes less than 12 bits, the number of an empty row is one such choice, of any other row at
    most 41, and a column takes less than 29 bits."""
    return FLUSH_BYTES + 2 * rows + 66 * nnz


def decode(packed: bytes | memoryview, nnz: int, rows: int, columns: int, by_column: bool) -> Positions:
    """The inverse of `encode`: `nnz` increasing positions below rows * columns. Refuses all bytes that it would not write for them.

    >>> kept = np.array([3, 4, 70])
    >>> decode(encode(kept, 8, 10, by_column=True), 3, 8, 10, by_column=True)
    array([ 3,  4, 70])
    """
    outer, inner = (columns, rows) if by_column else (rows, columns)
    if outer > MAX_ROWS_A_BYTE * len(packed):
        raise TruncatedError(f"{outer} rows in {len(packed)} bytes")
    outer_counts, kept_inner, positions = np.empty(outer, np.int64), np.empty(nnz, np.int64), np.empty(nnz, np.int64)
    problem = _decode(np.frombuffer(bytes(packed), np.uint8), inner, _fresh_model(), outer_counts, kept_inner)
    if problem == _ENDS_EARLY:
        raise TruncatedError(f"{len(packed)} bytes hold less than {outer} rows")
    if problem == _CORRUPT:
        raise CorruptError(f"{len(packed)} bytes that are no {nnz} positions in {outer} rows of {inner}")
    if by_column:
        _join_columns(outer_counts, kept_inner, rows, positions)
    else:
        _join_rows(outer_counts, kept_inner, columns, positions)
    return positions


# The size without writing it


@kernel
def _log_factorial(number: int | np.int64) -> np.int64:
    """Stirling's formula for log2(number!), in parts of 2**16."""
    if number < 2:
        return np.int64(0)
    return ((2 * number + 1) * (_log2(np.uint64(number)) >> 8) >> 1) - number * 94548 + 86884 + 7879 // number


@kernel
def _learned_cost(counts: Counts) -> np.int64:
    """Symbols that occur so often, under frequencies that are learned on the way."""
    total, used, cost = np.int64(0), np.int64(0), np.int64(0)
    for number in counts:
        total += number
        used += min(number, 1)
        cost -= _log_factorial(number)
    return cost + _log_factorial(total + used) - _log_factorial(used)


@kernel
def _rows_cost(row_counts: Counts) -> np.int64:
    """The least of: as learned numbers; as a learned length with two bits and the rest raw, for all rows or by the row before."""
    each = np.zeros(row_counts.max() + 1, np.int64)
    seen, raw_bits, count_before = np.zeros((1 + _CONTEXTS, 4 * _LENGTHS), np.int64), 0, 0
    for number in row_counts:
        length = bit_length(np.uint64(number))
        raw = max(length - 3, 0)
        symbol = number if length < 4 else 4 * (length - 2) + (number >> raw & 3)
        each[number] += 1
        seen[0, symbol] += 1
        seen[_context(count_before), symbol] += 1
        raw_bits += raw
        count_before = number
    by_context = np.int64(0)
    for context in range(1, 1 + _CONTEXTS):
        by_context += _learned_cost(seen[context])
    return min(_learned_cost(each), (np.int64(raw_bits) << 16) + min(_learned_cost(seen[0]), by_context))


@kernel
def _cost(row_counts: Counts, column_counts: Counts) -> np.int64:
    columns = np.int64(column_counts.size)
    kept, cost = np.int64(0), np.int64(0)
    for number in column_counts:
        kept += number
        cost -= _log_factorial(number)
    cost += _log_factorial(kept + columns - 1) - _log_factorial(columns - 1) - kept * (_log2(np.uint64(columns)) >> 8)
    whole = _log_factorial(columns)
    for number in row_counts:
        if number:
            cost += whole - _log_factorial(number) - _log_factorial(columns - number)
    return _rows_cost(row_counts) + cost


def size_bytes(row_counts: Counts, column_counts: Counts) -> int:
    """About what `encode` takes, row by row, from what `count` returns; exchanged, column by column.

    The rows as if the numbers in them were learned, the columns as if all rows were drawn from weights that are learned.
    """
    return FLUSH_BYTES + (max(int(_cost(row_counts, column_counts)), 0) >> 19)
