"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(90), in_bytes(1_078_888), in_bytes(999_999)
    ('90 B', '1.08 MB', '1 MB')
    """
    rounded = _three_digits(count)
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(rounded) >= size:
            return f"{rounded / size:g} {unit}"
    return f"{count:.0f} B"


def in_seconds(seconds: float | None) -> str:
    """
    >>> in_seconds(0.00042), in_seconds(12.34), in_seconds(None)
    ('420 µs', '12.3 s', '–')
    """
    if seconds is None or isnan(seconds):
        return "–"
    rounded = _three_digits(seconds)
    if rounded >= 1000:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if rounded >= size:
            return f"{rounded / size:g} {unit}"
    return "0 s" if seconds == 0 else f"{rounded * 1e9:g} ns"


def _three_digits(number: float) -> float:
    return float(f"{number:.3g}")


def in_times(ratio: float) -> str:
    """
    >>> in_times(117.26), in_times(1.0)
    ('117x', '1.0x')
    """
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x"


def quality_format(lower_is_better: bool) -> Callable[[float], str]:
    """Return how a quality is written: a loss as a number, anything else in percent.

    >>> quality_format(True)(2.03749), quality_format(False)(0.98333)
    ('2.037', '98.3%')
    """
    return in_loss if lower_is_better else in_percent


def in_loss(loss: float) -> str:
    """
    >>> in_loss(2.03749), in_loss(float("nan"))
    ('2.037', '–')
    """
    return "–" if isnan(loss) else f"{loss:.3f}"


def in_percent(share: float) -> str:
    """
    >>> in_percent(0.98333), in_percent(float("nan"))
    ('98.3%', '–')
    """
    return "–" if isnan(share) else f"{100 * share:.1f}%"
