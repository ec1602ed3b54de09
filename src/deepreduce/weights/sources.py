"""Where weights are read from, a part at a time: a mapping here, files in `checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..errors import InputError
from .kinds import Array, Kind, Shape, kind_of, patterns

Progress = Callable[[int], None]
"""Is told the bytes that have been worked on since the last call."""


def silent(size_bytes: int) -> None:
    """The progress that nobody watches."""


class TensorSource(Protocol):
    """Named tensors that can be read in parts."""

    @property
    def names(self) -> Sequence[str]:
        """The names, in the order in which the tensors are best read."""

    def describe(self, name: str) -> tuple[Kind, Shape]:
        """The dtype and the shape of a tensor."""

    def read(self, name: str, start: int, stop: int) -> Array:
        """The bit patterns of the elements from `start` to `stop`, flat; they are not written to."""


def numel_of(source: TensorSource) -> int:
    """Elements of all tensors of a source."""
    return sum(prod(source.describe(name)[1]) for name in source.names)


class NamedArrays:
    """The tensors of a mapping.

    >>> NamedArrays({"w": np.float32([1, 2, 3])}).read("w", 0, 1).tolist()
    [1065353216]
    """

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}
        self._kinds = {name: kind_of(tensor.dtype, name) for name, tensor in self._tensors.items()}
        self._flat: dict[str, Array] = {}

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[Kind, Shape]:
        return self._kinds[name], self._tensors[name].shape

    def read(self, name: str, start: int, stop: int) -> Array:
        flat = self._flat.get(name)
        if flat is None:
            flat = patterns(self._tensors[name], self._kinds[name])
            self._flat = {name: flat}  # one at a time: it may be a copy
        return flat[start:stop]


def writable(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The bit patterns of arrays that are to be changed in place, flat."""
    flat = {}
    for name, tensor in tensors.items():
        kind = kind_of(tensor.dtype, name)
        if not (isinstance(tensor, np.ndarray) and tensor.flags.writeable and tensor.flags.c_contiguous):
            raise InputError(f"tensor {name!r} cannot be changed in place: it is read-only or not in C order")
        flat[name] = tensor.reshape(-1).view(kind.unsigned)
    return flat


def check_apart(tensors: Mapping[str, Array], changed: Collection[str]) -> None:
    """Raise `InputError` if a tensor that is to be changed in place shares memory with any other one.

    >>> weight = np.zeros(4)
    >>> check_apart({"embed": weight, "head": weight[2:]}, {"head"})
    Traceback (most recent call last):
        ...
    deepreduce.errors.InputError: tensors 'embed' and 'head' share memory: they cannot be changed in place one by one
    """
    spans = sorted((*byte_bounds(array), name) for name, tensor in tensors.items() if (array := np.asarray(tensor)).size)
    reach, before = 0, ""
    for start, stop, name in spans:
        if start < reach and (name in changed or before in changed):
            raise InputError(f"tensors {before!r} and {name!r} share memory: they cannot be changed in place one by one")
        if stop > reach:
            reach, before = stop, name
