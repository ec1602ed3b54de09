"""Seconds spent in named parts of a trip."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what is inside the `with`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start
