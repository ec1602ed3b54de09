"""Lossless index codecs beside the pcodec package: bits per index against the bound, encode and decode rates.

    python benchmarks/indices.py [--out indices.csv] [--repeats 15] [--gradients FOLDER]

Rows are CSV. Every round trip is checked before anything is timed; codecs take turns, and the best time of each counts.
`pcodec` is the bare package on 32-bit gaps: it neither checks nor sums them up to positions, which all codecs here do.
"""

from __future__ import annotations

import argparse
import csv
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone
from turns import best_of

import deepreduce as dr
from deepreduce.lab.data import NAMES, load
from deepreduce.reader import Reader
from deepreduce.registry import INDEX_STAGE
from deepreduce.source import Space, as_source
from deepreduce.tensor import Support

UNIFORM_NUMEL = 16_800_000
UNIFORM_DENSITIES = (0.001, 0.01, 0.1)
TOP = 0.01


class Case(NamedTuple):
    """A support to encode, and where it comes from."""

    data: str
    support: Support


class Contender(NamedTuple):
    """One codec on one support, ready to be timed."""

    name: str
    encode: Callable[[], object]
    decode: Callable[[], object]
    size_bytes: int


class Row(NamedTuple):
    """What is written for one codec on one support."""

    commit: str
    machine: str
    data: str
    numel: int
    nnz: int
    codec: str
    bytes: int
    bits_per_index: float
    bound_bits: float
    encode_mega_per_s: float
    decode_mega_per_s: float


def cases(folder: Path | None) -> Iterator[Case]:
    for density in UNIFORM_DENSITIES:
        yield Case(f"uniform {density:.1%}", dr.RandomR(density).select(as_source(np.empty(UNIFORM_NUMEL, np.float32)), seed=1))
    for name, flat in recorded(folder):
        yield Case(f"{name} top {TOP:.0%}", dr.TopR(TOP).select(as_source(flat), seed=0))
        nonzero = dr.NonZero().select(as_source(flat), seed=0)
        if not nonzero.is_all:
            yield Case(f"{name} non-zeros", nonzero)


def recorded(folder: Path | None) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Whole models, flattened: those of the package, or those in a folder of npz files."""
    if folder is None:
        models = {name: load(name) for name in NAMES}
    else:
        models = {path.stem: dict(np.load(path)) for path in sorted(folder.glob("*.npz"))}
    for name, tensors in models.items():
        yield name, np.concatenate([tensor.reshape(-1) for tensor in tensors.values()])


def contenders(support: Support) -> list[Contender]:
    space = Space((support.numel,))
    found = []
    for entry in INDEX_STAGE.table:
        if entry.codec.lossless:
            found.append(contender(entry.name, entry.codec(), support, space))
    return [*found, bare_pcodec(support.positions)]


def contender(name: str, codec: dr.IndexCodec, support: Support, space: Space) -> Contender:
    chosen = codec.choose(support, space)
    part, _ = chosen.encode(support, space, 0)
    decoded = chosen.decode(Reader(part), support.nnz, space)
    if not np.array_equal(decoded.positions if isinstance(decoded, Support) else decoded, support.positions):
        raise SystemExit(f"{name} does not give back the positions it was given")
    return Contender(
        name,
        lambda: codec.choose(support, space).encode(support, space, 0),
        lambda: chosen.decode(Reader(part), support.nnz, space),
        len(part),
    )


def bare_pcodec(positions: NDArray[np.int64]) -> Contender:
    gaps, config = np.diff(positions, prepend=-1).astype(np.uint32), ChunkConfig()
    packed = standalone.simple_compress(gaps, config)
    if not np.array_equal(standalone.simple_decompress(packed), gaps):
        raise SystemExit("pcodec does not give back the gaps it was given")
    return Contender(
        "(pcodec)", lambda: standalone.simple_compress(gaps, config), lambda: standalone.simple_decompress(packed), len(packed)
    )


def bound_bits(numel: int, nnz: int) -> float:
    """log2 C(numel, nnz) / nnz: the least for a support of which nothing but its size is known."""
    log_choices = math.lgamma(numel + 1) - math.lgamma(nnz + 1) - math.lgamma(numel - nnz + 1)
    return log_choices / math.log(2) / nnz


def measure(case: Case, repeats: int, commit: str) -> Iterator[Row]:
    found = contenders(case.support)
    encode_seconds = best_of(repeats, {str(number): each.encode for number, each in enumerate(found)}).values()
    decode_seconds = best_of(repeats, {str(number): each.decode for number, each in enumerate(found)}).values()
    numel, nnz = case.support.numel, case.support.nnz
    for each, encoding, decoding in zip(found, encode_seconds, decode_seconds, strict=True):
        yield Row(
            commit=commit,
            machine=f"{platform.machine()} {platform.system()}",
            data=case.data,
            numel=numel,
            nnz=nnz,
            codec=each.name,
            bytes=each.size_bytes,
            bits_per_index=round(8 * each.size_bytes / nnz, 4),
            bound_bits=round(bound_bits(numel, nnz), 4),
            encode_mega_per_s=round(nnz / encoding / 1e6, 1),
            decode_mega_per_s=round(nnz / decoding / 1e6, 1),
        )


def current_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the rows; standard output by default")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--gradients", type=Path, help="folder of npz files, one per model, instead of the gradients of the package")
    arguments = parser.parse_args()
    with open(arguments.out, "w", newline="") if arguments.out else sys.stdout as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        for case in cases(arguments.gradients):
            writer.writerows(measure(case, arguments.repeats, current_commit()))
            file.flush()


if __name__ == "__main__":
    main()
