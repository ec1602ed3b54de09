"""Double exponentials y = a e^(bx) + c e^(dx) through descending magnitudes, at x = 0 to 1 (paper, section 5).

A curve is held as (a + c, c, b, d): y = (a + c) e^(bx) + c (e^(dx) - e^(bx)) stays well behaved where b and d meet and a and c alone
would cancel each other. For given b and d the rest is a linear problem, so the search has two dimensions only.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .jit import inline, kernel

Doubles = NDArray[np.float64]
Singles = NDArray[np.float32]

PARAMETERS = 4
FASTEST_GROWTH, FASTEST_DECAY = 700.0, -1e9
"""Rates outside of this are refused by the reader and not proposed by the writer."""

_STARTS = np.array([[0.1, -0.1], [-0.5, -6.0], [-1.0, -25.0], [-2.0, -100.0], [-1.0, 4.0], [-30.0, 3.0], [-4.0, -400.0]])
_ROUNDS = 60
_LOG_2 = 0.6931471805599453


@kernel
def exponential(x: float) -> float:
    """e^x, by arithmetic alone: the libraries of two machines may differ in the last bit."""
    power = math.floor(min(max(x, -1000.0), 700.0) / _LOG_2 + 0.5)
    rest = max(x, -1000.0) - power * _LOG_2
    total = 1.0
    for k in range(16, 0, -1):
        total = 1.0 + total * rest / k
    return math.ldexp(total, int(power))


@inline
def _start(rate: float) -> float:
    """The exponential at x = 0; a growing one is 1 at x = 1 instead, so that none exceeds 1."""
    return exponential(-rate) if rate > 0.0 else 1.0


@kernel
def curve(parameters: Singles, at: int, out: Doubles) -> None:
    """The curve at out.size points from x = 0 to 1. Powers come by multiplication, which costs a millionth of the last digits at most."""
    step = 1.0 / max(out.size - 1, 1)
    level, weight = np.float64(parameters[at]), np.float64(parameters[at + 1])
    slow_ratio, fast_ratio = exponential(parameters[at + 2] * step), exponential(parameters[at + 3] * step)
    slow, fast = _start(np.float64(parameters[at + 2])), _start(np.float64(parameters[at + 3]))
    for i in range(out.size):
        out[i] = level * slow + weight * (fast - slow)
        slow *= slow_ratio
        fast *= fast_ratio


@kernel
def _moments(y: Doubles, b: float, d: float, sums: Doubles) -> None:
    """Inner products of e^(bx), e^(dx) - e^(bx), x e^(bx), x e^(dx) and y: all that the search looks at."""
    ss = sg = gg = sy = gy = s_sx = s_fx = g_sx = g_fx = sx_sx = sx_fx = fx_fx = sx_y = fx_y = 0.0
    step = 1.0 / (y.size - 1)
    slow_ratio, fast_ratio = exponential(b * step), exponential(d * step)
    slow, fast = _start(b), _start(d)
    for i in range(y.size):
        x, gap = i * step, fast - slow
        slow_x, fast_x = x * slow, x * fast
        ss += slow * slow
        sg += slow * gap
        gg += gap * gap
        sy += slow * y[i]
        gy += gap * y[i]
        s_sx += slow * slow_x
        s_fx += slow * fast_x
        g_sx += gap * slow_x
        g_fx += gap * fast_x
        sx_sx += slow_x * slow_x
        sx_fx += slow_x * fast_x
        fx_fx += fast_x * fast_x
        sx_y += slow_x * y[i]
        fx_y += fast_x * y[i]
        slow *= slow_ratio
        fast *= fast_ratio
    sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6] = ss, sg, gg, sy, gy, s_sx, s_fx
    sums[7], sums[8], sums[9], sums[10], sums[11], sums[12], sums[13] = g_sx, g_fx, sx_sx, sx_fx, fx_fx, sx_y, fx_y


@inline
def _solve(m00: float, m01: float, m11: float, v0: float, v1: float) -> tuple[float, float]:
    """The symmetric 2 x 2 system; the first unknown alone where the second says nothing new."""
    determinant = m00 * m11 - m01 * m01
    if determinant <= 1e-13 * m00 * m11:
        return (v0 / m00 if m00 > 0.0 else 0.0), 0.0
    return (m11 * v0 - m01 * v1) / determinant, (m00 * v1 - m01 * v0) / determinant


@inline
def _error(sums: Doubles, square: float) -> float:
    """The squared error of the best curve with these rates."""
    level, weight = _solve(sums[0], sums[1], sums[2], sums[3], sums[4])
    error: float = square - level * sums[3] - weight * sums[4]
    return error


@inline
def _newton(sums: Doubles, damping: float) -> tuple[float, float]:
    """A damped Gauss-Newton step for the two rates, with the linear unknowns eliminated."""
    level, weight = _solve(sums[0], sums[1], sums[2], sums[3], sums[4])
    rest = level - weight
    g0 = rest * (sums[12] - level * sums[5] - weight * sums[7])
    g1 = weight * (sums[13] - level * sums[6] - weight * sums[8])
    p0, p1 = _solve(sums[0], sums[1], sums[2], sums[5], sums[7])
    r0, r1 = _solve(sums[0], sums[1], sums[2], sums[6], sums[8])
    h00 = rest * rest * (sums[9] - p0 * sums[5] - p1 * sums[7])
    h01 = rest * weight * (sums[10] - p0 * sums[6] - p1 * sums[8])
    h11 = weight * weight * (sums[11] - r0 * sums[6] - r1 * sums[8])
    return _solve(h00 * (1.0 + damping), h01, h11 * (1.0 + damping), g0, g1)


@inline
def _eliminate(matrix: Doubles, size: int) -> bool:
    """Gauss-Jordan with pivoting on `size` rows of `size` + 1 columns; False where the matrix is singular."""
    for k in range(size):
        pivot = k
        for r in range(k + 1, size):
            if abs(matrix[r, k]) > abs(matrix[pivot, k]):
                pivot = r
        if matrix[pivot, k] == 0.0:
            return False
        for c in range(size + 1):
            matrix[k, c], matrix[pivot, c] = matrix[pivot, c], matrix[k, c]
        for r in range(size):
            factor = matrix[r, k] / matrix[k, k] if r != k else 0.0
            for c in range(k, size + 1):
                matrix[r, c] -= factor * matrix[k, c]
    return True


@kernel
def rates_by_integrals(y: Doubles) -> tuple[float, float]:
    """The rates in closed form: y = -b d SS + (b + d) S + e x + f, where S and SS are the first and second integral of y.

    Four inner products a column and one small system (Jacquelin's method). Where its roots are complex, two rates around their real part.
    """
    step = 1.0 / (y.size - 1)
    matrix, row = np.zeros((4, 5)), np.empty(5)
    single, double = 0.0, 0.0
    for i in range(y.size):
        if i:
            before = single
            single += 0.5 * step * (y[i] + y[i - 1])
            double += 0.5 * step * (single + before)
        row[0], row[1], row[2], row[3], row[4] = double, single, i * step, 1.0, y[i]
        for r in range(4):
            for c in range(5):
                matrix[r, c] += row[r] * row[c]
    if not _eliminate(matrix, 4):
        return -1.0, -2.0
    product, total = -matrix[0, 4] / matrix[0, 0], matrix[1, 4] / matrix[1, 1]
    root = math.sqrt(abs(total * total - 4.0 * product))
    return 0.5 * (total + root), 0.5 * (total - root)


@inline
def _within(rate: float) -> float:
    return min(max(rate, FASTEST_DECAY), FASTEST_GROWTH)


@kernel
def rates(y: Doubles) -> tuple[float, float]:
    """The best rates found: from the best of some starts, by Levenberg-Marquardt steps."""
    square = 0.0
    for i in range(y.size):
        square += y[i] * y[i]
    sums, tried = np.empty(14), np.empty(14)
    b, d = rates_by_integrals(y)
    b, d = _within(b), _within(d)
    _moments(y, b, d, sums)
    error = _error(sums, square)
    for s in range(_STARTS.shape[0]):
        _moments(y, _STARTS[s, 0], _STARTS[s, 1], tried)
        if not error <= _error(tried, square):
            b, d, error = _STARTS[s, 0], _STARTS[s, 1], _error(tried, square)
            sums[:] = tried
    damping = 1e-3
    for _ in range(_ROUNDS):
        step_b, step_d = _newton(sums, damping)
        next_b, next_d = _within(b + step_b), _within(d + step_d)
        _moments(y, next_b, next_d, tried)
        gain = error - _error(tried, square)
        if gain > 0.0:
            b, d, error = next_b, next_d, error - gain
            sums[:] = tried
            damping *= 0.1
        else:
            damping *= 10.0
        if abs(gain) <= 1e-6 * error:
            break
    return b, d


@inline
def _line_error(y: Doubles) -> float:
    """The squared error of the best straight line."""
    mean, moment, spread = 0.0, 0.0, 0.0
    for i in range(y.size):
        mean += y[i] / y.size
    for i in range(y.size):
        x = i - 0.5 * (y.size - 1)
        moment += x * y[i]
        spread += x * x
    error = 0.0
    for i in range(y.size):
        rest = y[i] - mean - moment / spread * (i - 0.5 * (y.size - 1))
        error += rest * rest
    return error


@kernel
def fit(y: Doubles, parameters: Singles, at: int) -> bool:
    """The four parameters of the curve through descending magnitudes; False where none was found that is as good as a straight line.

    A line is a limit of double exponentials, so a search that does worse has not converged. The linear parameters are computed for the
    rates as rounded to float32, and the error is taken of the curve that the reader will see.
    """
    if y.size <= PARAMETERS or y[0] <= 0.0:
        return False
    largest = y[0]
    y = y / largest
    b, d = rates(y)
    parameters[at + 2], parameters[at + 3] = np.float32(b), np.float32(d)
    sums, seen = np.empty(14), np.empty(y.size)
    _moments(y, np.float64(parameters[at + 2]), np.float64(parameters[at + 3]), sums)
    level, weight = _solve(sums[0], sums[1], sums[2], sums[3], sums[4])
    parameters[at], parameters[at + 1] = np.float32(level * largest), np.float32(weight * largest)
    curve(parameters, at, seen)
    error = 0.0
    for i in range(y.size):
        error += (seen[i] / largest - y[i]) ** 2
    return error <= _line_error(y) * 1.001 + y.size * 1e-14
