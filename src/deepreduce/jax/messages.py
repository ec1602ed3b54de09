"""All gradients of a step in one message, and back. The same gradients, spec and seed make the same bytes as in the other adapters."""

from __future__ import annotations

from collections.abc import Sequence

from .. import steps
from ..errors import FormatError
from ..message import Record
from ..pipeline import restore
from ..policy import Policy
from ..steps import Seed
from ..tensor import SparseTensor, Values


def encode(names: Sequence[str], arrays: Sequence[Values], policy: Policy, seed: Seed) -> bytes:
    """One message."""
    numbered = enumerate(zip(names, arrays, strict=True))
    return steps.write([steps.chosen_record(policy, name, number, array, seed) for number, (name, array) in numbered])


def decode(blob: bytes, names: Sequence[str], likes: Sequence[Values], sender: int) -> list[SparseTensor]:
    """The tensors of a message, which must be of the shapes and dtypes of `likes`. An error names the process."""
    try:
        return [restore(record) for record in records(blob, names, likes)]
    except FormatError as error:
        raise type(error)(f"message of process {sender}: {error}") from error


def records(blob: bytes, names: Sequence[str], likes: Sequence[Values]) -> Sequence[Record]:
    """The parts of a message for these tensors; nothing is decoded."""
    return steps.read(blob, names, likes)
