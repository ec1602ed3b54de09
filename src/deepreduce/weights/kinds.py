"""The dtypes that weights have, and how their bit patterns are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, InputError

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """One dtype. `flip` makes ordered keys of its bit patterns; the bits of `mask`, shifted down by `shift`, are the class of a pattern."""

    code: int
    name: str
    dtype: np.dtype[Any]
    flip: int
    mask: int
    shift: int

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The dtype of the bit patterns."""
        return np.dtype(f"u{self.itemsize}")


def _float(code: int, name: str, exponent_bits: int, class_shift: int) -> Kind:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    sign = 1 << (8 * dtype.itemsize - 1)
    width = 8 * dtype.itemsize - 1
    mask = (sign - 1) >> (width - exponent_bits) << (width - exponent_bits)
    return Kind(code, name, dtype, sign - 1, mask >> class_shift << class_shift, class_shift)


def _integer(code: int, name: str) -> Kind:
    return Kind(code, name, np.dtype(getattr(ml_dtypes, name, None) or name), 0, 0, 0)


KINDS = (
    _float(0, "float16", 5, 10),
    _float(1, "bfloat16", 8, 7),
    _float(2, "float32", 8, 23),
    _float(3, "float64", 11, 55),
    _float(4, "float8_e4m3fn", 4, 3),
    _float(5, "float8_e5m2", 5, 2),
    _integer(6, "float8_e8m0fnu"),
    _integer(7, "int8"),
    _integer(8, "uint8"),
    _integer(9, "int16"),
    _integer(10, "uint16"),
    _integer(11, "int32"),
    _integer(12, "uint32"),
    _integer(13, "int64"),
    _integer(14, "uint64"),
    _integer(15, "bool"),
)
"""All dtypes by their code in a patch. The class of a float is its exponent (for float64, the upper 8 bits of it); integers have one."""


@cache
def _by_dtype() -> dict[np.dtype[Any], Kind]:
    return {kind.dtype: kind for kind in KINDS}


def kind_of(dtype: np.dtype[Any], name: str) -> Kind:
    """The kind of a dtype; `name` is that of the tensor, for the error.

    >>> kind_of(np.dtype(np.float32), "w").shift
    23
    """
    kind = _by_dtype().get(dtype)
    if kind is None:
        raise InputError(f"tensor {name!r} is {dtype}; weights are {', '.join(kind.name for kind in KINDS)}")
    return kind


def kind_by_code(code: int) -> Kind:
    """The kind that a patch names."""
    if code >= len(KINDS):
        raise CorruptError(f"dtype code {code}, known are 0 to {len(KINDS) - 1}")
    return KINDS[code]


def joined(parts: Sequence[Array]) -> Array:
    """All of these one after the other; the only one itself."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def patterns(array: Array, kind: Kind) -> Array:
    """The bit patterns of an array, flat: a view, or a copy where it is not in C order.

    >>> patterns(np.float32([1, -0.0]), kind_of(np.dtype(np.float32), "w")).tolist()
    [1065353216, 2147483648]
    """
    return np.ascontiguousarray(array).reshape(-1).view(kind.unsigned)


def steps_of(codes: Array) -> Array:
    """The steps of these codes modulo 2**64, as unsigned integers.

    >>> steps_of(np.uint8([0, 2, 4])).tolist()
    [1, 2, 3]
    """
    wide = codes.astype(np.uint64)
    sizes = (wide >> np.uint64(1)) + np.uint64(1)
    return np.where(wide & np.uint64(1), np.uint64(0) - sizes, sizes)
