"""Charts as SVG text, drawn by matplotlib. Series differ by hatching, dash and marker too: a black-and-white print is readable."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from math import floor, isfinite, log10
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 5.6
INK, FAINT = "#1a1a1a", "#c9ced6"
FILLS = (("#17324d", ""), ("#f2b482", "////"), ("#9ec9e8", ""), ("#ffffff", "...."), ("#7a8b99", "xxx"))
LINES = ("#111111", "#0b5fa5", "#a8480f", "#2f7d32", "#6a3d9a", "#b3005e", "#5d6b00", "#007c80", "#8a6d3b")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "x", "v", "P", "*", "h")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": FAINT,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, selected and read aloud
    "svg.hashsalt": "deepreduce",
}

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


def check_matplotlib() -> None:
    """Raise `ConfigError`, saying how to install it, where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("reports are drawn by matplotlib, which is not installed: pip install 'deepreduce[plot]'")


def stacked_bars(title: str, bars: Sequence[Bar], names: Sequence[str]) -> str:
    """Return horizontal bars made of parts, from zero.

    >>> chart = stacked_bars("Bytes", [Bar("raw", {"index": 4, "value": 4}, "8 B")], ["index", "value"])
    >>> chart.startswith("<svg"), "8 B" in chart
    (True, True)
    """
    with drawing(height=0.75 + 0.5 * len(bars)) as figure:
        axes = _bar_axes(figure, bars)
        for row, bar in enumerate(bars):
            left = 0.0
            for number, name in enumerate(names):
                width = bar.parts.get(name, 0.0)
                axes.barh(row, width, 0.34, left, **_fill(number), label=name if row == 0 else None)
                left += width
            _note(axes, left, row, bar.note)
        axes.set_xticks([])
        axes.set_xlim(0, 1.18 * (max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0))
        _legend_above(axes, len(names))
        return svg(figure, title)


def log_bars(title: str, bars: Sequence[Bar], names: Sequence[str], show: Format) -> str:
    """Return a thin bar for each part, side by side, on a logarithmic scale with a line at each power of ten."""
    values = [value for bar in bars for value in bar.parts.values() if value > 0] or [1.0]
    thin = 0.5 / max(len(names), 1)
    with drawing(height=1 + (0.3 + 0.16 * len(names)) * len(bars)) as figure:
        axes = _bar_axes(figure, bars)
        axes.set_xscale("log")
        low = 10.0 ** floor(log10(min(values)))
        axes.set_xlim(low, max(values) * 4)
        for number, name in enumerate(names):
            rows = [(row, bar.parts[name]) for row, bar in enumerate(bars) if bar.parts.get(name, 0.0) > 0]
            at = [row + (number - (len(names) - 1) / 2) * thin for row, _ in rows]
            axes.barh(at, [value - low for _, value in rows], thin * 0.9, low, **_fill(number), label=name)
            for height, (_, value) in zip(at, rows, strict=True):
                _note(axes, value, height, show(value), size=7)
        ticks(axes, "x", show)
        axes.grid(axis="x")
        _legend_above(axes, len(names))
        return svg(figure, title)


def line_chart(title: str, lines: Sequence[Line], x_title: str, y_title: str, show_x: Format, show_y: Format, log_x: bool = False) -> str:
    """Return curves with a legend below. With `log_x` the horizontal axis is logarithmic, and points at zero are left out."""
    curves = [_finite(line, log_x) for line in lines]
    with drawing(height=3.1 + 0.19 * len(lines)) as figure:
        axes = figure.subplots()
        if not any(curve.points for curve in curves):
            axes.set_axis_off()
            axes.text(0, 0.5, "no data")
            return svg(figure, title)
        for number, curve in enumerate(curves):
            draw_line(axes, curve, number)
        axes.set_xscale("log" if log_x else "linear")
        axes.set_xlabel(x_title)
        axes.set_ylabel(y_title)
        ticks(axes, "x", show_x)
        ticks(axes, "y", show_y)
        axes.grid(axis="y")
        figure.legend(loc="outside lower left", ncols=1, handlelength=3.5)
        return svg(figure, title)


def draw_line(axes: Axes, line: Line, number: int) -> None:
    """Draw one curve in the colour, dash and marker of its number."""
    colour = LINES[number % len(LINES)]
    axes.plot(
        [x for x, _ in line.points],
        [y for _, y in line.points],
        color=colour,
        linestyle=DASHES[number % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markerfacecolor="white" if number % 2 else colour,
        markersize=4.5,
        markevery=max(1, len(line.points) // 12),
        linewidth=1.5,
        label=line.label,
    )


def ticks(axes: Axes, axis: Literal["x", "y"], show: Format, log: bool = False) -> None:
    """Write the numbers at an axis by `show`; on a logarithmic one, with `log`, at 1, 2 and 5 times every power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    chosen = getattr(axes, f"{axis}axis")
    if log:
        chosen.set_major_locator(LogLocator(subs=(1, 2, 5)))
    chosen.set_major_formatter(FuncFormatter(lambda value, position: show(value)))
    chosen.set_minor_formatter(NullFormatter())


@contextmanager
def drawing(height: float, width: float = WIDTH_INCHES) -> Iterator[Figure]:
    """Give an empty figure in the style of the reports."""
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, title: str) -> str:
    """Return a figure as an element of a page: no prologue, no date, no names that another figure has too."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    element = text.getvalue()[text.getvalue().index("<svg") :]
    element = re.sub(r' id="[a-z0-9.]+_\d+"', "", element)
    element = re.sub(
        r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg xmlns="http://www.w3.org/2000/svg" \1 role="img"><title>{escape(title)}</title>',
        element,
    )
    return element.replace("xlink:href", "href").strip()


def _bar_axes(figure: Figure, bars: Sequence[Bar]) -> Axes:
    """Rows from top to bottom, each with its label above the bar: specs are long."""
    axes = figure.subplots()
    axes.set_ylim(len(bars) - 0.5, -0.65)
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    for row, bar in enumerate(bars):
        axes.annotate(bar.label, (0, row - 0.3), (1, 0), ("axes fraction", "data"), textcoords="offset points", va="bottom", fontsize=8)
    return axes


def _note(axes: Axes, x: float, y: float, text: str, size: float = 8) -> None:
    axes.annotate(text, (x, y), (3, 0), textcoords="offset points", va="center", fontsize=size)


def _fill(number: int) -> dict[str, Any]:
    colour, hatch = FILLS[number % len(FILLS)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.5}


def _legend_above(axes: Axes, count: int) -> None:
    spacing = {"handlelength": 1.4, "handletextpad": 0.4, "columnspacing": 1.0, "borderaxespad": 0.1}
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=max(count, 1), fontsize=8, **spacing)


def _finite(line: Line, positive_x: bool) -> Line:
    return Line(line.label, [(x, y) for x, y in line.points if isfinite(x) and isfinite(y) and (x > 0 or not positive_x)])
