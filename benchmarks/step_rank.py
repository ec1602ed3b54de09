"""One rank of benchmarks/step.py: the sides take turns in one process group, each with a DDP of its own around the same parameters."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import sent_by_interface
from shapes import MODELS, GivenGradients
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from deepreduce.torch import DeepReduceState, deepreduce_hook, noop_hook

WARM = 4  # DDP builds its buckets anew after the first step, and PowerSGD begins with the third
TRIAL = 60  # more steps than `never_slower` takes to choose

Hook = tuple[Any, Callable[..., Any]]


def hook(side: str, spec: str, model: torch.nn.Module) -> Hook | None:
    """Return the state and the hook of a side; None for plain DDP."""
    if side == "plain DDP":
        return None
    theirs: dict[str, Callable[[], Hook]] = {
        "no communication": lambda: (None, noop_hook),
        "allreduce hook": lambda: (None, default_hooks.allreduce_hook),
        "fp16 hook": lambda: (None, default_hooks.fp16_compress_hook),
        "bf16 hook": lambda: (None, default_hooks.bf16_compress_hook),
        "PowerSGD": lambda: (PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook),
    }
    if side in theirs:
        return theirs[side]()
    topology = "allgather" if side == "never_slower" else side
    return DeepReduceState(spec, topology=topology, never_slower=side == "never_slower", model=model), deepreduce_hook


class Turns:
    """Times steps of one side after another."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.model = GivenGradients(MODELS[job["model"]](), seed=dist.get_rank())
        self.hooks = {side: hook(side, job["spec"], self.model) for side in job["sides"]}
        self.steps = 0

    def turn(self, side: str, steps: int) -> tuple[list[float], int]:
        """Return the seconds of each step, and the bytes that they sent."""
        ddp = DistributedDataParallel(self.model, init_sync=False)
        chosen = self.hooks[side]
        if chosen is not None:
            ddp.register_comm_hook(*chosen)
        for _ in range(WARM):
            self._step(ddp)
        if side == "never_slower":
            self._until_chosen(ddp, chosen)
        dist.barrier()
        sent = sent_by_interface()
        seconds = [self._step(ddp) for _ in range(steps)]
        return seconds, sent_by_interface() - sent

    def _until_chosen(self, ddp: torch.nn.Module, chosen: Any) -> None:
        for _ in range(TRIAL):
            if chosen[0].stats().choice is not None:
                break
            self._step(ddp)

    def _step(self, ddp: torch.nn.Module) -> float:
        self.steps += 1
        self.model.zero_grad()
        start = time.perf_counter()
        ddp(1 + 0.25 * (self.steps % 3)).backward()
        return time.perf_counter() - start

    def choice(self, side: str) -> str:
        """Return what `never_slower` chose, and why."""
        chosen = self.hooks[side]
        return str(chosen[0].stats().choice) if side == "never_slower" and chosen else ""


def main() -> None:
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    turns = Turns(job)
    seconds: dict[str, list[float]] = {side: [] for side in job["sides"]}
    sent = dict.fromkeys(job["sides"], 0)
    for _ in range(job["rounds"]):
        for side in job["sides"]:
            some, sent_bytes = turns.turn(side, job["steps"])
            seconds[side] += some
            sent[side] += sent_bytes
    rows = {side: {"seconds": seconds[side], "sent_bytes": sent[side], "note": turns.choice(side)} for side in job["sides"]}
    dist.barrier()
    print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
