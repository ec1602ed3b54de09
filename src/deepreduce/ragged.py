"""Arrays of different lengths, one after another in one array: how the tensors of a message reach a kernel in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reader import Part
from .tensor import Positions, Values

_SPARE = bytes(16)


def bounds_of(lengths: Sequence[int] | Positions) -> Positions:
    """Return where arrays of these lengths begin and end.

    >>> bounds_of([2, 0, 3])
    array([0, 2, 2, 5])
    """
    bounds = np.empty(len(lengths) + 1, np.int64)
    bounds[0] = 0
    np.add.accumulate(lengths, out=bounds[1:])
    return bounds


def joined(arrays: Sequence[Values]) -> Values:
    """Return the arrays one after another; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def cut(flat: Values, bounds: Positions) -> list[Values]:
    """Return the arrays between the bounds, as views.

    >>> cut(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
    [array([7, 8]), array([], dtype=int64), array([9])]
    """
    return list(map(flat.__getitem__, map(slice, (at := bounds.tolist()), at[1:])))


def cut_words(words: NDArray[np.uint64], ends: Positions) -> list[Part]:
    """Return the sections that end at these bytes of the words, as the wire has them."""
    view = words.astype("<u8", copy=False).view(np.uint8).data.toreadonly()
    return list(map(view.__getitem__, map(slice, [0, *(at := ends.tolist())], at)))


def cut_bytes(flat: Values, bounds: Positions) -> list[Part]:
    """Return the bytes of the elements between the bounds, as the wire has them. They are views where the machine is little-endian."""
    numbers = flat.view(f"u{flat.itemsize}")
    view = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).view(np.uint8).data.toreadonly()
    return list(map(view.__getitem__, map(slice, (at := (bounds * flat.itemsize).tolist()), at[1:])))


def joined_elements(parts: Sequence[Part], counts: Sequence[int], dtype: np.dtype[Any]) -> Values | None:
    """Return the elements of sections one after another in a new array; None where a section does not hold exactly so many."""
    if any(len(part) != count * dtype.itemsize for part, count in zip(parts, counts, strict=True)):
        return None
    numbers = np.frombuffer(bytearray().join(parts), f"<u{dtype.itemsize}")
    return numbers.astype(f"u{dtype.itemsize}", copy=False).view(dtype)


def joined_parts(parts: Sequence[Part]) -> tuple[NDArray[np.uint8], Positions]:
    """Return sections one after another, with the spare bytes that `kernels.gaps.load` needs, and where each ends."""
    return np.frombuffer(b"".join([*parts, _SPARE]), np.uint8), bounds_of(list(map(len, parts)))[1:]
