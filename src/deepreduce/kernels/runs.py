"""Runs of consecutive positions: the alternating zeros and ones of a bitmap that is never built."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import kernel

Positions = NDArray[np.int64]


@kernel
def split(positions: Positions) -> tuple[Positions, Positions]:
    """The lengths of the runs of zeros and of the runs of ones that follow them; only the first of all may be empty.

    >>> split(np.array([4, 5, 6, 9, 11, 12]))
    (array([4, 2, 1]), array([3, 1, 2]))
    """
    zeros, ones = np.empty(positions.size, np.int64), np.empty(positions.size, np.int64)
    runs, begin, after = 0, 0, np.int64(0)
    for i in range(positions.size):
        if positions[i] != after or i == 0:
            if runs:
                ones[runs - 1] = i - begin
            zeros[runs] = positions[i] - after
            begin = i
            runs += 1
        after = positions[i] + 1
    if runs:
        ones[runs - 1] = positions.size - begin
    return zeros[:runs].copy(), ones[:runs].copy()


@kernel
def common_divisor(a: Positions, b: Positions) -> int:
    """The greatest number that divides all of both; 0 where all are 0."""
    divisor = 0
    for numbers in (a, b):
        for number in numbers:
            while number:
                divisor, number = number, divisor % number
            if divisor == 1:
                return divisor
    return divisor


@kernel
def fill(zeros_before: Positions, ones_until: Positions, unit: int, out: Positions) -> None:
    """All positions of the runs: run i lies after zeros_before[i] zeros and ends the ones_until[i]-th one, both in units.

    ``ones_until[-1] * unit`` is `out.size`.
    """
    begin = 0
    for i in range(zeros_before.size):
        shift, end = zeros_before[i] * unit, ones_until[i] * unit
        for n in range(begin, end):
            out[n] = shift + n
        begin = end
