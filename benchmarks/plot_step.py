"""The picture and the tables of docs/step.md from the rows that benchmarks/step.py writes.

usage: python benchmarks/step.py --out docs/step.csv
       python benchmarks/plot_step.py docs/step.csv docs/step.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, str]
Link = tuple[str, str]  # ranks and rate

TITLES = {"resnet50": "ResNet-50 (161 tensors, 25,557,032 elements)", "gpt2": "GPT-2 (148 tensors, 124,439,808 elements)"}
SIDES = {
    "no communication": "#c8c8c8",
    "plain DDP": "#6a6a6a",
    "allreduce hook": "#8c8c8c",
    "fp16 hook": "#d1a04b",
    "bf16 hook": "#c07a2c",
    "PowerSGD": "#d1495b",
    "allgather": "#2a78b5",
    "server": "#8a5fbf",
    "sharded": "#3a9d5d",
    "never_slower": "#17445f",
}
OURS = ("allgather", "server", "sharded", "never_slower")


def read(path: Path) -> list[Row]:
    """Return the latest row of every model, link and side."""
    with path.open(newline="") as file:
        return list({(row["model"], row["ranks"], row["link"], row["side"]): row for row in csv.DictReader(file)}.values())


def label(side: str) -> str:
    return f"`{side}`" if side in OURS else side


def at(link: Link) -> str:
    ranks, rate = link
    return f"{ranks} ranks, {'no limit' if rate == 'none' else rate.replace('gbit', ' Gbit/s').replace('mbit', ' Mbit/s')}"


def links_of(rows: Sequence[Row]) -> list[Link]:
    return list(dict.fromkeys((row["ranks"], row["link"]) for row in rows if row["ranks"] != "1"))


def table(rows: Sequence[Row]) -> str:
    """Milliseconds per step, the median and the best, and how many times faster than plain DDP the median is."""
    links, cells = links_of(rows), {(row["side"], row["ranks"], row["link"]): row for row in rows}
    lines = ["| ms per step: median (best), times plain DDP | " + " | ".join(map(at, links)) + " |", "|---|" + "---:|" * len(links)]
    for side in SIDES:
        if any((side, *link) in cells for link in links):
            found = [cell(cells.get((side, *link)), cells.get(("plain DDP", *link))) for link in links]
            lines.append(f"| {label(side)} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def cell(row: Row | None, plain: Row | None) -> str:
    if row is None:
        return ""
    if not row["median_ms"]:
        return "fails"
    times = f"{float(row['median_ms']):,.0f} ({float(row['best_ms']):,.0f})"
    return times if plain is None or row is plain else f"{times}, {float(plain['median_ms']) / float(row['median_ms']):.1f}x"


def alone(rows: Sequence[Row]) -> str:
    """One rank without a network."""
    found = [row for row in rows if row["ranks"] == "1"]
    return "\n".join(f"- `{row['side']}`: {row['median_ms']} ms, best {row['best_ms']} ms. {row['note']}" for row in found)


def notes(rows: Sequence[Row]) -> str:
    """What a side said of itself: why it failed, or what it chose."""
    found = [
        f"- {label(row['side'])}, {at((row['ranks'], row['link']))}: {row['note']}" for row in rows if row["note"] and row["ranks"] != "1"
    ]
    loads = sorted({float(row["load"]) for row in rows})
    return "\n".join(
        [*found, f"- load average while measuring: {loads[0]} to {loads[-1]}; {rows[0]['machine']}; commit {rows[0]['commit']}"]
    )


def draw(axes: Axes, rows: Sequence[Row], title: str) -> None:
    links = links_of(rows)
    sides = [side for side in SIDES if any(row["side"] == side and row["median_ms"] for row in rows)]
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        mine = {(row["ranks"], row["link"]): float(row["median_ms"]) for row in rows if row["side"] == side and row["median_ms"]}
        places = [(links.index(link) + (number - (len(sides) - 1) / 2) * width, time) for link, time in mine.items()]
        bars = axes.bar(*zip(*places, strict=True), width=0.9 * width, color=SIDES[side], label=side, zorder=2)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=1)
    axes.set_yscale("log")
    axes.set_ylim(bottom=10)
    axes.set_xticks(range(len(links)), map(at, links))
    axes.set_ylabel("ms per step, median")
    axes.set_title(title)
    axes.grid(axis="y", color="#e6e6e6")
    axes.legend(frameon=False, fontsize=8, ncols=2)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rows", type=Path)
    arguments.add_argument("picture", type=Path)
    args = arguments.parse_args()
    rows = read(args.rows)
    models = [model for model in TITLES if any(row["model"] == model and row["ranks"] != "1" for row in rows)]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"})
    figure, axes = plt.subplots(len(models), 1, figsize=(9, 4 * len(models)), layout="constrained", squeeze=False)
    for model, place in zip(models, axes.flat, strict=True):
        mine = [row for row in rows if row["model"] == model]
        draw(place, mine, TITLES[model])
        print(f"{TITLES[model]}\n\n{table(mine)}\n\n{alone(mine)}\n{notes(mine)}\n")
    figure.savefig(args.picture, dpi=140, metadata={"Software": None})


if __name__ == "__main__":
    main()
