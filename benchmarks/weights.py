"""Differences of weights beside what other projects send: bits per changed weight, and speed.

    python benchmarks/weights.py [--data FOLDER] [--out weights.csv] [--repeats 5] [--speed-only | --sizes-only] [--cpu-time]

The data come from real training (`weights_data.py`, about ten minutes on one core at the first run, then kept in FOLDER). Every round
trip is checked before anything is timed; the sides take turns, and the best time of each counts. Needs the zstandard package; bsdiff4, z4ai
and the zstd program are used where they are installed.

The peers are their formats, written in a few lines of numpy each: `vllm` (also verl and vime) is int32 positions and new values, `slime`
(also miles and SkyRL) is XOR and zstd level 1, `nemo-rl` is uint16 gaps and XOR values with zstd level 1, `pcodec` is gaps and int16 steps
by pcodec. They check no weights; ours are timed with all their checks.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone
from turns import best_of
from weights_data import Weights, pairs

from deepreduce import weights

Patterns = NDArray[np.uint16]
LARGE = 33_554_432
SPEED_PAIRS = ("1%", "2.5%")


class Side(NamedTuple):
    """One way to send the difference of two flat arrays."""

    name: str
    encode: Callable[[], Any]
    decode: Callable[[Any], Patterns]
    size_bytes: Callable[[Any], int]


def ordered(bits: Patterns) -> NDArray[np.int32]:
    """Integers in the order of the bfloat16 values."""
    wide = bits.astype(np.int32)
    return np.where(wide & 0x8000, -(wide & 0x7FFF) - 1, wide)


def order0_bits(old: Patterns, new: Patterns) -> float:
    """Bits per change: positions given their density, steps by their frequencies."""
    changed = old != new
    density = changed.mean()
    counts = np.unique(ordered(new[changed]) - ordered(old[changed]), return_counts=True)[1]
    share = counts / counts.sum()
    return float(-np.log2(density) - (1 - density) / density * np.log2(1 - density) - (share * np.log2(share)).sum())


# The peers


def vllm_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    positions = np.flatnonzero(old != new).astype(np.int32)
    return positions, new[positions]


def vllm_decode(old: Patterns, parts: tuple[Any, ...]) -> Patterns:
    out = old.copy()
    out[parts[0]] = parts[1]
    return out


def slime_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    return (zstandard.ZstdCompressor(1).compress(old ^ new),)


def slime_decode(old: Patterns, parts: tuple[Any, ...]) -> Patterns:
    return old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(parts[0]), np.uint16)


def nemo_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    """Gaps above 65534 are cut by entries that change nothing."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1) - 1
    repeats = gaps // 65535 + 1
    wide = np.full(int(repeats.sum()), 65535, np.uint16)
    wide[np.cumsum(repeats) - 1] = gaps % 65535
    xors = np.zeros(wide.size, np.uint16)
    xors[np.cumsum(repeats) - 1] = old[positions] ^ new[positions]
    compressor = zstandard.ZstdCompressor(1)
    return compressor.compress(wide), compressor.compress(xors)


def nemo_decode(old: Patterns, parts: tuple[Any, ...]) -> Patterns:
    gaps, xors = (np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint16) for part in parts)
    real = gaps != 65535
    positions = (np.cumsum(gaps.astype(np.int64) + real) - 1)[real]
    out = old.copy()
    out[positions] ^= xors[real]
    return out


def pcodec_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1).astype(np.uint32)
    steps = (ordered(new[positions]) - ordered(old[positions])).astype(np.int16)
    return standalone.simple_compress(gaps, ChunkConfig()), standalone.simple_compress(steps, ChunkConfig())


def pcodec_decode(old: Patterns, parts: tuple[Any, ...]) -> Patterns:
    gaps, steps = (standalone.simple_decompress(part) for part in parts)
    positions = np.cumsum(gaps.astype(np.int64)) - 1
    keys = ordered(old[positions]) + steps
    out = old.copy()
    out[positions] = np.where(keys < 0, -keys - 1 | 0x8000, keys).astype(np.uint16)
    return out


def patch_from_encode(old: Patterns, new: Patterns) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "old").write_bytes(old.tobytes())
        Path(folder, "new").write_bytes(new.tobytes())
        subprocess.run(["zstd", "-q", "-3", "--long=27", "--patch-from=old", "new", "-o", "patch"], cwd=folder, check=True)
        return Path(folder, "patch").read_bytes()


def patch_from_decode(old: Patterns, patch: bytes) -> Patterns:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "old").write_bytes(old.tobytes())
        Path(folder, "patch").write_bytes(patch)
        subprocess.run(["zstd", "-q", "-d", "--long=27", "--patch-from=old", "patch", "-o", "new"], cwd=folder, check=True)
        return np.fromfile(Path(folder, "new"), np.uint16)


def parts_bytes(parts: tuple[Any, ...]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def peer(name: str, encode: Any, decode: Any, old: Patterns, new: Patterns) -> Side:
    return Side(name, partial(encode, old, new), partial(decode, old), parts_bytes)


def peers(old: Patterns, new: Patterns, slow: bool) -> Iterator[Side]:
    yield peer("vllm", vllm_encode, vllm_decode, old, new)
    yield peer("slime", slime_encode, slime_decode, old, new)
    yield peer("nemo-rl", nemo_encode, nemo_decode, old, new)
    yield peer("pcodec", pcodec_encode, pcodec_decode, old, new)
    if slow and shutil.which("zstd"):
        yield Side("zstd --patch-from", partial(patch_from_encode, old, new), partial(patch_from_decode, old), len)
    if slow and find_spec("z4ai"):
        import z4ai

        yield Side(
            "z4ai",
            lambda: z4ai.compress_delta(new.tobytes(), old.tobytes(), dtype="bf16"),
            lambda patch: np.frombuffer(z4ai.decompress_delta(patch, old.tobytes()), np.uint16),
            len,
        )
    if slow and find_spec("bsdiff4"):
        import bsdiff4

        yield Side(
            "bsdiff4",
            lambda: bsdiff4.diff(old.tobytes(), new.tobytes()),
            lambda patch: np.frombuffer(bsdiff4.patch(old.tobytes(), patch), np.uint16),
            len,
        )


# Ours


def as_weights(tensors: Weights) -> dict[str, NDArray[Any]]:
    return {name: array.view(ml_dtypes.bfloat16) for name, array in tensors.items()}


def sizes(folder: Path) -> Iterator[dict[str, object]]:
    """Bits per changed weight of whole models."""
    for name, old, new in pairs(folder):
        flat_old, flat_new = (np.concatenate([array.ravel() for array in tensors.values()]) for tensors in (old, new))
        changed = int(np.count_nonzero(flat_old != flat_new))
        base = {"what": "size", "data": name, "changed": f"{changed / flat_old.size:.4f}"}
        yield base | {"side": "order-0 entropy", "bits": f"{order0_bits(flat_old, flat_new):.3f}"}
        for side in peers(flat_old, flat_new, slow=True):
            parts = side.encode()
            assert np.array_equal(side.decode(parts), flat_new), side.name
            yield base | {"side": side.name, "bits": f"{8 * side.size_bytes(parts) / changed:.3f}"}
        for mode in ("portable", "conditional"):
            patch = weights.diff(as_weights(old), as_weights(new), mode=mode)
            result = weights.apply(as_weights(old), patch)
            assert all(np.array_equal(result[key].view(np.uint16), new[key]) for key in new)
            yield base | {"side": f"deepreduce {mode}", "bits": f"{8 * len(patch) / changed:.3f}"}


def large(old: Weights, new: Weights) -> tuple[Patterns, Patterns]:
    """The weights of a model over and over, up to the size of a large tensor."""
    flat = [np.concatenate([array.ravel() for array in tensors.values()]) for tensors in (old, new)]
    return np.resize(flat[0], LARGE), np.resize(flat[1], LARGE)


def speeds(folder: Path, repeats: int, cpu_time: bool) -> Iterator[dict[str, object]]:
    """GB of dense bfloat16 per second, on one tensor of 33M weights; with `cpu_time`, per second of the processor, one thread only."""
    clock, thread_counts = (time.process_time, (1,)) if cpu_time else (time.perf_counter, (1, 2))
    for name, old, new in pairs(folder):
        if name not in SPEED_PAIRS:
            continue
        before, after = large(old, new)
        changed = float((before != after).mean())
        encoders: dict[str, Callable[[], object]] = {}
        decoders: dict[str, Callable[[], object]] = {}
        for side in peers(before, after, slow=False):
            encoders[side.name] = side.encode
            decoders[side.name] = partial(side.decode, side.encode())
        pair = {"w": before.view(ml_dtypes.bfloat16)}, {"w": after.view(ml_dtypes.bfloat16)}
        for mode in ("portable", "conditional"):
            there, back = weights.diff(*pair, mode=mode), weights.diff(*reversed(pair), mode=mode)
            for threads in thread_counts:
                side_name = f"deepreduce {mode}, {threads} thread(s)"
                encoders[side_name] = partial(weights.diff, *pair, mode=mode, threads=threads)
                decoders[side_name] = there_and_back(pair[0], there, back, threads)
        encoders["deepreduce, unchanged"] = partial(weights.diff, pair[0], {"w": pair[0]["w"].copy()}, threads=1)
        seconds = best_of(repeats, encoders, clock), best_of(repeats, decoders, clock)
        for side_name in encoders:
            trips = 2 if side_name.startswith("deepreduce ") else 1
            decode = f"{trips * before.nbytes / seconds[1][side_name] / 1e9:.2f}" if side_name in decoders else ""
            encode = f"{before.nbytes / seconds[0][side_name] / 1e9:.2f}"
            yield {
                "what": "speed",
                "data": name,
                "changed": f"{changed:.4f}",
                "side": side_name,
                "encode GB/s": encode,
                "decode GB/s": decode,
            }


def there_and_back(base: dict[str, NDArray[Any]], there: bytes, back: bytes, threads: int) -> Callable[[], object]:
    """Apply a patch in place, and the one that undoes it: two decodings of the same size."""
    tensors = {"w": base["w"].copy()}

    def run() -> None:
        weights.apply_(tensors, there, threads=threads)
        weights.apply_(tensors, back, threads=threads)

    run()
    assert np.array_equal(tensors["w"].view(np.uint16), base["w"].view(np.uint16))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/weights-data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--sizes-only", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor: for machines with other work; one thread only")
    args = parser.parse_args()
    columns = ["what", "data", "changed", "side", "bits", "encode GB/s", "decode GB/s"]
    with args.out.open("w", newline="") if args.out else sys.stdout as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for rows in ([] if args.speed_only else [sizes(args.data)]) + (
            [] if args.sizes_only else [speeds(args.data, args.repeats, args.cpu_time)]
        ):
            for row in rows:
                writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()
