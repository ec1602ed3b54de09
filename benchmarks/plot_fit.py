"""Draws docs/fitpoly.png: a sorted recorded gradient, its segments and its fits, as in the paper's Figure 5.

python benchmarks/plot_fit.py [--out docs/fitpoly.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

import deepreduce as dr
from deepreduce import kernels
from deepreduce.lab.data import load
from deepreduce.reader import Reader
from deepreduce.values.fitpoly import CurveCodec

LAYER = "l.8.c2.weight"
WHOLE = 2**24
GIVEN, SORTED, FIT, CUT = "#c6d8ee", "#274b7a", "#d9542b", "#9a9a9a"

Values = NDArray[np.float32]


def draw(axes: Axes, values: Values, codec: CurveCodec, title: str) -> None:
    """The values as they stand and sorted, the curve that the reader sees, and where the segments meet."""
    part, _ = codec.encode(values, seed=0)
    decoded = codec.decode(Reader(part), values.size, values.dtype)
    descending, _ = kernels.fit.descending(values, codec.block)
    lengths, _, _ = codec._runs(descending)
    error = np.linalg.norm(descending - decoded) / np.linalg.norm(descending)
    axes.vlines(range(values.size), 0, values, color=GIVEN, linewidth=0.7, label="as they stand")
    axes.plot(descending, ".", color=SORTED, markersize=3.2, label="sorted")
    axes.plot(decoded, color=FIT, linewidth=1.4, label="decoded")
    for number, place in enumerate(np.cumsum(lengths)[:-1]):
        axes.axvline(place - 0.5, color=CUT, linewidth=0.8, linestyle="--", label="segments" if number == 0 else None)
    axes.set_title(f"{title}\n{len(part)} bytes for {values.nbytes}, error {100 * error:.1f}%", fontsize=9, loc="left")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "fitpoly.png")
    arguments = parser.parse_args()
    gradient = load("resnet20")[LAYER]
    values = dr.decode_sparse(dr.parse("topr:0.01/raw/raw").encode(gradient)).values
    panels = [
        (dr.FitPoly(block=WHOLE), "fitpoly, degree 5, segments as needed"),
        (dr.FitPoly(4, degree=1, block=WHOLE), "fitpoly:4,degree=1, 8 pieces in all"),
        (dr.FitDExp(WHOLE), "fitdexp, 4 numbers a sign"),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True, layout="constrained")
    for panel, (codec, title) in zip(axes, panels, strict=True):
        draw(panel, values, codec, title)
        panel.set_xlabel("rank")
    axes[0].set_ylabel("gradient value")
    axes[0].legend(fontsize=8, frameon=False, loc="lower left")
    figure.suptitle(f"The largest 1% of a 36,864-element convolution gradient of ResNet-20 ({values.size} values)", fontsize=10)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
