"""One worker that trains with PyTorch's DistributedDataParallel; see `contract`."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ..torch import DeepReduceState, StepStats
from ..torch.topology import TOPOLOGIES
from . import torch_models
from .batches import Batch, Data
from .contract import Emit, Plan, Record, Throttle, evaluation_steps, serve
from .tasks import Task, read_data, task_of
from .torch_probe import Probe, Watched

_WARM_UP_STEPS = 3
_TOP = 10
_CURVE_POINTS = 200
_PROBED_STEP = 5
_BUCKET_MB = 25  # also of the first bucket when it is given: these models then go in one, and the parts of a step can be told apart


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    with _process_group():
        data = _read(plan)
        per_epoch = data.steps_per_epoch(plan.workers, plan.batch)
        steps = plan.steps or plan.epochs * per_epoch
        say = emit if dist.get_rank() == 0 else _silent
        size = torch_models.parameter_count(torch_models.build(plan.model, data, plan.seed))
        say({"event": "ready", "parameters": size, "steps": steps, "steps_per_epoch": per_epoch})
        for spec in plan.specs:
            Run(plan, spec, data, _WARM_UP_STEPS, _silent).warm_up()
            say(Run(plan, spec, data, steps, say).go().to_event())


@contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _read(plan: Plan) -> Data:
    return read_data(plan.task, Path(plan.data) if plan.data else None, plan.seed, plan.negatives)


def _silent(event: dict[str, Any]) -> None:
    """Not rank 0."""


@dataclass
class Ledger:
    """What every step cost this rank."""

    total: float = 0.0
    forward_backward: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    message_bytes: int = 0
    dense_bytes: int = 0
    wire_bytes: int = 0

    def add(self, seconds: float, exposed: float, step: StepStats) -> None:
        """Count one step, of which `exposed` seconds passed after the backward pass had nothing left to compute."""
        self.total += seconds
        self.forward_backward += seconds - exposed
        self.encode += step.encode_seconds
        self.decode += step.decode_seconds
        self.message_bytes += step.message_bytes
        self.dense_bytes += step.dense_bytes
        self.wire_bytes += step.sent_bytes

    def seconds(self, exchanges_here: Sequence[float]) -> dict[str, float]:
        """The parts, over all ranks. The rank that comes last to an exchange waits for nobody: its time is the network's."""
        exchanges = np.array(_gathered(exchanges_here))
        communication = float(exchanges.min(0).sum())
        return {
            "total": self.total,
            "forward_backward": self.forward_backward,
            "encode": self.encode,
            "decode": self.decode,
            "communication": communication,
            "waiting": float(exchanges[dist.get_rank()].sum()) - communication,
        }


class Run:
    """One spec, trained from the initial weights of the plan's seed."""

    def __init__(self, plan: Plan, spec: str, data: Data, steps: int, emit: Emit) -> None:
        self.plan, self.spec, self.data, self.steps, self._emit = plan, spec, data, steps, emit
        self.task: Task = task_of(plan.task)
        self.model = torch_models.build(plan.model, data, plan.seed)
        self.parallel = DistributedDataParallel(self.model, broadcast_buffers=False, bucket_cap_mb=_BUCKET_MB)
        self.watched = None if spec == "dense" else Watched(TOPOLOGIES[plan.topology](), paced=plan.link is not None)
        self.state = DeepReduceState(
            spec,
            topology=self.watched or "dense",
            memory=plan.memory,  # type: ignore[arg-type]
            small_tensor_numel=plan.small,
            model=self.model,
            seed=plan.seed,
        )
        self.probe = Probe(min(_PROBED_STEP, steps - 1))
        self.parallel.register_comm_hook(self.state, self.probe.hook)
        self.optimizer = _optimizer(self.model, self.task, plan.learning_rate)
        self.ledger = Ledger()
        self.losses: list[tuple[int, float]] = []
        self.curve: list[dict[str, float]] = []

    def warm_up(self) -> None:
        """Take the steps and forget them: what is compiled at first use is compiled then, and not while others are measured."""
        for number, batch in self._batches():
            self._step(number, batch)

    def go(self) -> Record:
        """Train, measure quality now and then, and sum up."""
        measured = evaluation_steps(self.steps, self.plan.evaluations)
        throttle = Throttle()
        identical = True
        for number, batch in self._batches():
            loss = self._step(number, batch)
            if number % max(1, self.steps // _CURVE_POINTS) == 0 or number == self.steps:
                self.losses.append((number, loss))
            if throttle.ready():
                self._emit({"event": "step", "spec": self.spec, "step": number, "loss": loss})
            if number in measured:
                self._evaluate(number, loss)
                identical = identical and _identical(self.model)
        return self._record(identical)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        batches = self.data.train_batches(dist.get_rank(), self.plan.workers, self.plan.batch, self.plan.seed)
        return enumerate(itertools.islice(batches, self.steps), start=1)

    def _step(self, number: int, batch: Batch) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * _schedule(number / self.steps)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self._loss([torch.from_numpy(array) for array in batch])
        loss.backward()  # type: ignore[no-untyped-call]
        exposed = time.perf_counter() - self.probe.ready_at
        self.optimizer.step()
        self.ledger.add(time.perf_counter() - start, exposed, self.state.stats().last)
        return float(loss.detach())

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        scores = self.parallel(*batch[:-1])
        if self.task.kind == "ranking":
            return functional.binary_cross_entropy_with_logits(scores, batch[-1])
        return functional.cross_entropy(scores, batch[-1])

    @torch.no_grad()
    def _evaluate(self, step: int, loss: float) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        self.model.eval()
        right, seen = 0, 0
        for batch in self.data.test_batches(dist.get_rank(), self.plan.workers):
            right += self._right([torch.from_numpy(array) for array in batch])
            seen += len(batch[0])
        self.model.train()
        counts = torch.tensor([right, seen])
        dist.all_reduce(counts)
        quality = float(counts[0] / counts[1])
        point = {"step": step, "loss": loss, "quality": quality, "bytes_sent": self.ledger.message_bytes, "seconds": self.ledger.total}
        self.curve.append(point)
        self._emit({"event": "evaluation", "spec": self.spec, "step": step, "quality": quality})

    def _right(self, batch: Sequence[Tensor]) -> int:
        if self.task.kind == "ranking":
            users, items = batch
            scores = self.model(users[:, None].expand_as(items), items)
            return int(((scores[:, 1:] >= scores[:, :1]).sum(1) < _TOP).sum())
        images, labels = batch
        return int((self.model(images).argmax(1) == labels).sum())

    def _record(self, identical: bool) -> Record:
        qualities = [point["quality"] for point in self.curve]
        ledger = self.ledger
        return Record(
            spec=self.spec,
            metric=self.task.metric,
            quality=qualities[-1],
            best_quality=max(qualities),
            parameters=torch_models.parameter_count(self.model),
            steps=self.steps,
            steps_per_epoch=self.data.steps_per_epoch(self.plan.workers, self.plan.batch),
            bytes_sent=_largest(ledger.message_bytes),
            bytes_dense=_largest(ledger.dense_bytes),
            wire_bytes=_largest(ledger.wire_bytes),
            seconds=ledger.seconds(self.watched.exchanges if self.watched else self.probe.exchanges),
            replicas_identical=identical,
            gradient_zeros=self.probe.zeros,
            losses=self.losses,
            curve=self.curve,
        )


def _optimizer(model: nn.Module, task: Task, learning_rate: float) -> torch.optim.Optimizer:
    if task.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), learning_rate)
    return torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, weight_decay=task.weight_decay)


def _schedule(progress: float) -> float:
    """A short rise, then half a cosine down.

    >>> [round(_schedule(progress), 2) for progress in (0.025, 0.05, 0.5, 1.0)]
    [0.5, 0.99, 0.5, 0.0]
    """
    return min(1.0, progress / 0.05) * 0.5 * (1 + float(np.cos(np.pi * progress)))


# Over all ranks


def _gathered(numbers: Sequence[float]) -> list[list[float]]:
    mine = torch.tensor(numbers, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [each.tolist() for each in everyone]


def _largest(count: int) -> int:
    number = torch.tensor(count)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def _identical(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    mine = torch.tensor(list(digest.digest()))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group must not keep a failed worker alive
