"""The Bloom filter's policies beside `torch.topk` on the same gradient: time, size, error, and the memory of a decode.

usage: python benchmarks/bloom.py [--numel N ...] [--ratio R] [--fpr E] [--repeat K]

Times are of the whole codec (select, index, values, message) and of the index codec alone, the best of several turns in one run. The peak
memory is what a decode needs above the message, in a process of its own (Linux only).
"""

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import best_of

import deepreduce as dr
from deepreduce.reader import Reader
from deepreduce.source import Space, as_source
from deepreduce.tensor import Support

POLICIES = ("p0", "p1", "p2", "leftmost", "naive")
MB = 1e6


def topk(gradient: np.ndarray, count: int) -> dict[str, Callable[[], object]]:
    """The side to compare with, where torch is installed."""
    try:
        import torch
    except ImportError:
        return {}
    tensor = torch.from_numpy(gradient)
    return {"torch.topk": lambda: torch.topk(tensor.abs(), count)}


def checked_sides(codec: dr.DeepReduce, gradient: np.ndarray, selected: Support) -> dict[str, Callable[[], object]]:
    """The four steps to time, after a round trip that has to be right."""
    space = Space(gradient.shape)
    blob = codec.encode(gradient, seed=1)
    part, support = codec.index.encode(selected, space, seed=1)
    seen = codec.index.decode(Reader(part), support.nnz, space).positions
    assert codec.index.slips or np.array_equal(seen, support.positions), "the reader sees another support"
    assert codec.index.slips or np.array_equal(dr.decode(blob)[seen], gradient[seen]), "the values changed"
    return {
        "encode": lambda: codec.encode(gradient, seed=1),
        "decode": lambda: dr.decode(blob),
        "index encode": lambda: codec.index.encode(selected, space, seed=1),
        "index decode": lambda: codec.index.decode(Reader(part), support.nnz, space),
    }


def peak_bytes(blob: bytes, small: bytes) -> int | None:
    """The most memory that decoding this message takes, with the kernels already loaded by decoding a small one."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of_decode, (blob, small))


def _peak_of_decode(blob: bytes, small: bytes) -> int:
    dr.decode(small)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status_bytes("VmRSS")
    dr.decode(blob)
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def row(policy: str, gradient: np.ndarray, args: argparse.Namespace) -> str:
    """One policy, measured."""
    codec = dr.parse(f"topr:{args.ratio}/bloom:{policy},fpr={args.fpr}/raw")
    selected = codec.sparsifier.select(as_source(gradient), 0)
    best = best_of(args.repeat, checked_sides(codec, gradient, selected) | topk(gradient, selected.nnz))
    whole, alone, rival = best["encode"] + best["decode"], best["index encode"] + best["index decode"], best.get("torch.topk")
    blob = codec.encode(gradient, seed=1)
    info, tensor = dr.inspect(blob), dr.decode_sparse(blob)
    hits = np.isin(tensor.indices, selected.positions).sum() / selected.nnz
    missed = np.sum((gradient - tensor.to_dense()) ** 2, dtype=np.float64) / np.sum(gradient**2, dtype=np.float64)
    peak = peak_bytes(blob, codec.encode(gradient[:1000], seed=1))
    beyond = "-" if peak is None else f"{(peak - gradient.nbytes - info.index_bytes) / MB:.1f}"
    ratio = "-" if rival is None else f"{whole / rival:.2f}"
    times = [1000 * seconds for seconds in (best["encode"], best["decode"], alone)]
    return (
        f"{policy:<10}{times[0]:9.1f}{times[1]:9.1f}{times[2]:9.1f}{1000 * (rival or 0):9.1f}{ratio:>8}"
        f"{info.nnz:>10,}{8 * info.index_bytes / selected.nnz:>8.2f}{hits:>9.4f}{missed:>8.4f}{beyond:>9}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--numel", type=int, nargs="+", default=[2_560_000, 25_557_032])
    arguments.add_argument("--ratio", type=float, default=0.01)
    arguments.add_argument("--fpr", type=float, default=0.001)
    arguments.add_argument("--repeat", type=int, default=5)
    args = arguments.parse_args()
    for numel in args.numel:
        gradient = np.random.default_rng(0).standard_normal(numel, np.float32) ** 3
        print(f"{numel:,} float32, {args.ratio:.2%} kept, rate {args.fpr}; times in ms, memory in MB")
        print(
            f"{'policy':<10}{'encode':>9}{'decode':>9}{'index':>9}{'topk':>9}{'ratio':>8}"
            f"{'sent':>10}{'bits':>8}{'overlap':>9}{'error':>8}{'memory':>9}"
        )
        for policy in POLICIES:
            print(row(policy, gradient, args), flush=True)
    print(
        "index: encode and decode of the index codec alone. ratio: whole encode + decode / topk. bits: of the index section, each kept "
        "position.\noverlap: share of the kept positions that are sent. error: squared, relative. memory: peak of decode beyond its output "
        "and the filter."
    )


if __name__ == "__main__":
    main()
