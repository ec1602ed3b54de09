"""Learning rates over a run, as text: what factor of the base rate holds when a share of the steps is done."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import cos, pi

from ...errors import ConfigError

RateSchedule = Callable[[float], float]

_KINDS = "cosine, constant or step:SHARE=FACTOR,... with rising shares of the run, such as step:0.25=0.1,0.375=0.01"


def schedule_of(text: str) -> RateSchedule:
    """Return the factor of the learning rate as a function of the share of the steps that is done.

    >>> schedule = schedule_of("step:0.25=0.1,0.75=0.01")
    >>> [schedule(progress) for progress in (0.1, 0.25, 0.5, 0.8)]
    [1.0, 0.1, 0.1, 0.01]
    >>> [round(schedule_of("cosine")(progress), 2) for progress in (0.025, 0.05, 0.5, 1.0)]
    [0.5, 0.99, 0.5, 0.0]
    """
    if text == "cosine":
        return _cosine
    if text == "constant":
        return lambda progress: 1.0
    return _steps(text)


def _cosine(progress: float) -> float:
    """A short rise, then half a cosine down."""
    return min(1.0, progress / 0.05) * 0.5 * (1 + cos(pi * progress))


def _steps(text: str) -> RateSchedule:
    name, _, listed = text.partition(":")
    try:
        pairs = [(float(share), float(factor)) for share, factor in (each.split("=") for each in listed.split(","))]
    except ValueError:
        pairs = []
    shares = [share for share, _ in pairs]
    if name != "step" or not pairs or not all(0 < share < 1 for share in shares) or any(one >= other for one, other in pairwise(shares)):
        raise ConfigError(f"a schedule is {_KINDS}; got {text!r}")
    return lambda progress: next((factor for share, factor in reversed(pairs) if progress >= share), 1.0)
