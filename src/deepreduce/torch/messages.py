"""Many units in one message, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .. import steps
from ..container import Record
from ..errors import DeepReduceError, FormatError, InputError
from ..pipeline import restore
from ..sparse import SparseTensor
from ..steps import Seed
from .link import Buffer
from .source import space_on
from .units import Unit


def encode(units: Sequence[Unit], seed: Seed) -> bytes:
    """One message. Its tensors are named by their places: parameter names would cost more than some of the tensors."""
    encoded = []
    for unit in units:
        with naming(unit.label):
            encoded.append(unit.record(seed))
    return steps.write(encoded)


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Errors from inside name the parameter.

    >>> with naming("layer.weight"):
    ...     raise InputError("QSGD takes float values, got int32")
    Traceback (most recent call last):
        ...
    deepreduce.errors.InputError: layer.weight: QSGD takes float values, got int32
    """
    try:
        yield
    except DeepReduceError as error:
        raise InputError(f"{label}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{label}: {type(error).__name__}: {error}") from error


def decode(blob: Buffer | bytes, units: Sequence[Unit], sender: int) -> list[SparseTensor]:
    """The tensors of a message, which must be for these units. An error names the rank and the parameter."""
    return [_restored(record, unit, sender) for record, unit in zip(records(blob, units, sender), units, strict=True)]


def records(blob: Buffer | bytes, units: Sequence[Unit], sender: int) -> Sequence[Record]:
    """The parts of a message, which must be for these units; nothing is decoded."""
    labels = [unit.label for unit in units]
    try:
        return steps.read(blob if isinstance(blob, bytes) else blob.data, labels, units)
    except FormatError as error:
        raise type(error)(f"message of rank {sender} for {steps.summary(labels)}: {error}") from error


def _restored(record: Record, unit: Unit, sender: int) -> SparseTensor:
    try:
        return restore(record, space_on(unit.device))
    except FormatError as error:
        raise type(error)(f"{unit.label} of rank {sender}: {error}") from error
