"""What a tensor costs in a whole step of one rank, by the number of tensors: small models have many tensors of few elements.

usage: python benchmarks/batch.py [--numel N] [--counts A B ...] [--spec SPEC] [--repeat K]
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from one_rank import OneRank, in_turns


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--numel", type=int, default=2048)
    arguments.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100, 1000])
    arguments.add_argument("--spec", default="topr:0.01/rice/qsgd")
    arguments.add_argument("--repeat", type=int, default=20)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    sides = [OneRank([(args.numel,)] * count, args.spec) for count in args.counts]
    print(f"{args.spec}, error feedback, tensors of {args.numel:,} elements, one rank, one thread, {args.repeat} steps\n")
    print("| tensors | µs per tensor, median | best |")
    print("|---:|---:|---:|")
    for count, seconds in zip(args.counts, in_turns(args.repeat, *sides), strict=True):
        print(f"| {count:,} | {1e6 * median(seconds) / count:.1f} | {1e6 * min(seconds) / count:.1f} |")


if __name__ == "__main__":
    main()
