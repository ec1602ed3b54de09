"""Encode one recorded gradient by several specs, and compare the bytes."""

import numpy as np
from rich.console import Console
from rich.table import Table

import deepreduce as dr
from deepreduce.lab.data import load

SPECS = [
    "dense",
    "topr:0.01/raw/raw",
    "topr:0.01/bloom:p2,fpr=0.001/fitpoly",
    "skcompress",
    "topr:0.01/rice/qsgd",
    "topr:0.01/auto/qsgd",
    "randomr:0.01/seeded/qsgd",
]


def main() -> None:
    gradient = load("resnet20")["l.8.c2.weight"]
    table = Table(title=f"a convolution of ResNet-20, {gradient.size:,} elements, {gradient.nbytes:,} bytes")
    for title in ("spec", "bytes", "ratio", "bits/index", "bits/value", "error"):
        table.add_column(title, justify="left" if title == "spec" else "right")
    for spec in SPECS:
        blob = dr.encode(gradient, spec, seed=0)
        info, decoded = dr.inspect(blob), dr.decode(blob)
        error = np.linalg.norm(decoded - gradient) / np.linalg.norm(gradient)
        numbers = (
            f"{info.nbytes:,}",
            f"{gradient.nbytes / info.nbytes:.1f}",
            f"{info.bits_per_index:.2f}",
            f"{info.bits_per_value:.2f}",
            f"{error:.3f}",
        )
        table.add_row(spec, *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
