"""Many units in one message, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .. import steps
from ..errors import DeepReduceError, FormatError, InputError
from ..message import Record
from ..pipeline import restore
from ..steps import Seed
from ..tensor import SparseTensor
from .link import Buffer
from .source import space_on
from .units import Unit


@dataclass(frozen=True)
class Message:
    """Units in one message: what each of them became, and the bytes of all of it."""

    units: Sequence[Unit]
    records: Sequence[Record]
    blob: bytes

    def decoded(self, sender: int) -> list[SparseTensor]:
        """What every reader of this message has, which `sender` wrote."""
        return _restored(self.records, self.units, sender)


def encode(units: Sequence[Unit], seed: Seed) -> Message:
    """One message. Its tensors are named by their places: parameter names would cost more than some of the tensors."""
    records = []
    for unit in units:
        with naming(unit.label):
            records.append(unit.record(seed))
    return Message(units, records, steps.write(records))


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


def decode(blob: Buffer, units: Sequence[Unit], sender: int) -> list[SparseTensor]:
    """The tensors of a message, which must be for these units. An error names the rank and the parameter."""
    labels = [unit.label for unit in units]
    try:
        records = steps.read(blob.data, labels, units)
    except FormatError as error:
        raise type(error)(f"message of rank {sender} for {steps.summary(labels)}: {error}") from error
    return _restored(records, units, sender)


def _restored(records: Sequence[Record], units: Sequence[Unit], sender: int) -> list[SparseTensor]:
    return [_restore(record, unit, sender) for record, unit in zip(records, units, strict=True)]


def _restore(record: Record, unit: Unit, sender: int) -> SparseTensor:
    try:
        return restore(record, space_on(unit.device))
    except FormatError as error:
        raise type(error)(f"{unit.label} of rank {sender}: {error}") from error
