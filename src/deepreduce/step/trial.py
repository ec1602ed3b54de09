"""Never slower than dense: the modes of sending a step are measured in turns, and the fastest is kept until the link changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Literal

import numpy as np

from .frame import FrameTag
from .transport import Transport, all_gather_array

SendMode = Literal["compressed", "dense", "bf16", "allgather"]
"""How a step is sent: by the spec, by an allreduce of the gradients, by one of their values in bfloat16, or by the spec without owners."""

DENSE: frozenset[SendMode] = frozenset(("dense", "bf16"))
"""The modes that send everything."""

Agreement = Callable[[list[float]], list[float]]
"""Gives all ranks the same numbers: the largest of each."""

_BLOCK = 4  # steps of one mode in a row; the first is not counted, as it sends residuals, opens connections or compiles kernels
_CLOSE = 1.5  # a mode that takes longer than this, beside the fastest, is not measured again in the second round
_HALF = 0.4  # where the spec takes less than this part of dense, bfloat16 is not tried: it sends half as many bytes as dense
_CHECK = 8  # how often, in steps, all ranks compare what dense steps take with what they took
_RECENT = 5  # steps whose median is compared: an evaluation between two steps is not a slow link
_SLOW = 2.0
_COST = 0.01  # the share of the time that trials may take

_log = logging.getLogger("deepreduce")


def all_reduce_max(numbers: Sequence[float], transport: Transport, tag: FrameTag) -> list[float]:
    """Return the largest of each number over all ranks, the same everywhere.

    >>> from deepreduce.step.transport import SingleRank
    >>> all_reduce_max([1.5, 2.0], SingleRank(), FrameTag("demo", 0, 0, 16))
    [1.5, 2.0]
    """
    largest: list[float] = all_gather_array(np.array(numbers, "<f8"), transport, tag).max(axis=0).tolist()
    return largest


@dataclass(frozen=True)
class Choice:
    """What `never_slower` chose at a step: the seconds that a step took in each mode on the slowest rank, and why they were measured."""

    step: int
    mode: SendMode
    seconds: dict[SendMode, float]
    reason: str

    def __str__(self) -> str:
        """Return the reason in one line.

        >>> print(Choice(20, "compressed", {"compressed": 0.4, "dense": 9.1}, "the first steps"))
        compressed from step 20 on: a step takes 400.0 ms compressed, 9,100.0 ms dense (measured for the first steps)
        """
        times = ", ".join(f"{1000 * seconds:,.1f} ms {mode}" for mode, seconds in self.seconds.items())
        return f"{self.mode} from step {self.step} on: a step takes {times} (measured for {self.reason})"


class Trial:
    """Chooses how steps are sent, the same on all ranks.

    Each mode has a few steps in a row, and those that are close have them once more; what took least on the slowest rank goes on. A step
    lasts from its first bucket to that of the next one: all that the user waits for. All modes are measured again when dense steps become
    far slower than they were, and after `period` steps or more, as many as make the cost of a trial small.

    Ranks agree in the steps of a trial, and in every eighth of those that are not sent compressed: other steps cost what their mode costs.

    >>> clock = iter([0.0, 5, 6, 7, 8, 10, 12, 14, 16, 19, 22, 25, 28]).__next__
    >>> trial = Trial(clock=clock)
    >>> modes = [trial.next_mode(step, agree=list) for step in range(13)]
    >>> modes[::4], trial.choice.seconds
    (['compressed', 'dense', 'bf16', 'compressed'], {'compressed': 1, 'dense': 2, 'bf16': 3})
    """

    def __init__(
        self,
        period: int = 1000,
        clock: Callable[[], float] = time.perf_counter,
        modes: Sequence[SendMode] = ("compressed", "dense", "bf16"),
    ) -> None:
        self.choice: Choice | None = None
        self._modes = modes
        self._least_period, self._clock = period, clock
        self._asked, self._last = -1, 0.0
        self._recent: list[float] = []
        self._measure("the first steps")

    def next_mode(self, step: int, agree: Agreement) -> SendMode:
        """Return the mode of this step; may exchange timings with all ranks.

        All ranks call it in the same order; further calls for a step return the same mode.
        """
        if step == self._asked:
            return self._mode
        now = self._clock()
        if self._asked >= 0:
            self._recent.append(now - self._last)
        self._asked, self._last = step, now
        if self._is_measuring:
            self._go_on(step, agree)
        else:
            self._watch(step, agree)
        return self._mode

    # A trial

    def _measure(self, reason: str, known: dict[SendMode, list[float]] | None = None) -> None:
        """Begin a trial; the seconds of some mode may be known already."""
        self._reason, self._is_measuring = reason, True
        self._found: dict[SendMode, list[float]] = known or {}
        self._turns = [mode for mode in self._modes if mode not in self._found]
        self._is_second_round = False
        self._begin(self._turns.pop(0))

    def _begin(self, mode: SendMode) -> None:
        self._mode, self._recent = mode, []

    def _go_on(self, step: int, agree: Agreement) -> None:
        if len(self._recent) < _BLOCK:
            return
        self._found.setdefault(self._mode, []).extend(agree([median(self._recent[1:])]))
        if not self._turns and not self._is_second_round:
            self._is_second_round, self._turns = True, list(self._found)
        contenders = [mode for mode in self._turns if self._may_win(mode)]
        if contenders and not (self._is_second_round and contenders == [self._fastest]):
            self._turns = contenders[1:]
            self._begin(contenders[0])
        else:
            self._decide(step)

    @property
    def _seconds(self) -> dict[SendMode, float]:
        return {mode: min(found) for mode, found in self._found.items()}

    @property
    def _fastest(self) -> SendMode:
        seconds = self._seconds
        return min(seconds, key=seconds.__getitem__)

    def _may_win(self, mode: SendMode) -> bool:
        seconds = self._seconds
        least = seconds[self._fastest]
        if mode in seconds:
            return seconds[mode] <= _CLOSE * least
        return mode != "bf16" or "dense" not in seconds or least > _HALF * seconds["dense"]

    def _decide(self, step: int) -> None:
        self._is_measuring = False
        self._begin(self._fastest)
        self.choice = Choice(step, self._mode, self._seconds, self._reason)
        least = self._seconds[self._mode]
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
        elif self._mode != "compressed" and since % _CHECK == 0 and len(self._recent) == _RECENT:
            (now,), before = agree([median(self._recent)]), self.choice.seconds[self._mode]
            if now > _SLOW * before:
                reason = f"a link that changed: steps took {1000 * now:,.1f} ms {self._mode} instead of {1000 * before:,.1f}"
                self._measure(reason, {self._mode: [now]})
