"""Types of arguments; what they say of a wrong one is part of the usage message."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import isfinite, nan


def positive(text: str) -> int:
    """A whole number of at least 1.

    >>> positive("0")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: a whole number of at least 1, got '0'
    """
    return _whole(text, least=1)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, least=0)


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN.

    >>> finite("inf")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: a finite number, got 'inf'
    """
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ArgumentTypeError(f"a finite number, got {text!r}")
    return number


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"a whole number of at least {least}, got {text!r}")
    return int(text)
