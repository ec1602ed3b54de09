"""The picture and the tables of docs/indices.md from the rows that benchmarks/indices.py writes.

usage: python benchmarks/indices.py --out docs/indices.csv
       python benchmarks/plot_indices.py docs/indices.csv docs/indices.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from math import log
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Rows = dict[tuple[str, str], dict[str, str]]  # by data and codec

UNIFORM = "uniform 1.0%"
FPR = 1e-3
BLOOM = f"bloom, FPR {FPR:g}"
BLOOM_BITS = -log(FPR) / log(2) ** 2
CODECS = ("raw", "huffman", BLOOM, "delta", "rle", "rice", "pco", "deltahuffman", "shaped", "auto")
TABLE = ("raw", "bitmap", "huffman", "delta", "rle", "rice", "pco", "deltahuffman", "shaped", "auto", "(pcodec)")
GREY = "#6a6a6a"
STYLES = {
    UNIFORM: ("uniform 1%", "o", GREY),
    "ncf top 1%": ("NCF, top 1%", "s", "#2a78b5"),
    "resnet20 top 1%": ("ResNet-20, top 1%", "^", "#d1495b"),
    "gpt top 1%": ("GPT, top 1%", "D", "#3a9d5d"),
    "ncf non-zeros": ("NCF, its non-zeros", "P", "#8a5fbf"),
}
SIZE_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 16, 32)
RATE_TICKS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def read(path: Path) -> Rows:
    with path.open(newline="") as file:
        return {(row["data"], row["codec"]): row for row in csv.DictReader(file)}


def number(rows: Rows, data: str, codec: str, column: str) -> float:
    return float(rows[data, codec][column])


def draw_sizes(axes: Axes, rows: Rows) -> None:
    dots = {"s": 42, "zorder": 3, "edgecolors": "white", "linewidths": 0.6}
    for data, (label, marker, colour) in STYLES.items():
        places = [(number(rows, data, codec, "bits_per_index"), i) for i, codec in enumerate(CODECS) if codec != BLOOM]
        axes.scatter(*zip(*places, strict=True), marker=marker, color=colour, label=label, **dots)
    axes.scatter([BLOOM_BITS], [CODECS.index(BLOOM)], marker="o", color=GREY, **dots)
    axes.text(BLOOM_BITS * 1.15, CODECS.index(BLOOM), "for any support", va="center", fontsize=8, color=GREY)
    bound = number(rows, UNIFORM, "raw", "bound_bits")
    axes.axvline(bound, color=GREY, linestyle="--", linewidth=1, zorder=1)
    axes.text(bound * 0.95, -0.65, f"bound for uniform 1%: {bound:.2f}", ha="right", va="center", fontsize=8, color=GREY)
    axes.set_xscale("log")
    axes.set_xticks(SIZE_TICKS, [f"{tick:g}" for tick in SIZE_TICKS])
    axes.minorticks_off()
    axes.set_xlim(0.03, 50)
    axes.set_yticks(range(len(CODECS)), CODECS)
    axes.set_ylim(len(CODECS) - 0.5, -1)
    axes.set_xlabel("bits per index")
    axes.set_title("Size")
    axes.grid(axis="x", color="#e6e6e6")
    axes.legend(loc="upper left", frameon=False, fontsize=8, bbox_to_anchor=(0.0, 0.92))


def draw_rates(axes: Axes, rows: Rows) -> None:
    for way, face in (("encode", "white"), ("decode", "#2a78b5")):
        places = [(number(rows, UNIFORM, codec, f"{way}_mega_per_s"), i) for i, codec in enumerate(CODECS) if codec != BLOOM]
        axes.scatter(*zip(*places, strict=True), s=42, zorder=3, facecolors=face, edgecolors="#2a78b5", label=way)
    axes.text(5.5, CODECS.index(BLOOM), "asks for all positions: see bloom.py", va="center", fontsize=8, color=GREY)
    axes.set_xscale("log")
    axes.set_xticks(RATE_TICKS, [f"{tick:g}" for tick in RATE_TICKS])
    axes.minorticks_off()
    axes.set_xlim(2, 4000)
    axes.set_xlabel("million indices per second, one core")
    axes.set_title("Rate, uniform 1% of 16.8 million")
    axes.grid(axis="x", color="#e6e6e6")
    axes.legend(loc="upper left", frameon=False, fontsize=8)


def draw(rows: Rows, path: Path) -> None:
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"})
    figure, (sizes, rates) = plt.subplots(1, 2, figsize=(10.5, 4.2), width_ratios=(1.25, 1), sharey=True, layout="constrained")
    draw_rates(rates, rows)
    draw_sizes(sizes, rows)
    figure.savefig(path, dpi=140, metadata={"Software": None})


def tables(rows: Rows) -> str:
    """The sizes on every support, and the rates on the uniform ones, as Markdown."""
    data = list(dict.fromkeys(data for data, _ in rows))
    uniform = [each for each in data if each.startswith("uniform")]
    bounds = (f"*{number(rows, each, 'raw', 'bound_bits'):.2f}*" for each in data)
    sizes = [line("*bound if uniform*", bounds)]
    rates = []
    for codec in TABLE:
        sizes.append(line(f"`{codec}`", (size(number(rows, each, codec, "bits_per_index")) for each in data)))
        pairs = ((number(rows, each, codec, f"{way}_mega_per_s") for way in ("encode", "decode")) for each in uniform)
        rates.append(line(f"`{codec}`", (" / ".join(f"{rate:.{0 if rate >= 10 else 1}f}" for rate in pair) for pair in pairs)))
    sizes.append(line(f"`bloom`, FPR {FPR:g} (lossy)", [f"{BLOOM_BITS:.2f}"] * len(data)))
    return "\n".join([*head("bits per index", data), *sizes, "", *head("million indices per second", uniform), *rates])


def size(bits: float) -> str:
    return f"{bits:.3f}" if bits < 1 else f"{bits:.2f}"


def head(first: str, names: list[str]) -> list[str]:
    return [line(first, names), "|---" * (1 + len(names)) + "|"]


def line(first: str, cells: Iterable[str]) -> str:
    return f"| {first} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="CSV of benchmarks/indices.py")
    parser.add_argument("picture", type=Path, help="PNG to write; the tables go to standard output")
    arguments = parser.parse_args()
    rows = read(arguments.rows)
    draw(rows, arguments.picture)
    print(tables(rows))


if __name__ == "__main__":
    main()
