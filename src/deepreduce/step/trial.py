"""Never slower than dense: the ways to send a step are measured in turns, and the fastest is kept until the link changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Literal

import numpy as np

from .frame import Exchange
from .transport import Transport, all_gather_array

Way = Literal["compressed", "dense", "bf16", "allgather"]
"""How a step is sent: by the spec, by an allreduce of the gradients, by one of their values in bfloat16, or by the spec without owners."""

DENSE: frozenset[Way] = frozenset(("dense", "bf16"))
"""The ways that send everything."""

Agreement = Callable[[list[float]], list[float]]
"""Gives all ranks the same numbers: the largest of each."""

_BLOCK = 4  # steps of one way in a row; the first is not counted, as it sends residuals, opens connections or compiles kernels
_CLOSE = 1.5  # a way that takes longer than this, beside the fastest, is not measured again in the second round
_HALF = 0.4  # where the spec takes less than this part of dense, bfloat16 is not tried: it sends half as many bytes as dense
_CHECK = 8  # how often, in steps, all ranks compare what dense steps take with what they took
_RECENT = 5  # steps whose median is compared: an evaluation between two steps is not a slow link
_SLOW = 2.0
_COST = 0.01  # the share of the time that trials may take

_log = logging.getLogger("deepreduce")


def agreed_largest(numbers: Sequence[float], transport: Transport, exchange: Exchange) -> list[float]:
    """Return the largest of each number over all ranks, the same everywhere.

    >>> from deepreduce.step.transport import Alone
    >>> agreed_largest([1.5, 2.0], Alone(), Exchange("demo", 0, 0, 16))
    [1.5, 2.0]
    """
    largest: list[float] = all_gather_array(np.array(numbers, "<f8"), transport, exchange).max(axis=0).tolist()
    return largest


@dataclass(frozen=True)
class Choice:
    """What `never_slower` chose at a step: the seconds that a step took by each way on the slowest rank, and why they were measured."""

    step: int
    way: Way
    seconds: dict[Way, float]
    occasion: str

    def __str__(self) -> str:
        """Return the reason in one line.

        >>> print(Choice(20, "compressed", {"compressed": 0.4, "dense": 9.1}, "the first steps"))
        compressed from step 20 on: a step takes 400.0 ms compressed, 9,100.0 ms dense (measured for the first steps)
        """
        times = ", ".join(f"{1000 * seconds:,.1f} ms {way}" for way, seconds in self.seconds.items())
        return f"{self.way} from step {self.step} on: a step takes {times} (measured for {self.occasion})"


class Trial:
    """Chooses how steps are sent, the same on all ranks.

    Each way has a few steps in a row, and those that are close have them once more; what took least on the slowest rank goes on. A step
    lasts from its first bucket to that of the next one: all that the user waits for. All ways are measured again when dense steps become
    far slower than they were, and after `period` steps or more, as many as make the cost of a trial small.

    Ranks agree in the steps of a trial, and in every eighth of those that are not sent compressed: else a step is that of its way alone.

    >>> clock = iter([0.0, 5, 6, 7, 8, 10, 12, 14, 16, 19, 22, 25, 28]).__next__
    >>> trial = Trial(clock=clock)
    >>> ways = [trial.way(step, agree=list) for step in range(13)]
    >>> ways[::4], trial.choice.seconds
    (['compressed', 'dense', 'bf16', 'compressed'], {'compressed': 1, 'dense': 2, 'bf16': 3})
    """

    def __init__(
        self, period: int = 1000, clock: Callable[[], float] = time.perf_counter, ways: Sequence[Way] = ("compressed", "dense", "bf16")
    ) -> None:
        self.choice: Choice | None = None
        self._ways = ways
        self._least_period, self._clock = period, clock
        self._asked, self._last = -1, 0.0
        self._recent: list[float] = []
        self._measure("the first steps")

    def way(self, step: int, agree: Agreement) -> Way:
        """Return how this step is sent. Asked by all ranks in the same order; a step that was asked for before gets the same answer."""
        if step == self._asked:
            return self._way
        now = self._clock()
        if self._asked >= 0:
            self._recent.append(now - self._last)
        self._asked, self._last = step, now
        if self._is_measuring:
            self._go_on(step, agree)
        else:
            self._watch(step, agree)
        return self._way

    # A trial

    def _measure(self, occasion: str, known: dict[Way, list[float]] | None = None) -> None:
        """Begin a trial; of some way it may be known already what it takes."""
        self._occasion, self._is_measuring = occasion, True
        self._found: dict[Way, list[float]] = known or {}
        self._turns = [way for way in self._ways if way not in self._found]
        self._is_second_round = False
        self._begin(self._turns.pop(0))

    def _begin(self, way: Way) -> None:
        self._way, self._recent = way, []

    def _go_on(self, step: int, agree: Agreement) -> None:
        if len(self._recent) < _BLOCK:
            return
        self._found.setdefault(self._way, []).extend(agree([median(self._recent[1:])]))
        if not self._turns and not self._is_second_round:
            self._is_second_round, self._turns = True, list(self._found)
        contenders = [way for way in self._turns if self._may_win(way)]
        if contenders and not (self._is_second_round and contenders == [self._fastest]):
            self._turns = contenders[1:]
            self._begin(contenders[0])
        else:
            self._decide(step)

    @property
    def _seconds(self) -> dict[Way, float]:
        return {way: min(found) for way, found in self._found.items()}

    @property
    def _fastest(self) -> Way:
        seconds = self._seconds
        return min(seconds, key=seconds.__getitem__)

    def _may_win(self, way: Way) -> bool:
        seconds = self._seconds
        least = seconds[self._fastest]
        if way in seconds:
            return seconds[way] <= _CLOSE * least
        return way != "bf16" or "dense" not in seconds or least > _HALF * seconds["dense"]

    def _decide(self, step: int) -> None:
        self._is_measuring = False
        self._begin(self._fastest)
        self.choice = Choice(step, self._way, self._seconds, self._occasion)
        least = self._seconds[self._way]
        lost = sum(_BLOCK * (seconds - least) for found in self._found.values() for seconds in found)
        self._period = max(self._least_period, ceil(lost / (_COST * least)) if least else 0)
        _log.info("never_slower: %s", self.choice)

    # Between trials

    def _watch(self, step: int, agree: Agreement) -> None:
        assert self.choice is not None
        del self._recent[:-_RECENT]
        since = step - self.choice.step
        if since >= self._period:
            self._measure(f"a look after {since:,} steps")
        elif self._way != "compressed" and since % _CHECK == 0 and len(self._recent) == _RECENT:
            (now,), before = agree([median(self._recent)]), self.choice.seconds[self._way]
            if now > _SLOW * before:
                occasion = f"a link that changed: steps took {1000 * now:,.1f} ms {self._way} instead of {1000 * before:,.1f}"
                self._measure(occasion, {self._way: [now]})
