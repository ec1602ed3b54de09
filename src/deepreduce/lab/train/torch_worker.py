"""One worker that trains with PyTorch's DistributedDataParallel; see `contract`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ...step.topology import TOPOLOGIES
from ...torch import DeepReduceState
from . import torch_models
from .batches import Batch
from .contract import Emit, Plan, serve
from .run import Job, Run, read, train_all
from .tasks import Task
from .torch_probe import Probe, Watched

_TOP = 10
_PROBED_STEP = 5
_BUCKET_MB = 25  # also of the first bucket when it is given: these models then go in one, and the parts of a step can be told apart


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    with _process_group():
        data = read(plan)
        size = torch_models.parameter_count(torch_models.build(plan.model, data, plan.seed))
        job = Job(plan, data, dist.get_rank(), size)

        def warm(spec: str) -> Run:
            TorchRun(job, spec).warm_up()
            return TorchRun(job, spec)

        train_all(job, warm, emit)


@contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


class TorchRun(Run):
    """One spec: DDP with the hook of deepreduce, whose exchanges are watched."""

    def __init__(self, job: Job, spec: str) -> None:
        super().__init__(job, spec)
        plan, exchanges = job.plan, self.ledger.exchanges
        self.model = torch_models.build(plan.model, job.data, plan.seed)
        self.parallel = DistributedDataParallel(self.model, broadcast_buffers=False, bucket_cap_mb=_BUCKET_MB)
        self.state = DeepReduceState(
            spec,
            topology="dense" if spec == "dense" else Watched(TOPOLOGIES[plan.topology](), plan.link is not None, exchanges),
            memory=plan.memory,  # type: ignore[arg-type]
            small_tensor_numel=plan.small,
            model=self.model,
            seed=plan.seed,
        )
        self.probe = Probe(min(_PROBED_STEP, job.steps - 1), exchanges)
        self.parallel.register_comm_hook(self.state, self.probe.hook)
        self.optimizer = _optimizer(self.model, self.task, plan.learning_rate)

    def step(self, number: int, batch: Batch) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self._loss(_tensors(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        exposed = time.perf_counter() - self.probe.ready_at
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.ledger.add(seconds, seconds - exposed, self.state.stats().last)
        return float(loss.detach())

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        scores = self.parallel(*batch[:-1])
        if self.task.kind == "ranking":
            return functional.binary_cross_entropy_with_logits(scores, batch[-1])
        return functional.cross_entropy(scores, batch[-1])

    @torch.no_grad()
    def quality(self) -> float:
        """With the buffers of rank 0 in all models."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        self.model.eval()
        quality = super().quality()
        self.model.train()
        return quality

    def right(self, batch: Batch) -> int:
        if self.task.kind == "ranking":
            users, items = _tensors(batch)
            scores = self.model(users[:, None].expand_as(items), items)
            return int(((scores[:, 1:] >= scores[:, :1]).sum(1) < _TOP).sum())
        images, labels = _tensors(batch)
        return int((self.model(images).argmax(1) == labels).sum())

    def weights(self) -> Iterator[NDArray[Any]]:
        return (parameter.detach().numpy() for parameter in self.model.parameters())

    def zeros(self) -> float:
        return self.probe.zeros

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).numpy()


def _tensors(batch: Batch) -> list[Tensor]:
    return [torch.from_numpy(array) for array in batch]


def _optimizer(model: nn.Module, task: Task, learning_rate: float) -> torch.optim.Optimizer:
    if task.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), learning_rate)
    return torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, weight_decay=task.weight_decay)


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group must not keep a failed worker alive
