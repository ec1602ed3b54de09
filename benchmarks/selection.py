"""`topr` beside `torch.topk`: the same elements, side by side in one run.

usage: python benchmarks/selection.py [--numel N] [--ratio R] [--repeat K]
"""

import argparse

import numpy as np
import torch
from turns import best_of

from deepreduce.source import DenseSource


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--numel", type=int, default=25_557_032)
    arguments.add_argument("--ratio", type=float, default=0.01)
    arguments.add_argument("--repeat", type=int, default=5)
    args = arguments.parse_args()
    gradient = np.random.default_rng(0).standard_normal(args.numel, np.float32)
    tensor, count = torch.from_numpy(gradient), round(args.ratio * args.numel)

    def ours() -> tuple[np.ndarray, np.ndarray]:
        source = DenseSource(gradient)
        support = source.top(count)
        return support.positions, source.gather(support)

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.topk(tensor.abs(), count).indices
        return positions, tensor[positions]

    assert np.array_equal(ours()[0], np.sort(theirs()[0].numpy())), "not the same elements"
    best = best_of(args.repeat, {"topr": ours, "torch.topk": theirs})
    print(f"{args.numel:,} float32, {count:,} selected, torch with {torch.get_num_threads()} threads")
    for name, seconds in best.items():
        print(f"  {name:<12}{1000 * seconds:8.1f} ms")
    print(f"  {best['torch.topk'] / best['topr']:.1f} times faster")


if __name__ == "__main__":
    main()
