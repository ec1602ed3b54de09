"""Forms of figures that only the paper's report has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report.charts import LINES, MARKERS, Line, draw_line, drawing, svg, ticks

Points = Mapping[str, tuple[float, float]]


def scatter(title: str, points: Points, x_title: str, y_title: str) -> str:
    """Return one labelled point per method, on a logarithmic horizontal axis."""
    with drawing(height=3.4 + 0.17 * len(points)) as figure:
        axes = figure.subplots()
        for number, (label, (x, y)) in enumerate(points.items()):
            colour, marker = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
            axes.plot([x], [y], marker, color=colour, markersize=7, label=f"{label}: {x:.4f}, {100 * y:.1f}%")
        axes.set_xscale("log")
        axes.margins(0.12)
        axes.set_xlabel(x_title)
        axes.set_ylabel(y_title)
        ticks(axes, "x", "{:g}".format)
        ticks(axes, "y", "{:.0%}".format)
        axes.grid()
        figure.legend(loc="outside lower left", handlelength=1.5)
        return svg(figure, title)


def panels(title: str, above: Mapping[str, Sequence[Line]], below: Mapping[str, Sequence[Line]], x_title: str) -> str:
    """Return a row of panels with quality, and below each one with relative volume, both against a logarithmic rate."""
    with drawing(height=5.2, width=8.4) as figure:
        grid = figure.subplots(2, len(above), sharex=True, sharey="row", squeeze=False)
        for column, name in enumerate(above):
            for row, lines in enumerate((above[name], below[name])):
                for number, line in enumerate(lines):
                    draw_line(grid[row, column], line, number)
                grid[row, column].grid(axis="y")
            grid[0, column].set_title(name)
            grid[1, column].set_xlabel(x_title)
            grid[1, column].set_xscale("log")
            grid[1, column].set_yscale("log")
            ticks(grid[1, column], "x", "{:g}".format)
            ticks(grid[1, column], "y", "{:g}".format, log=True)
        ticks(grid[0, 0], "y", "{:.0%}".format)
        grid[0, 0].set_ylabel("top-1 accuracy")
        grid[1, 0].set_ylabel("relative data volume")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=3.5)
        return svg(figure, title)
