"""Never slower than dense: both ways are tried, and the faster one is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median

Agreement = Callable[[list[float]], list[float]]
"""Gives all ranks the same numbers: the largest of each."""

_log = logging.getLogger("deepreduce")


class Trial:
    """Whether a step travels compressed: some steps do and as many do not, and what took less time on the slowest rank goes on for a while.

    A step lasts from its first bucket to that of the next one: all that the user waits for. Medians, as first steps compile kernels.

    >>> trial = Trial(steps=2, period=10, clock=iter([0.0, 5, 9, 10, 11, 12, 13, 14, 15, 16, 17]).__next__)
    >>> [trial.compresses(step, agree=list) for step in range(11)]
    [True, True, False, False, False, False, False, False, False, False, True]
    """

    def __init__(self, steps: int = 8, period: int = 1000, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._period, self._clock = steps, period, clock
        self._first: int | None = None
        self._seconds: list[float] = []
        self._last = 0.0
        self._compress = True

    def compresses(self, step: int, agree: Agreement) -> bool:
        """Whether this step does. To be asked once a step, by all ranks in the same order."""
        now = self._clock()
        self._first = step if self._first is None else self._first
        place = (step - self._first) % self._period
        if 0 < place <= 2 * self._steps:
            self._seconds.append(now - self._last)
        self._last = now
        if place == 0:
            self._seconds = []
        if place < 2 * self._steps:
            return place < self._steps
        if place == 2 * self._steps:
            self._decide(agree)
        return self._compress

    def _decide(self, agree: Agreement) -> None:
        halves = self._seconds[: self._steps], self._seconds[self._steps :]
        compressed, dense = agree([median(half) for half in halves])
        self._compress = compressed <= dense
        way = "compressed" if self._compress else "dense"
        _log.info("a step takes %.1f ms compressed and %.1f ms dense: %s from here", 1000 * compressed, 1000 * dense, way)
