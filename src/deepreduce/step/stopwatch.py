"""Seconds spent in named parts of an exchange."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager


class Stopwatch:
    """Adds up seconds by name.

    >>> watch = Stopwatch()
    >>> with watch("encode"):
    ...     pass
    >>> watch.seconds["encode"] >= 0
    True
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, part: str) -> AbstractContextManager[object]:
        """Time what is inside the `with`."""
        return _Span(self.seconds, part)

    def add(self, part: str, start: float) -> None:
        """Count the seconds since `start`, a `time.perf_counter`: one call in place of four, for what every step does."""
        self.seconds[part] += time.perf_counter() - start


class _Span:
    """A generator as a context manager would take three times as many calls."""

    __slots__ = ("_part", "_seconds", "_start")

    def __init__(self, seconds: defaultdict[str, float], part: str) -> None:
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *problem: object) -> None:
        self._seconds[self._part] += time.perf_counter() - self._start
