"""Seconds a step of a GPT under FSDP2 on two nodes of two processes, over a real 100 Mbit/s link between the nodes.

A node is a network namespace on a shaped link (`deepreduce.lab.train.links`); its two processes reach each other without crossing it.
Native HSDP, a 2-D mesh, is compared with `compress_fsdp`, and with no exchange between nodes at all: how fast a step would be on an
infinitely fast network. Needs Linux and iproute2.

    python benchmarks/hsdp_link.py
    python benchmarks/hsdp_link.py --width 768 --layers 12 --rate 1gbit
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from deepreduce.lab.train.links import Host, shaped_links

NATIVE, NOTHING = "native HSDP", "no exchange"
NODES, PER_NODE, VOCABULARY, LENGTH, ROWS = 2, 2, 1024, 32, 1


def run(hosts: list[Host], job: dict[str, Any], timeout: float = 600) -> list[dict[str, float]]:
    """Two ranks in every namespace; what each of them printed at its end."""
    ranks = []
    for rank in range(NODES * PER_NODE):
        host = hosts[rank // PER_NODE]
        place = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "RANK": str(rank), "WORLD_SIZE": str(NODES * PER_NODE)}
        environment = os.environ | place | {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
        command = host.command([sys.executable, str(Path(__file__).resolve()), "--job", json.dumps(job)])
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        end = time.monotonic() + timeout
        outputs = [rank.communicate(timeout=max(1.0, end - time.monotonic()))[0] for rank in ranks]
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
        if failed:
            raise SystemExit(f"ranks {failed} failed at {job}")
        return [json.loads(output.splitlines()[-1]) for output in outputs]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


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


def sent_bytes() -> int:
    """Bytes that left this namespace so far, by the interface of gloo."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return int(counts[os.environ["GLOO_SOCKET_IFNAME"]][8])


def train(job: dict[str, Any]) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from deepreduce.torch import DeepReduceState, compress_fsdp

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = gpt(job["width"], job["layers"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("replicate", "shard"))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh if job["way"] == NATIVE else mesh["shard"], reshard_after_forward=False)
    state = None
    if job["way"] not in (NATIVE, NOTHING):
        state = DeepReduceState(job["way"], process_group=mesh["replicate"].get_group())
        compress_fsdp(model, state)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=data)
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    for _ in range(3):
        step()
    dist.barrier()
    before, seconds = sent_bytes(), []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    row = {"median": sorted(seconds)[len(seconds) // 2], "best": min(seconds), "parameters": parameters}
    row["interface_bytes"] = (sent_bytes() - before) / job["steps"]
    row["ratio"] = state.stats().last.ratio if state else 1.0
    dist.destroy_process_group()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--spec", default="topr:0.01/rice/qsgd")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exit cleans up, the default does not
    if options.job:
        print(json.dumps(train(json.loads(options.job))))
        return
    first: float | None = None
    for way in (NATIVE, NOTHING, options.spec):
        with shaped_links(NODES, options.rate) as hosts:
            job = {"way": way, "steps": options.steps, "width": options.width, "layers": options.layers}
            rows = run(hosts, job)
        median, best = (max(row[key] for row in rows) for key in ("median", "best"))
        if first is None:
            first = median
            print(f"{rows[0]['parameters']:,.0f} parameters, {NODES} nodes of {PER_NODE} processes, {options.rate} between nodes")
            print(f"{'':24} {'ms/step':>9} {'best':>9} {'speed-up':>9} {'bytes per node and step':>24}")
        sent = max(row["interface_bytes"] for row in rows)
        print(f"{way:24} {1000 * median:9.1f} {1000 * best:9.1f} {first / median:8.1f}x {sent:24,.0f}", flush=True)


if __name__ == "__main__":
    main()
