"""Seconds per step of a GPT under FSDP2 on two nodes of two processes, over a real 100 Mbit/s link between the nodes.

A node is a network namespace on a shaped link (`deepreduce.lab.train.links`); its two processes reach each other without crossing it.
Native HSDP, a 2-D mesh, is compared with `compress_fsdp`, and with no exchange between nodes at all: how fast a step would be on an
infinitely fast network. The three take turns in the same four processes, with the same batches. Each node has its share of the cores, as
workers of `deepreduce train` do. A step counts as long as it took the slowest process. Needs Linux and iproute2.

    python benchmarks/hsdp_link.py
    python benchmarks/hsdp_link.py --width 768 --layers 12 --rate 1gbit
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from ranks import run, sent_by_interface

from deepreduce.cores import usable_cores
from deepreduce.lab.train.launcher import only_on, share
from deepreduce.lab.train.links import shaped_links

NATIVE, NOTHING = "native HSDP", "no exchange"
NODES, PER_NODE, VOCABULARY, LENGTH, ROWS = 2, 2, 1024, 32, 1


# One rank


def gpt(width: int, layers: int) -> Any:
    import torch
    from torch import nn

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
            options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, width // 64, 4 * width, **options) for _ in range(layers))
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, tokens: Any) -> Any:
            """Return the loss of predicting each token from those before it."""
            hidden = self.words(tokens[:, :-1]) + self.places(torch.arange(LENGTH))
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            for block in self.blocks:
                hidden = block(hidden, src_mask=mask, is_causal=True)
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    return Gpt()


class Side:
    """One way to train: native HSDP, no exchange between nodes, or a spec."""

    def __init__(self, way: str, mesh: Any, job: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from deepreduce.torch import DeepReduceState, compress_fsdp

        torch.manual_seed(0)
        self.model = gpt(job["width"], job["layers"])
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for module in [*self.model.blocks, self.model]:
            fully_shard(module, mesh=mesh if way == NATIVE else mesh["shard"], reshard_after_forward=False)
        if way not in (NATIVE, NOTHING):
            compress_fsdp(self.model, DeepReduceState(way, process_group=mesh["replicate"].get_group()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(dist.get_rank())
        self.seconds: list[float] = []
        self.sent_bytes = 0

    def step(self) -> float:
        """Return the seconds of a step."""
        import torch

        start = time.perf_counter()
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=self.data)
        self.optimizer.zero_grad()
        self.model(tokens).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def turn(self, steps: int) -> None:
        """Time some steps, after one that is not counted."""
        import torch.distributed as dist

        self.step()
        dist.barrier()
        before = sent_by_interface()
        self.seconds += [self.step() for _ in range(steps)]
        dist.barrier()
        self.sent_bytes += sent_by_interface() - before


def train(job: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("replicate", "shard"))
    sides = {way: Side(way, mesh, job) for way in job["ways"]}
    for side in sides.values():
        side.turn(2)
        side.seconds, side.sent_bytes = [], 0
    for _ in range(job["rounds"]):
        for side in sides.values():
            side.turn(job["steps"])
    dist.destroy_process_group()
    return {way: {"seconds": side.seconds, "sent_bytes": side.sent_bytes, "parameters": side.parameters} for way, side in sides.items()}


# The table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3, help="in how many all sides take their turn")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--spec", default="topr:0.01/rice/qsgd")
    options = parser.parse_args()
    ways = [NATIVE, NOTHING, options.spec]
    job = {"ways": ways, "rounds": options.rounds, "steps": options.steps, "width": options.width, "layers": options.layers}
    with shaped_links(NODES, options.rate) as hosts:
        ranks = run([host for host in hosts for _ in range(PER_NODE)], "hsdp_link.py", job)
    print(f"{ranks[0][NATIVE]['parameters']:,} parameters, {NODES} nodes of {PER_NODE} processes, {options.rate} between nodes")
    print(f"{'':24} {'ms/step':>9} {'best':>9} {'speed-up':>9} {'of best':>8} {'bytes per node and step':>24}")
    native: tuple[float, float] | None = None
    for way in ways:
        seconds = [max(each) for each in zip(*(rank[way]["seconds"] for rank in ranks), strict=True)]
        median, best = statistics.median(seconds), min(seconds)
        native = native or (median, best)
        sent = max(rank[way]["sent_bytes"] for rank in ranks) / len(seconds)
        faster = f"{native[0] / median:8.1f}x {native[1] / best:7.1f}x"
        print(f"{way:24} {1000 * median:9.1f} {1000 * best:9.1f} {faster} {sent:24,.0f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        with only_on(share(usable_cores(), int(os.environ["RANK"]) // PER_NODE, NODES)):
            print(json.dumps(train(json.loads(sys.argv[1]))))
    else:
        main()
