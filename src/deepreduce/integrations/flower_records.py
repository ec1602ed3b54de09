"""Flower's records: arrays as numpy sees them, and a record that holds one deepreduce message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

NumpyArrays = Mapping[str, NDArray[Any]]

MESSAGE = "deepreduce"
"""The key of a message in its record."""
DIFFERENCE, UPDATE, BROADCAST = "deepreduce.difference", "deepreduce.update", "deepreduce.broadcast"
"""How a message is serialized: what its tensors are."""


def packed(blob: bytes, stype: str, others: Mapping[str, Array] | None = None) -> ArrayRecord:
    """Return the record of a message, with arrays beside it that are not compressed.

    >>> is_message(packed(b"bytes", UPDATE)), is_message(ArrayRecord([np.ones(2)]))
    (True, False)
    """
    return ArrayRecord({MESSAGE: Array("uint8", (len(blob),), stype, blob), **(others or {})})


def is_message(record: ArrayRecord) -> bool:
    """Return whether a record is that of a message from a client."""
    return MESSAGE in record and record[MESSAGE].stype in (DIFFERENCE, UPDATE)


def numpy_of(record: ArrayRecord) -> NumpyArrays:
    """Return the arrays of a record by key, in its order: copies."""
    return {key: array.numpy() for key, array in record.items()}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return the record of arrays."""
    return ArrayRecord({key: Array(np.asarray(array)) for key, array in arrays.items()})


def floats(arrays: NumpyArrays) -> NumpyArrays:
    """Return those arrays that can be compressed."""
    return {key: array for key, array in arrays.items() if array.dtype.kind == "f" and array.dtype.itemsize <= 8}


def numel(arrays: NumpyArrays) -> int:
    """Return the number of elements of all arrays."""
    return sum(array.size for array in arrays.values())


def data_bytes(record: ArrayRecord) -> int:
    """Return the bytes of the arrays of a record."""
    return sum(len(array.data) for array in record.values())
