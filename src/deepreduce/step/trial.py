"""Never slower than dense: both ways are tried, and the faster one is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from .frame import Exchange, open_frames, seal
from .transport import Transport

Agreement = Callable[[list[float]], list[float]]
"""Gives all ranks the same numbers: the largest of each."""

_log = logging.getLogger("deepreduce")


def agreed_largest(numbers: Sequence[float], transport: Transport, exchange: Exchange) -> list[float]:
    """Return the largest of each number over all ranks, the same everywhere.

    >>> from deepreduce.step.transport import Alone
    >>> agreed_largest([1.5, 2.0], Alone(), Exchange("demo", 0, 0, 16))
    [1.5, 2.0]
    """
    frames = transport.all_gather(seal(np.array(numbers, "<f8").tobytes(), exchange), exchange)
    everyone = [np.frombuffer(body, "<f8") for body in open_frames(frames, exchange, transport.rank)]
    return [float(number) for number in np.max(everyone, axis=0)]


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
        self._asked, self._answer = -1, True

    def compresses(self, step: int, agree: Agreement) -> bool:
        """Return whether this step does. Asked by all ranks in the same order; a step that was asked for before gets the same answer."""
        if step != self._asked:
            self._asked, self._answer = step, self._next(step, agree)
        return self._answer

    def _next(self, step: int, agree: Agreement) -> bool:
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
