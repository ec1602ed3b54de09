"""The rate-distortion plane of all value codecs, from the rows that values.py wrote.

usage: python benchmarks/plot_values.py [--rows FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
TITLES = {"resnet20": "ResNet-20", "gpt": "transformer", "ncf": "NCF"}

# Family: colour, marker, and which codecs belong to it.
FAMILIES = {
    "qsgd, norm=max": ("#0072b2", "o", lambda codec: codec.startswith("qsgd") and "l2" not in codec),
    "qsgd, norm=l2": ("#56b4e9", "v", lambda codec: codec.startswith("qsgd") and "l2" in codec),
    "sketch": ("#d55e00", "s", lambda codec: codec.startswith("sketch") and "=" not in codec),
    "sketch, MinMaxSketch": ("#e69f00", "P", lambda codec: "groups" in codec),
    "fitpoly, degree 5": ("#009e73", "D", lambda codec: codec.startswith("fitpoly") and "degree=5" in codec),
    "fitdexp": ("#cc79a7", "^", lambda codec: codec == "fitdexp"),
    "threelc": ("#8c564b", "X", lambda codec: codec.startswith("threelc")),
    "fp16 and bf16": ("#444444", "*", lambda codec: codec in ("fp16", "bf16")),
}
LOSSLESS = ("pco", "deflate", "raw")


def points(rows: list[dict[str, str]], belongs: object) -> list[tuple[float, float, float]]:
    """Bits of the value, bits of the order, error: sorted by the first."""
    mine = [row for row in rows if belongs(row["codec"])]  # type: ignore[operator]
    return sorted((float(row["bits_per_value"]), float(row["order_bits_per_value"]), float(row["relative_error"])) for row in mine)


def panel(axes: Axes, rows: list[dict[str, str]]) -> None:
    for label, (colour, marker, belongs) in FAMILIES.items():
        found = points(rows, belongs)
        bits = [value for value, _, _ in found]
        errors = [error for _, _, error in found]
        whole = [value + order for value, order, _ in found]
        line = "-" if len(found) > 2 or "l2" in label else "none"
        style = {"color": colour, "marker": marker, "markersize": 6, "linestyle": line}
        axes.plot(whole, errors, linewidth=1.2, label=label, zorder=3, clip_on=False, **style)
        if whole != bits:
            axes.plot(bits, errors, linewidth=0.8, markerfacecolor="white", zorder=2, **style)
    for row in rows:
        if row["codec"] in LOSSLESS:
            bits = float(row["bits_per_value"])
            axes.axvline(bits, color="#999999", linewidth=0.8, linestyle=":", zorder=1)
            height = 1.6 / 8 ** LOSSLESS.index(row["codec"])  # two of them are close together
            axes.annotate(row["codec"], (bits, height), rotation=90, ha="right", va="top", fontsize=8, color="#555555")
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 2)
    axes.set_xlim(0, 33)
    axes.set_xlabel("bits per value, order included")
    axes.grid(alpha=0.25, which="major")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=Path, default=DOCS / "values.csv")
    arguments.add_argument("--out", type=Path, default=DOCS / "values.png")
    args = arguments.parse_args()
    with args.rows.open() as file:
        rows = list(csv.DictReader(file))
    figure, panels = plt.subplots(1, len(TITLES), figsize=(13, 5), sharey=True, layout="constrained")
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        panel(axes, [row for row in rows if row["gradient"] == name])
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("relative L2 error")
    panels[0].plot([], [], "D", color="#009e73", markerfacecolor="white", label="hollow: without the order (raw keys)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle("Value codecs on the largest 1% of recorded gradients: nearer to the lower left is better", fontsize=12)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
