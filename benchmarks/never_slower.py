"""`never_slower` on a link that has no limit, and then has one: beside plain DDP before, and how soon it changes to the spec after.

usage: python benchmarks/never_slower.py [--model M] [--rate RATE] [--steps K]

Two ranks. First, plain DDP and `never_slower` take turns in one process group, K steps each, on links without a limit. Then the links of a
run of `never_slower` get a limit in the middle of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from statistics import median
from typing import Any

from ranks import results, run, started
from shapes import MODELS

from deepreduce.lab.train.links import shaped_links

SPEC = "topr:0.01/rice/qsgd"
BEFORE = 40  # steps until the link changes: a trial, and some that go by its choice
AFTER = 50


def turns(model: str, steps: int) -> None:
    """Print the median of plain DDP, of torch's own hook for a plain allreduce, and of `never_slower`, in turns of twenty steps."""
    sides = ["plain DDP", "allreduce hook", "never_slower"]
    job = {"model": model, "spec": SPEC, "sides": sides, "steps": 20, "rounds": -(-steps // 20)}
    with shaped_links(2, None) as hosts:
        found = run(hosts, "step_rank.py", job)
    times = {side: [max(step) for step in zip(*(each[side]["seconds"] for each in found), strict=True)] for side in sides}
    for side, seconds in times.items():
        of_plain = median(seconds) / median(times["plain DDP"])
        ms = f"median {1000 * median(seconds):8.1f} ms, best {1000 * min(seconds):8.1f} ms"
        print(f"{side:15} {ms}, {of_plain:.3f} of plain DDP, {len(seconds)} steps")
    print(found[0]["never_slower"]["note"])


def drop(model: str, rate: str) -> None:
    """Print when `never_slower` changes after a link got a limit."""
    with shaped_links(2, None) as hosts, started(hosts, "never_slower.py", {"model": model, "before": BEFORE, "after": AFTER}) as ranks:
        output = ranks[0][0].stdout
        assert output is not None
        if output.readline().strip() == "ready":
            for host in hosts:
                host.limit(rate)
        before, after = results(ranks)[0]
    print(f"\nwithout a limit: {before}\nat {rate}, from step {BEFORE} on: {after}")


def rank(job: dict[str, Any]) -> list[str]:
    """Train, say when the link may change, and return what was chosen before and after."""
    import torch.distributed as dist
    from shapes import GivenGradients
    from torch.nn.parallel import DistributedDataParallel

    from deepreduce.torch import DeepReduceState, deepreduce_hook

    dist.init_process_group("gloo")
    model = GivenGradients(MODELS[job["model"]](), seed=dist.get_rank())
    state, ddp = DeepReduceState(SPEC, never_slower=True, model=model), DistributedDataParallel(model)
    ddp.register_comm_hook(state, deepreduce_hook)

    def train(steps: int) -> str:
        for step in range(steps):
            model.zero_grad()
            ddp(1 + 0.25 * (step % 3)).backward()
        return str(state.stats().choice)

    before = train(job["before"])
    dist.barrier()
    if dist.get_rank() == 0:
        print("ready", flush=True)
        time.sleep(1)
    dist.barrier()
    after = train(job["after"])
    dist.barrier()
    return [before, after]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=200, help="of each side, in turns (200); 0 for the change alone")
    args = parser.parse_args()
    if args.steps:
        turns(args.model, args.steps)
    drop(args.model, args.rate)


if __name__ == "__main__":
    if "RANK" in os.environ:
        print(json.dumps(rank(json.loads(sys.argv[1]))))
    else:
        main()
