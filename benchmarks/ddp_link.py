"""Seconds a training step over a real 100 Mbit/s link, and the bytes that the network interface counts.

Every rank of a DDP training runs in a network namespace of its own on a shaped link (`deepreduce.lab.train.links`), so every byte between
them crosses it. Needs Linux and iproute2; no root where users may make namespaces.

    python benchmarks/ddp_link.py                          # all rows: over the link, and over an unshaped one for the overhead
    python benchmarks/ddp_link.py --spec topr:0.01/rice/qsgd --topology sharded
    python benchmarks/ddp_link.py --ranks 2 4 8            # bytes a rank against the ranks, on links without a limit
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from ranks import run, sent_by_interface

from deepreduce.lab.train.links import shaped_links

ROWS = [
    ("plain DDP", None, "dense"),
    ("dense, no network", "noop", "allgather"),
    ("none/all/raw", "none/all/raw", "allgather"),
    ("topr:0.01/raw/raw", "topr:0.01/raw/raw", "allgather"),
    ("topr:0.01/rice/qsgd", "topr:0.01/rice/qsgd", "allgather"),
    ("the same, never_slower", "topr:0.01/rice/qsgd", "never_slower"),
    ("topr:0.01/rice/qsgd", "topr:0.01/rice/qsgd", "server"),
    ("topr:0.01/rice/qsgd", "topr:0.01/rice/qsgd", "sharded"),
]


def train(job: dict[str, object]) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from deepreduce.torch import DeepReduceState, deepreduce_hook, noop_hook

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = int(str(job["width"]))
    layers = [torch.nn.Linear(width, width) for _ in range(int(str(job["layers"])))]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
    ddp = DistributedDataParallel(model)
    state = None
    if job["spec"] == "noop":
        ddp.register_comm_hook(None, noop_hook)
    elif job["spec"]:
        cautious = job["topology"] == "never_slower"
        state = DeepReduceState(str(job["spec"]), topology="allgather" if cautious else str(job["topology"]), never_slower=cautious)
        ddp.register_comm_hook(state, deepreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(16, width, generator=data)).square().mean().backward()
        optimizer.step()

    warm, steps = 24, int(str(job["steps"]))  # a trial of `never_slower` takes up to 24
    for _ in range(warm):
        step()
    dist.barrier()
    before, counted, seconds = sent_by_interface(), state.stats().sent_bytes if state else 0, []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    row = {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "best": min(seconds),
        "interface_bytes": (sent_by_interface() - before) / steps,
        "counted_bytes": ((state.stats().sent_bytes if state else 0) - counted) / steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if state:
        last = state.stats().last
        row |= {"encode": last.encode_seconds, "exchange": last.exchange_seconds, "decode": last.decode_seconds, "ratio": last.ratio}
    dist.barrier()
    dist.destroy_process_group()
    return row


# The tables


def compare(rows: list[tuple[str, str | None, str]], rate: str | None, steps: int, width: int) -> None:
    link = f"link of {rate}" if rate else "link without a limit"
    print(f"\n2 ranks, {6 * width * (width + 1):,} parameters, {link}, median and best of {steps} steps")
    columns = f"{'ms/step':>9} {'best':>8} {'speed-up':>9} {'of best':>8} {'bytes sent':>12} {'interface':>12}"
    print(f"{'spec':24} {'topology':10} {columns}   encode/exchange/decode ms")
    dense: tuple[float, float] | None = None
    for title, spec, topology in rows:
        with shaped_links(2, rate) as hosts:
            results = run(hosts, "ddp_link.py", {"spec": spec, "topology": topology, "steps": steps, "width": width, "layers": 6})
        seconds = max(row["seconds"] for row in results)
        best = max(row["best"] for row in results)
        dense = dense or (seconds, best)
        parts = "/".join(f"{1000 * results[0][part]:.0f}" for part in ("encode", "exchange", "decode") if part in results[0])
        counted, interface = (max(row[key] for row in results) for key in ("counted_bytes", "interface_bytes"))
        speed = f"{1000 * seconds:9.1f} {1000 * best:8.1f} {dense[0] / seconds:8.1f}x {dense[1] / best:7.1f}x"
        print(f"{title:24} {topology:10} {speed} {counted:12,.0f} {interface:12,.0f}   {parts}", flush=True)


def volumes(ranks: list[int], spec: str, topologies: list[str], steps: int, width: int) -> None:
    print(f"\nbytes a rank and step, {6 * width * (width + 1):,} parameters, {spec}")
    print("counted, and what the interface sent with all headers of the network")
    for topology in topologies:
        for count in ranks:
            with shaped_links(count, None) as hosts:
                results = run(hosts, "ddp_link.py", {"spec": spec, "topology": topology, "steps": steps, "width": width, "layers": 6})
            counted, interface = (sum(row[key] for row in results) / count for key in ("counted_bytes", "interface_bytes"))
            print(f"{topology:10} {count} ranks {counted:12,.0f} counted {interface:12,.0f} on the interface", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=645, help="of the six layers: 645 makes 2.5 million parameters, 1800 makes 19.5")
    parser.add_argument("--spec", help="compare this one with plain DDP only")
    parser.add_argument("--topology", help="of --spec (allgather), or the only one to measure bytes for")
    parser.add_argument("--ranks", type=int, nargs="+", help="measure bytes against the number of ranks instead")
    options = parser.parse_args()
    if options.ranks:
        topologies = [options.topology] if options.topology else ["allgather", "server", "sharded"]
        volumes(options.ranks, options.spec or "topr:0.01/rice/qsgd", topologies, options.steps, options.width)
    else:
        rows = [ROWS[0], (options.spec, options.spec, options.topology or "allgather")] if options.spec else ROWS
        for rate in (options.rate, None):
            compare(rows, rate, options.steps, options.width)


if __name__ == "__main__":
    if "RANK" in os.environ:
        print(json.dumps(train(json.loads(sys.argv[1]))))
    else:
        main()
