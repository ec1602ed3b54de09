"""Every value codec on the largest 1% of recorded gradients: size, error and rate, as rows of CSV; then three short tables.

usage: python benchmarks/values.py [--out FILE] [--repeat K]

Rates are those of 255,570 values (1% of a ResNet-50) that are drawn from the same distribution, beside numpy and zlib in the same run.
Times are seconds of the processor, as all of this runs in one thread: they hold on a machine that is busy with other things, too.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import best_of

import deepreduce as dr
from deepreduce import reorder
from deepreduce.lab.data import NAMES, load
from deepreduce.presets import TABLE_3
from deepreduce.reader import Reader

MANY = 255_570
LAYER = "l.8.c2.weight"

CODECS = [
    "raw",
    "pco",
    "deflate",
    "fp16",
    "bf16",
    *(f"qsgd:{bits}" for bits in range(2, 9)),
    *(f"qsgd:{bits},norm=l2" for bits in (4, 7)),
    *(f"sketch:{bits}" for bits in range(2, 9)),
    "sketch:7,huffman=true",
    "sketch:8,groups=8",
    "fitpoly:paper,degree=5",
    "fitpoly:degree=5",
    *(f"fitpoly:{segments},degree=5" for segments in (2, 8)),
    "fitpoly:8,degree=1",
    "fitpoly:16,degree=0",
    "fitdexp",
    "threelc:1.0",
]

FIGURE_10A = {
    "Top-r": "topr:0.01/raw/raw",
    **{name: spec for name, spec in TABLE_3.items() if name.startswith("DR")},
    "DR[BF-P2, Fit-Poly]": "topr:0.01/bloom:p2,fpr=0.001/fitpoly:degree=5",
    "DR[BF-P0, QSGD]": "topr:0.01/bloom:p0,fpr=0.001/qsgd:7",
    "SketchML": "topr:0.01/delta/sketch:bits=6,groups=8",
    "SKCompress": "topr:0.01/deltahuffman/sketch:bits=7,huffman=true",
}

COLUMNS = (
    "commit", "machine", "gradient", "codec", "used", "values", "value_bytes", "order_bytes",
    "bits_per_value", "order_bits_per_value", "relative_error", "encode_million_per_second", "decode_million_per_second",
)  # fmt: skip


def top_values(name: str) -> np.ndarray:
    """The largest 1% of a recorded gradient, the whole model as one tensor."""
    gradient = np.concatenate([array.reshape(-1) for array in load(name).values()])
    return dr.decode_sparse(dr.encode(gradient, "topr:0.01/raw/raw")).values


def many_like(values: np.ndarray) -> np.ndarray:
    """Many values of the same distribution."""
    ranks = np.random.default_rng(0).random(MANY) * (values.size - 1)
    return np.interp(ranks, np.arange(values.size), np.sort(values)).astype(np.float32)


def encode(codec: dr.ValueCodec, values: np.ndarray) -> tuple[dr.ValueCodec, bytes, dr.Order | None]:
    chosen = codec.choose(values)
    return chosen, *chosen.encode(values, seed=1)


def decode(chosen: dr.ValueCodec, part: bytes, order_part: bytes, values: np.ndarray) -> np.ndarray:
    decoded = chosen.decode(Reader(part), values.size, values.dtype)
    return reorder.restore(decoded, reorder.decode(Reader(order_part), values.size))


def relative_error(values: np.ndarray, decoded: np.ndarray) -> float:
    exact = values.astype(np.float64)
    return float(np.linalg.norm(decoded - exact) / np.linalg.norm(exact))


def rows(name: str, repeat: int) -> list[dict[str, object]]:
    values = top_values(name)
    many = many_like(values)
    encoders, decoders, found = {}, {}, []
    for spec in CODECS:
        codec = dr.parse(f"none/all/{spec}").value
        chosen, part, order = encode(codec, values)
        order_part = reorder.encode(order)
        decoded = decode(chosen, part, order_part, values)
        assert np.all(np.abs(decoded.astype(np.float64) - values) <= np.asarray(chosen.error_bound(values)) * 1.000001), spec
        many_chosen, many_part, many_order = encode(codec, many)
        many_order_part = reorder.encode(many_order)
        encoders[spec] = lambda codec=codec: encode(codec, many)
        decoders[spec] = lambda a=many_chosen, b=many_part, c=many_order_part: decode(a, b, c, many)
        found.append(
            {
                "gradient": name,
                "codec": spec,
                "used": str(dr.DeepReduce(dr.Keep(), dr.All(), chosen)).rpartition("/")[2],
                "values": values.size,
                "value_bytes": len(part),
                "order_bytes": len(order_part),
                "bits_per_value": round(8 * len(part) / values.size, 3),
                "order_bits_per_value": round(8 * len(order_part) / values.size, 3),
                "relative_error": f"{relative_error(values, decoded):.3g}",
            }
        )
    encode_seconds, decode_seconds = best_of(repeat + 1, encoders, time.thread_time), best_of(repeat + 1, decoders, time.thread_time)
    for row in found:
        row["encode_million_per_second"] = round(MANY / encode_seconds[str(row["codec"])] / 1e6, 1)
        row["decode_million_per_second"] = round(MANY / decode_seconds[str(row["codec"])] / 1e6, 1)
    return found


def print_sizes(table: list[dict[str, object]]) -> None:
    print("\n| codec | order | " + " | ".join(f"{name}: bits | error" for name in NAMES) + " | M/s in | M/s out |")
    print("|---|" + "---:|" * (2 * len(NAMES) + 3))
    for spec in CODECS:
        mine = {row["gradient"]: row for row in table if row["codec"] == spec}
        cells = [f"{row['bits_per_value']:.2f} | {float(str(row['relative_error'])):.2g}" for row in mine.values()]
        order = np.median([float(str(row["order_bits_per_value"])) for row in mine.values()])
        rates = [float(np.median([float(str(row[f"{way}_million_per_second"])) for row in mine.values()])) for way in ("encode", "decode")]
        print(f"| `{spec}` | {order:.0f} | " + " | ".join(cells) + f" | {rates[0]:.0f} | {rates[1]:.0f} |")


def print_figure_10a() -> None:
    layer = load("resnet20")[LAYER]
    print(f"\n| method | values | indices | order | whole message |   ({LAYER}, {layer.size:,} elements, top 1%)")
    print("|---|---:|---:|---:|---:|")
    for name, spec in FIGURE_10A.items():
        info = dr.inspect(dr.encode(layer, spec, seed=1))
        parts = (info.value_bytes, info.index_bytes, info.order_bytes, info.nbytes)
        print(f"| {name} | " + " | ".join(f"{part / layer.nbytes:.4f}" for part in parts) + " |")


def print_speed(repeat: int) -> None:
    many = many_like(top_values("gpt"))

    def both(spec: str) -> Callable[[], object]:
        codec = dr.parse(f"none/all/{spec}").value

        def run() -> None:
            chosen, part, order = encode(codec, many)
            decode(chosen, part, reorder.encode(order), many)

        return run

    sides: dict[str, Callable[[], object]] = {
        "numpy.sort": lambda: np.sort(many),
        "numpy.argsort": lambda: np.argsort(many),
        "zlib": lambda: zlib.decompress(zlib.compress(many.tobytes())),
    }
    sides |= {spec: both(spec) for spec in ("qsgd", "qsgd:7,norm=l2", "sketch", "sketch:7,huffman=true", "threelc", "deflate", "pco")}
    best = best_of(repeat + 1, sides, time.thread_time)  # the first turn compiles
    print(f"\n| encode + decode of {MANY:,} values | ms | of numpy.sort | of numpy.argsort | of zlib |")
    print("|---|---:|---:|---:|---:|")
    for name, seconds in best.items():
        ratios = " | ".join(f"{seconds / best[side]:.2f}" for side in ("numpy.sort", "numpy.argsort", "zlib"))
        print(f"| {name} | {1000 * seconds:.2f} | {ratios} |")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "values.csv")
    arguments.add_argument("--repeat", type=int, default=7)
    args = arguments.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    where = {"commit": commit, "machine": f"{platform.machine()}, numpy {np.__version__}"}
    table = [where | row for name in NAMES for row in rows(name, args.repeat)]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    print_sizes(table)
    print_figure_10a()
    print_speed(3 * args.repeat)


if __name__ == "__main__":
    main()
