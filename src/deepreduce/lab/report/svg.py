"""Small charts as SVG text. Series differ by shade and hatching or by dash and marker, so that a black-and-white print is readable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH = 440
_LEFT, _RIGHT, _BAR, _ROW, _TEXT = 2, 64, 12, 36, 12
_INK, _FAINT = "#1a1a1a", "#c9ced6"
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2 1 2 1 2")
_LINES = ("#111111", "#0b5fa5", "#a8480f", "#2f7d32", "#6a3d9a")
_MARKERS = ("circle", "square", "triangle", "diamond", "cross")

Format = Callable[[float], str]


@dataclass(frozen=True)
class Bar:
    """One bar: its label, the parts it is made of, and the text at its end."""

    label: str
    parts: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    points: Sequence[tuple[float, float]]


def stacked_bars(key: str, title: str, bars: Sequence[Bar], names: Sequence[str]) -> str:
    """Horizontal bars made of parts, from zero. `key` must be unique in a page: the hatchings are named by it.

    >>> chart = stacked_bars("volume", "Bytes", [Bar("raw", {"index": 4, "value": 4}, "8 B")], ["index", "value"])
    >>> chart.count("<rect") > 4, "8 B" in chart
    (True, True)
    """
    largest = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / largest
    top = _TEXT + 14
    drawn = [_legend(key, names)]
    for bar in bars:
        drawn.append(_label(_LEFT, top + 12, bar.label))
        left = float(_LEFT)
        for number, name in enumerate(names):
            width = bar.parts.get(name, 0.0) * scale
            if width > 0:
                drawn.append(_rect(left, top + 17, width, _BAR, _fill(key, number)))
            left += width
        drawn.append(_label(left + 5, top + 27, bar.note))
        top += _ROW
    return _chart(title, top + 8, _hatchings(key), drawn)


def log_bars(key: str, title: str, bars: Sequence[Bar], names: Sequence[str], show: Format) -> str:
    """A thin bar for each part, side by side, on a logarithmic scale with a line at each power of ten."""
    values = [value for bar in bars for value in bar.parts.values() if value > 0]
    low = floor(log10(min(values))) if values else 0
    high = max(ceil(log10(max(values))) if values else 1, low + 1)
    place = _linear(low, high, _LEFT, WIDTH - _RIGHT)
    rise = 22 + len(names) * 11
    bottom = _TEXT + 14 + len(bars) * rise
    drawn = [_legend(key, names)]
    for power in range(low, high + 1):
        drawn.append(_rule(place(power), _TEXT + 16, place(power), bottom + 4, _FAINT))
        drawn.append(_label(place(power), bottom + 18, show(10.0**power), "start" if power == low else "middle"))
    for row, bar in enumerate(bars):
        top = _TEXT + 14 + row * rise
        drawn.append(_label(_LEFT, top + 12, bar.label, halo=True))
        for number, name in enumerate(names):
            value = bar.parts.get(name, 0.0)
            if value > 0:
                at = top + 18 + number * 11
                drawn.append(_rect(_LEFT, at, max(place(log10(value)) - _LEFT, 1.0), 8, _fill(key, number)))
                drawn.append(_label(place(log10(value)) + 5, at + 8, show(value), size=10))
    return _chart(title, bottom + 26, _hatchings(key), drawn)


def line_chart(title: str, lines: Sequence[Line], x_title: str, y_title: str, show_x: Format, show_y: Format, log_x: bool = False) -> str:
    """Curves with a legend below; with `log_x` the horizontal axis is logarithmic, and points at zero are left out."""
    curves = [_finite(line, log_x) for line in lines]
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs:
        return _chart(title, 40, "", [_label(_LEFT, 24, "no data")])
    left, right, top, bottom = 52, WIDTH - 16, 24, 240
    x_ticks = _powers(min(xs), max(xs)) if log_x else _ticks(min(xs), max(xs))
    y_ticks = _ticks(min(ys), max(ys))
    place_x = _linear(min(*xs, x_ticks[0]), max(*xs, x_ticks[-1]), left, right)
    place_y = _linear(y_ticks[0], y_ticks[-1], bottom, top)
    drawn = [_label(2, 12, y_title)]
    for y in y_ticks:
        drawn += [_rule(left, place_y(y), right, place_y(y), _FAINT), _label(left - 6, place_y(y) + 4, show_y(y), "end")]
    for x in x_ticks:
        shown = show_x(10.0**x if log_x else x)
        anchor = "end" if place_x(x) > right - 16 else "middle"
        at = right + 14 if anchor == "end" else place_x(x)
        drawn += [_rule(place_x(x), bottom, place_x(x), bottom + 5, _INK), _label(at, bottom + 18, shown, anchor)]
    drawn.append(_label(right, bottom + 36, x_title, "end"))
    for number, curve in enumerate(curves):
        drawn.append(_curve([(place_x(x), place_y(y)) for x, y in curve.points], number))
    for number, line in enumerate(lines):
        at = bottom + 58 + 20 * number
        drawn += [_curve([(4, at - 4), (34, at - 4)], number), _label(44, at, line.label)]
    return _chart(title, bottom + 52 + 20 * len(lines), "", drawn)


def _finite(line: Line, log_x: bool) -> Line:
    points = [(x, y) for x, y in line.points if isfinite(x) and isfinite(y) and (x > 0 or not log_x)]
    return Line(line.label, [(log10(x), y) for x, y in points] if log_x else points)


# Axes


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span [low, high].

    >>> _ticks(0, 23)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    """
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** floor(log10(span / count))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= span / count * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _powers(low: float, high: float) -> list[float]:
    return [float(power) for power in range(floor(low), max(ceil(high), floor(low) + 1) + 1)]


# Shapes


def _chart(title: str, height: float, definitions: str, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="{_TEXT}"><title>{escape(title)}</title>{definitions}{"".join(drawn)}</svg>'
    )


def _hatchings(key: str) -> str:
    """Four fills that differ in lightness and in pattern."""
    dark, hatch, light, dots = (f'id="{key}-{number}" width="6" height="6" patternUnits="userSpaceOnUse"' for number in range(4))
    return (
        f'<defs><pattern {dark}><rect width="6" height="6" fill="#17324d"/></pattern>'
        f'<pattern {hatch}><rect width="6" height="6" fill="#fff"/><path d="M-1 1l2-2M0 6l6-6M5 7l2-2" stroke="#b4540a" stroke-width="2"/>'
        f'</pattern><pattern {light}><rect width="6" height="6" fill="#9ec9e8"/></pattern>'
        f'<pattern {dots}><rect width="6" height="6" fill="#fff"/><circle cx="3" cy="3" r="1.5" fill="#1a1a1a"/></pattern></defs>'
    )


def _fill(key: str, number: int) -> str:
    return f"url(#{key}-{number % 4})"


def _legend(key: str, names: Sequence[str]) -> str:
    drawn, left = [], float(_LEFT)
    for number, name in enumerate(names):
        drawn += [_rect(left, 2, 14, 11, _fill(key, number)), _label(left + 19, 12, name)]
        left += 34 + 6.3 * len(name)
    return "".join(drawn)


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height}" fill="{fill}" stroke="{_INK}" stroke-width=".6"/>'


def _rule(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}" fill="none"/>'


def _label(x: float, y: float, text: str, anchor: str = "start", size: int = _TEXT, halo: bool = False) -> str:
    paint = ' paint-order="stroke" stroke="#fff" stroke-width="4"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{_INK}"{paint}>{escape(text)}</text>'


def _curve(points: Sequence[tuple[float, float]], number: int) -> str:
    colour, dash = _LINES[number % len(_LINES)], _DASHES[number % len(_DASHES)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    line = f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
    shown = points if len(points) <= 16 else [points[round(k * (len(points) - 1) / 11)] for k in range(12)]
    return line + "".join(_marker(x, y, number, colour) for x, y in shown)


def _marker(x: float, y: float, number: int, colour: str) -> str:
    shapes = {
        "circle": "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
        "square": "m-3 -3h6v6h-6z",
        "triangle": "m0 -4l4 7h-8z",
        "diamond": "m0 -4.5l4 4.5l-4 4.5l-4 -4.5z",
        "cross": "m-3.5 -3.5l7 7m0 -7l-7 7",
    }
    filled = "#fff" if number % 2 else colour
    return f'<path d="M{x:.1f} {y:.1f}{shapes[_MARKERS[number % len(_MARKERS)]]}" fill="{filled}" stroke="{colour}" stroke-width="1.4"/>'
