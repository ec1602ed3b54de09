"""Milliseconds of a training step, compressed and not, over shaped links: the shapes of a real model, gradients given at once.

    python benchmarks/step.py                                   # ResNet-50, 2 ranks on three links, 4 ranks on one
    python benchmarks/step.py --model gpt2 --links 2:1gbit --rounds 1
    python benchmarks/step.py --links 8:100mbit --sides allgather sharded
    python benchmarks/step.py --model gpt2 --links              # one rank without a network only
    python benchmarks/step.py --links --threads 1 2             # the same, by the number of threads
    python benchmarks/plot_step.py docs/step.csv docs/step.png  # the picture, and the tables as Markdown

All sides take turns in one process group, on links of their own (`deepreduce.lab.train.links`; Linux, no root where users may make
namespaces). Hooks of PyTorch that may fail have processes of their own. A step counts as long as it took the slowest rank. One rank without
a network stands beside `torch.add(a, b, out=c)` on as many elements. Rows are appended to the CSV file.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from one_rank import Add, OneRank, in_turns
from ranks import RankError, run
from shapes import MODELS

from deepreduce.lab.report.provenance import commit, machine
from deepreduce.lab.train.links import shaped_links

SIDES = ("no communication", "plain DDP", "fp16 hook", "bf16 hook", "PowerSGD", "allgather", "sharded", "never_slower")
MAY_FAIL = ("bf16 hook", "PowerSGD")  # one refuses gloo, the other chains collectives in orders that differ by rank
COLUMNS = ("commit", "machine", "model", "ranks", "link", "side", "steps", "median_ms", "best_ms", "sent_bytes", "load", "note")

Row = dict[str, Any]


def alone(model: str, spec: str, repeat: int, threads: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of one rank without a network, with each number of threads."""
    torch.set_num_threads(1)
    shapes = MODELS[model]()
    ranks = [OneRank(shapes, spec, count) for count in threads]
    add, *ours = in_turns(repeat, Add(sum(torch.Size(shape).numel() for shape in shapes)), *ranks)
    yield row(1, "none", "torch.add(a, b, out=c)", add, 0, "")
    for count, seconds in zip(threads, ours, strict=True):
        side = "allreduce_" if count == 1 else f"allreduce_, {count} threads"
        yield row(1, "none", side, seconds, 0, f"{min(seconds) / min(add):.2f} times torch.add")


def on_links(ranks: int, rate: str | None, sides: Sequence[str], job: Row) -> Iterator[Row]:
    """Yield the rows of all sides on links of one rate."""
    for group in filter(None, ([side for side in sides if side not in MAY_FAIL], *([side] for side in sides if side in MAY_FAIL))):
        with shaped_links(ranks, rate) as hosts:
            try:
                found = run(hosts, "step_rank.py", job | {"sides": group})
            except RankError as error:
                if not set(group) <= set(MAY_FAIL):
                    raise
                yield row(ranks, rate or "none", group[0], [], 0, f"failed: {error}")
                continue
        for side in group:
            slowest = [max(step) for step in zip(*(each[side]["seconds"] for each in found), strict=True)]
            sent = max(each[side]["sent_bytes"] for each in found) // len(slowest)
            yield row(ranks, rate or "none", side, slowest, sent, found[0][side]["note"])


def row(ranks: int, link: str, side: str, seconds: Sequence[float], sent_bytes: int, note: str) -> Row:
    """Return a row of the table: what was measured, and how busy the machine was."""
    times = {"median_ms": round(1000 * median(seconds), 1), "best_ms": round(1000 * min(seconds), 1)} if seconds else {}
    load = f"{os.getloadavg()[0]:.1f}"
    where = {"ranks": ranks, "link": link, "side": side}
    return where | times | {"steps": len(seconds), "sent_bytes": sent_bytes, "load": load, "note": note}


def write(path: Path, rows: Iterator[Row], shared: Row) -> None:
    """Append rows to a CSV file as they come, and show them."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        for each in rows:
            writer.writerow(shared | each)
            file.flush()
            times = f"{each['median_ms']:10,.1f} {each['best_ms']:10,.1f}" if "median_ms" in each else f"{'':21}"
            what = f"{shared['model']:9} {each['ranks']} ranks {each['link']:8} {each['side']:22}"
            print(f"{what} {times} ms {each['sent_bytes']:13,} bytes  {each['note']}", flush=True)


def link(text: str) -> tuple[int, str | None]:
    """Return the ranks and the rate of ``RANKS:RATE``."""
    ranks, _, rate = text.partition(":")
    return int(ranks), None if rate == "none" else rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--links", nargs="*", default=["2:none", "2:1gbit", "2:100mbit", "4:1gbit"], metavar="RANKS:RATE")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=(*SIDES, "allreduce hook", "server"), metavar="SIDE")
    parser.add_argument("--spec", default="topr:0.01/rice/qsgd")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (5)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N", help="threads of one rank without a network (1)")
    parser.add_argument("--no-alone", action="store_true", help="leave out the one rank without a network")
    parser.add_argument("--out", type=Path, default=Path("step.csv"))
    args = parser.parse_args()
    shared = {"commit": commit() or "", "machine": machine(), "model": args.model}
    if not args.no_alone:
        write(args.out, alone(args.model, args.spec, args.steps * args.rounds, args.threads), shared)
    job = {"model": args.model, "spec": args.spec, "steps": args.steps, "rounds": args.rounds}
    for ranks, rate in map(link, args.links):
        write(args.out, on_links(ranks, rate, args.sides, job), shared)


if __name__ == "__main__":
    sys.exit(main())
