"""What every adapter does with the gradients of one step on the host, whatever the framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from . import message
from .errors import CorruptError, DeepReduceError, InputError
from .indices.seeded import Seeded
from .message import Record
from .pipeline import DeepReduce, parse
from .policy import Policy
from .source import as_source
from .tensor import Shape, SparseTensor, Values

if TYPE_CHECKING:
    from typing_extensions import Buffer

LITERAL = parse("none/raw/raw")
"""Sends the stored entries of a sparse tensor as they are."""


@dataclass(frozen=True)
class Seed:
    """Where the random numbers of a step come from: every rank and every tensor has its own."""

    step: int
    rank: int
    size: int

    def of(self, number: int, codec: DeepReduce) -> int:
        """The seed for a tensor; small, as it travels. Where positions follow from it, all ranks share it, so that their sum has no more.

        >>> Seed(step=10, rank=1, size=4).of(2, parse("topr:0.01/raw/raw"))
        49
        """
        shared = isinstance(codec.index, Seeded)
        return ((self.step + number) * self.size + (0 if shared else self.rank)) % 2**63


def record_of(content: Values | SparseTensor, codec: DeepReduce, seed: int) -> Record:
    """A gradient as part of a message.

    If there is a NaN or an Inf in it, only the first of them is sent: every rank sees it, whatever the sparsifier, and the step is lost
    anyhow. Of a dense gradient that is zero throughout, nothing is sent.
    """
    exception = _exception(content)
    return codec.record(as_source(content), seed) if exception is None else LITERAL.record(as_source(exception), 0)


def chosen_record(policy: Policy, label: str, number: int, content: Values | SparseTensor, seed: Seed) -> Record:
    """A gradient by the codec that the policy has for it; an error names the gradient."""
    try:
        codec = policy.choose(label, as_source(content))
        return record_of(content, codec, seed.of(number, codec))
    except DeepReduceError as error:
        raise InputError(f"{label}: {error}") from error


def _exception(content: Values | SparseTensor) -> SparseTensor | None:
    values = content.values if isinstance(content, SparseTensor) else content.reshape(-1)
    strange = np.flatnonzero(~np.isfinite(values))[:1]
    if strange.size:
        places = content.indices[strange] if isinstance(content, SparseTensor) else strange
        return SparseTensor(places, values[strange], content.shape)
    if isinstance(content, SparseTensor) or not values.size or np.any(values):
        return None
    return SparseTensor(strange, values[strange], content.shape)


# Messages between ranks name tensors by their places: the names of parameters would cost more than some of the tensors


def write(records: Sequence[Record]) -> bytes:
    """One message of all the gradients."""
    return message.write(records, _places(len(records)))


class Expected(Protocol):
    """What is known of a tensor beforehand; an array is one."""

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        ...


def read(blob: Buffer, labels: Sequence[str], expected: Sequence[Expected]) -> Sequence[Record]:
    """The parts of a message, which must be for tensors of these shapes and dtypes; nothing is decoded.

    >>> ones = np.ones(3, np.float32)
    >>> blob = write([record_of(ones, LITERAL, 0)])
    >>> read(blob, ["w"], [np.ones(4, np.float32)])
    Traceback (most recent call last):
        ...
    deepreduce.errors.CorruptError: w is float32 of shape (3,), here float32 of shape (4,)
    """
    whole = message.read(blob, max_numel=sum(prod(max(n, 1) for n in like.shape) for like in expected))
    if whole.names != _places(len(labels)):
        raise CorruptError(f"it is not for the {len(labels)} tensor(s) {summary(labels)}")
    for label, like, record in zip(labels, expected, whole.records, strict=True):
        if (record.shape, record.dtype) != (like.shape, like.dtype):
            raise CorruptError(f"{label} is {record.dtype} of shape {record.shape}, here {like.dtype} of shape {like.shape}")
    return whole.records


def _places(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def summary(labels: Sequence[str]) -> str:
    """A few names for an error message.

    >>> summary(["a", "b", "c", "d"])
    'a, b and 2 more'
    """
    return ", ".join(labels) if len(labels) < 4 else f"{', '.join(labels[:2])} and {len(labels) - 2} more"


# Half precision is added up in float32


def wide_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype to add up in: float32 for the half precisions.

    >>> wide_dtype(ml_dtypes.bfloat16), wide_dtype(np.float64)
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def narrow(wide: Values, dtype: np.dtype[Any]) -> Values:
    """The same in the dtype of the gradient; what is finite stays finite.

    >>> narrow(np.float32([1e6, 1]), np.dtype(np.float16))
    array([6.55e+04, 1.00e+00], dtype=float16)
    """
    if wide.dtype == dtype:
        return wide
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(dtype)
