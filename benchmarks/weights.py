"""Differences of weights beside what other projects send: bits per changed weight, and speed.

    python benchmarks/weights.py [--data FOLDER] [--out weights.csv] [--repeats 5] [--speed-only | --sizes-only] [--cpu-time]

The data come from real training (`weights_data.py`, about ten minutes on one core at the first run, then kept in FOLDER). Every round
trip is checked before anything is timed; the sides take turns, and the best time of each counts. The peers (`weights_peers.py`) check no
weights, but for the row that says so; ours are timed with all their checks, and applied without them too. `memory compare` is memcmp of two
equal tensors, to tell the machine by.

With --out, the rows go to a CSV file, and the tables of docs/weights.md to stdout.
"""

from __future__ import annotations

import argparse
import csv
import operator
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from turns import best_of
from weights_data import Weights, pairs
from weights_peers import FORMATS, NEMO, Patterns, checked, ordered, packages

from deepreduce import weights

Row = dict[str, str]
COLUMNS = ["what", "data", "changed", "side", "bits", "encode GB/s", "apply GB/s", "encode / compare", "apply / compare"]
LARGE = 33_554_432
SPEED_PAIRS = ("1%", "2.5%")
MODES: tuple[Any, ...] = ("portable", "conditional")
COMPARE = "memory compare"


def order0_bits(old: Patterns, new: Patterns) -> float:
    """Bits per change: positions given their density, steps by their frequencies."""
    changed = old != new
    density = changed.mean()
    counts = np.unique(ordered(new[changed]) - ordered(old[changed]), return_counts=True)[1]
    share = counts / counts.sum()
    return float(-np.log2(density) - (1 - density) / density * np.log2(1 - density) - (share * np.log2(share)).sum())


def as_weights(tensors: Weights) -> dict[str, NDArray[Any]]:
    return {name: array.view(ml_dtypes.bfloat16) for name, array in tensors.items()}


def flattened(tensors: Weights) -> Patterns:
    return np.concatenate([array.ravel() for array in tensors.values()])


def sizes(folder: Path) -> Iterator[Row]:
    """Bits per changed weight of whole models."""
    for name, old, new in pairs(folder):
        before, after = flattened(old), flattened(new)
        changed = int(np.count_nonzero(before != after))
        base = {"what": "size", "data": name, "changed": f"{changed / before.size:.4f}"}
        for side in [*FORMATS, *packages()]:
            parts, target = side.encode(before, after), before.copy()
            side.apply(target, parts)
            assert np.array_equal(target, after), side.name
            yield base | {"side": side.name, "bits": f"{8 * sum(memoryview(part).nbytes for part in parts) / changed:.3f}"}
        yield base | {"side": "order-0 entropy of positions and steps", "bits": f"{order0_bits(before, after):.3f}"}
        for mode in MODES:
            patch = weights.diff(as_weights(old), as_weights(new), mode=mode)
            result = weights.apply(as_weights(old), patch)
            assert all(np.array_equal(result[key].view(np.uint16), new[key]) for key in new)
            yield base | {"side": f"deepreduce, {mode}", "bits": f"{8 * len(patch) / changed:.3f}"}


def speeds(folder: Path, repeats: int, cpu_time: bool) -> Iterator[Row]:
    """GB of dense bfloat16 per second, on one tensor of 33M weights; with `cpu_time`, per second of the processor, one thread only."""
    clock, thread_counts = (time.process_time, (1,)) if cpu_time else (time.perf_counter, (1, 2))
    for name, *tensors in pairs(folder):
        if name not in SPEED_PAIRS:
            continue
        before, after = (np.resize(flattened(each), LARGE) for each in tensors)  # the weights of a model over and over
        encoders, appliers = timed(before, after, thread_counts)
        encode_seconds, apply_seconds = best_of(repeats, encoders, clock), best_of(repeats, appliers, clock)
        base = {"what": "speed", "data": name, "changed": f"{np.mean(before != after):.4f}"}
        for side in dict.fromkeys([*encode_seconds, *apply_seconds]):
            row = base | {"side": side}
            if side in encode_seconds:
                row |= rates("encode", before.nbytes, encode_seconds[side], encode_seconds[COMPARE])
            if side in apply_seconds:
                trips = 2 if side.startswith("deepreduce") else 1
                row |= rates("apply", before.nbytes, apply_seconds[side] / trips, apply_seconds[COMPARE])
            yield row


def rates(what: str, size_bytes: int, seconds: float, compare_seconds: float) -> Row:
    return {f"{what} GB/s": f"{size_bytes / seconds / 1e9:.2f}", f"{what} / compare": f"{compare_seconds / seconds:.2f}"}


Runs = dict[str, Callable[[], object]]


def timed(before: Patterns, after: Patterns, thread_counts: tuple[int, ...]) -> tuple[Runs, Runs]:
    """What is timed, by the names of the sides: encoding, and applying in place."""
    equal = before.copy()
    compare = partial(operator.eq, before.tobytes(), equal.tobytes())
    encoders: Runs = {COMPARE: compare}
    appliers: Runs = {COMPARE: compare}
    for side in [*FORMATS, checked(NEMO)]:
        encoders[side.name] = partial(side.encode, before, after)
        appliers[side.name] = partial(side.apply, before.copy(), side.encode(before, after))
    old, new = ({"w": array.view(ml_dtypes.bfloat16)} for array in (before, after))
    for mode in MODES:
        there, back = weights.diff(old, new, mode=mode), weights.diff(new, old, mode=mode)
        for threads in thread_counts:
            name = f"deepreduce, {mode}, {threads} thread{'s' if threads > 1 else ''}"
            encoders[name] = partial(weights.diff, old, new, mode=mode, threads=threads)
            for check, note in ((True, ""), (False, ", unchecked")):
                appliers[name + note] = there_and_back(old, there, back, threads, check)
    encoders["deepreduce, unchanged"] = partial(weights.diff, old, as_weights({"w": equal}), threads=1)
    return encoders, appliers


def there_and_back(base: dict[str, NDArray[Any]], there: bytes, back: bytes, threads: int, check: bool) -> Callable[[], object]:
    """Apply a patch in place, and the one that undoes it: two trips of the same size."""
    tensors = {"w": base["w"].copy()}

    def run() -> None:
        weights.apply_(tensors, there, threads=threads, check=check)
        weights.apply_(tensors, back, threads=threads, check=check)

    run()
    assert np.array_equal(tensors["w"].view(np.uint16), base["w"].view(np.uint16))
    return run


def table(rows: list[Row], cell: Callable[[Row], str]) -> str:
    """A Markdown table with a line for each side and a column for each density."""
    titles = {f"{float(row['changed']):.1%} changed": row["data"] for row in rows}
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (1 + len(titles)) + "|"]
    for side in dict.fromkeys(row["side"] for row in rows):
        found = {row["data"]: cell(row) for row in rows if row["side"] == side}
        lines.append(f"| {side} | " + " | ".join(found[data] for data in titles.values()) + " |")
    return "\n".join(lines)


def tables(rows: list[Row]) -> Iterator[str]:
    """Those of docs/weights.md: bits per changed weight, and GB/s of encoding and applying."""
    sizes, speeds = ([row for row in rows if row["what"] == what] for what in ("size", "speed"))
    if sizes:
        yield table(sizes, lambda row: f"{float(row['bits']):.2f}")
    if speeds:
        yield table(speeds, lambda row: " / ".join(row.get(key, "-") for key in ("encode GB/s", "apply GB/s")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/weights-data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--sizes-only", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor: for machines with other work; one thread only")
    args = parser.parse_args()
    rows: list[Row] = []
    with args.out.open("w", newline="") if args.out else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        parts = [] if args.speed_only else [sizes(args.data)]
        parts += [] if args.sizes_only else [speeds(args.data, args.repeats, args.cpu_time)]
        for part in parts:
            for row in part:
                writer.writerow(row)
                file.flush()
                rows.append(row)
    if args.out:
        print(*tables(rows), sep="\n\n")


if __name__ == "__main__":
    main()
