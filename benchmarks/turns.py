"""Timing of several sides in one run."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_of(repeat: int, sides: dict[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """The best seconds of each side. They take turns, so that a slow moment of the machine falls on all."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(repeat):
        for name, run in sides.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best
