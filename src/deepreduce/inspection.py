"""What is in a message, without decoding it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import message
from .layouts import codecs_of
from .message import DEFAULT_MAX_TENSORS, Record
from .specs import format_spec
from .tensor import Shape

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class TensorInfo:
    """The anatomy of one tensor; `spec` names the codecs that were really used.

    >>> import deepreduce as dr
    >>> info = dr.inspect(dr.parse("topr:4/raw/fp16").encode(np.arange(16, dtype=np.float32)))
    >>> info.shape, info.nnz, info.bits_per_index, info.bits_per_value
    ((16,), 4, 32.0, 16.0)
    """

    shape: Shape
    dtype: np.dtype[Any]
    nnz: int
    spec: str
    header_bytes: int
    index_bytes: int
    order_bytes: int
    value_bytes: int

    @property
    def numel(self) -> int:
        """Elements of the dense tensor."""
        return prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the message; for a named tensor, of its sections."""
        return self.header_bytes + self.index_bytes + self.order_bytes + self.value_bytes

    @property
    def bits_per_index(self) -> float:
        """Bits of the index section per stored element; 0 where there is none."""
        return 8 * self.index_bytes / self.nnz if self.nnz else 0.0

    @property
    def bits_per_value(self) -> float:
        """Bits of the value and the order section per stored element; 0 where there is none."""
        return 8 * (self.value_bytes + self.order_bytes) / self.nnz if self.nnz else 0.0


@dataclass(frozen=True)
class MessageInfo:
    """The anatomy of a message of many tensors; the header is shared, so each tensor counts its sections only.

    >>> import deepreduce as dr
    >>> info = dr.inspect(dr.parse("topr:1/raw/raw").encode_many({"a": np.ones(3, np.float32), "b": np.ones(5, np.float32)}))
    >>> info.numel, info.nnz, info.tensors["b"].nbytes
    (8, 2, 8)
    """

    tensors: Mapping[str, TensorInfo]
    header_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.header_bytes + sum(info.nbytes for info in self.tensors.values())

    @property
    def numel(self) -> int:
        """Elements of all dense tensors."""
        return sum(info.numel for info in self.tensors.values())

    @property
    def nnz(self) -> int:
        """Stored elements of all tensors."""
        return sum(info.nnz for info in self.tensors.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of all dense tensors."""
        return sum(info.dense_bytes for info in self.tensors.values())


def inspect(blob: Buffer, max_tensors: int = DEFAULT_MAX_TENSORS) -> Any:
    """The anatomy of a message: `TensorInfo` for one tensor, `MessageInfo` for many. The checksum is checked, nothing is decoded.

    >>> import deepreduce as dr, numpy as np
    >>> info = dr.inspect(dr.encode(np.ones(16, np.float32), "dense"))
    >>> info.spec, info.numel, info.header_bytes, info.value_bytes, info.nbytes
    ('none/all/raw', 16, 26, 64, 90)
    """
    whole = message.read(blob, max_numel=2**63 - 1, max_tensors=max_tensors)
    if whole.names is None:
        record = whole.records[0]
        return _tensor_info(record, memoryview(blob).nbytes - _section_bytes(record))
    tensors = {name: _tensor_info(record, 0) for name, record in zip(whole.names, whole.records, strict=True)}
    return MessageInfo(tensors, memoryview(blob).nbytes - sum(map(_section_bytes, whole.records)))


def _section_bytes(record: Record) -> int:
    return sum(len(section) for section in record.sections)


def _tensor_info(record: Record, header_bytes: int) -> TensorInfo:
    spec = format_spec(codecs_of(record.layout))
    return TensorInfo(record.shape, record.dtype, record.nnz, spec, header_bytes, *map(len, record.sections))
