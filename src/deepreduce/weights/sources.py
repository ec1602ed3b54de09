"""Where weights are read from, a part at a time: a mapping here, files in `checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ..errors import InputError
from .kinds import Array, Kind, Shape, kind_of, patterns


class TensorSource(Protocol):
    """Named tensors that can be read in parts."""

    @property
    def names(self) -> Sequence[str]:
        """The names, in the order in which the tensors are best read."""

    def describe(self, name: str) -> tuple[Kind, Shape]:
        """The dtype and the shape of a tensor."""

    def read(self, name: str, start: int, stop: int) -> Array:
        """The bit patterns of the elements from `start` to `stop`, flat; they are not written to."""


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
