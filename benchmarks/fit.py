"""The curve codecs beside numpy's argsort of the same values: size, error, time, and the choice of block and segments.

    python benchmarks/fit.py [--count 255570] [--repeats 15]

The values are the largest 1% of 100 times as many normal numbers. Every round trip is checked before anything is timed; all take turns, and
the best time of each counts. `ratio` is encode and decode together over one argsort.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from turns import best_of

import deepreduce as dr
from deepreduce.codec import ValueCodec
from deepreduce.lab.data import NAMES, load
from deepreduce.reader import Reader

TIMED = (dr.FitPoly(), dr.FitPoly(2), dr.FitPoly(8, block=2**24), dr.FitDExp(), dr.FitDExp(2**24))
SEGMENTS = (1, 2, 4, "paper", None)
BLOCKS = (64, 128, 256, 512, 1024, 4096, 2**24)

Values = NDArray[np.float32]


def largest(gradient: Values, count: int) -> Values:
    """The `count` largest magnitudes, in the order of their positions."""
    return gradient[np.sort(np.argpartition(-np.abs(gradient), count - 1)[:count])]


def round_trip(codec: ValueCodec, values: Values) -> tuple[bytes, int, float]:
    """The section, the bits of its order for each value, and the relative L2 error."""
    part, order = codec.encode(values, seed=0)
    assert order is not None
    decoded = codec.decode(Reader(part), values.size, values.dtype)
    exact = values[order.permutation].astype(np.float64)
    assert np.all(np.sign(decoded) == np.sign(exact))
    return part, (min(order.block, values.size) - 1).bit_length(), float(np.linalg.norm(decoded - exact) / np.linalg.norm(exact))


def compare_times(count: int, repeats: int) -> None:
    values = largest(np.random.default_rng(0).standard_normal(100 * count, np.float32), count)
    sides: dict[str, Callable[[], object]] = {"argsort": lambda: np.argsort(values)}
    shown = {}
    for codec in TIMED:
        part, order_bits, error = round_trip(codec, values)
        shown[repr(codec)] = (8 * len(part) / count, order_bits, error)
        sides[f"{codec!r} encode"] = lambda codec=codec: codec.encode(values, 0)
        sides[f"{codec!r} decode"] = lambda codec=codec, part=part: codec.decode(Reader(part), count, values.dtype)
    times = best_of(repeats, sides)
    print(f"{count} values; argsort {1e3 * times['argsort']:.1f} ms")
    print(f"{'codec':48} {'bits':>6} {'order':>6} {'error':>8} {'encode ms':>10} {'decode ms':>10} {'ratio':>6}")
    for name, (bits, order_bits, error) in shown.items():
        encode, decode = times[f"{name} encode"], times[f"{name} decode"]
        ratio = (encode + decode) / times["argsort"]
        print(f"{name:48} {bits:6.2f} {order_bits:6d} {error:8.4f} {1e3 * encode:10.1f} {1e3 * decode:10.1f} {ratio:6.2f}")


def compare_choices() -> None:
    tensors = [g.reshape(-1) for name in NAMES for g in load(name).values() if g.size >= 20_000]
    kept = [largest(g, g.size // 100) for g in tensors]
    print(f"\nmean over the largest 1% of {len(kept)} recorded gradients of 20,000 elements and more; bits per value")
    print(f"{'codec':60} {'values':>7} {'order':>6} {'sum':>6} {'error':>7} {'worst':>7}")
    codecs = [dr.FitPoly(segments, block=block) for segments in SEGMENTS for block in BLOCKS] + [dr.FitDExp(block) for block in BLOCKS]
    for codec in codecs:
        rows = []
        for values in kept:
            part, order_bits, error = round_trip(codec, values)
            rows.append((8 * len(part) / values.size, order_bits, error))
        bits, order_bits, error = np.mean(rows, axis=0)
        worst = max(error for _, _, error in rows)
        print(f"{codec!r:60} {bits:7.2f} {order_bits:6.2f} {bits + order_bits:6.2f} {error:7.4f} {worst:7.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=255_570)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    compare_times(arguments.count, arguments.repeats)
    compare_choices()


if __name__ == "__main__":
    main()
