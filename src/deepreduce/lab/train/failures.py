"""What can go wrong around a training run."""

from __future__ import annotations

from ...errors import DeepReduceError


class DataError(DeepReduceError, OSError):
    """The data of a task is not there, or is not what it should be."""


class LinkError(DeepReduceError, OSError):
    """Shaped links cannot be made here."""


class WorkerError(DeepReduceError, RuntimeError):
    """A worker failed; its traceback is the message."""
