"""One worker that trains with PyTorch's DistributedDataParallel; see `contract`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
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
from .run import Job, Run, train_all
from .tasks import Task, read_data
from .torch_precision import DTYPES, Optimizer
from .torch_probe import Probe, Watched

_TOP = 10
_PROBED_STEP = 5
_BUCKET_MB = 25  # also of the first bucket when it is given: these models then go in one, and the parts of a step can be told apart


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    with _process_group():
        data = read_data(plan)
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
        self.model = torch_models.build(plan.model, job.data, plan.seed).to(DTYPES[plan.precision])
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
        self.optimizer = Optimizer(self.model, plan.precision, partial(_optimizer, task=self.task))

    def step(self, number: int, batch: Batch) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self._accumulated(batch)
        exposed = time.perf_counter() - self.probe.ready_at
        self.optimizer.step(self.rate(number))
        seconds = time.perf_counter() - start
        self.ledger.add(seconds, seconds - exposed, self.state.stats().last)
        return loss

    def _accumulated(self, batch: Batch) -> float:
        """Return the loss of the whole batch, whose gradients are exchanged with its last part. Each part has some of all examples."""
        parts, loss = self.plan.accumulate, 0.0
        for number in range(parts):
            some = self._tensors([array[number::parts] for array in batch])
            with nullcontext() if number == parts - 1 else self.parallel.no_sync():
                part = self._loss(some) * (len(some[0]) / len(batch[0]))
                (part * self.optimizer.loss_scale).backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        return loss

    def _tensors(self, batch: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return a batch as tensors, numbers with fractions in the precision of the model."""
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in batch]
        return [each.to(DTYPES[self.plan.precision]) if each.is_floating_point() else each for each in tensors]

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        scores = self.parallel(*batch[:-1]).float()
        if self.task.kind == "ranking":
            return functional.binary_cross_entropy_with_logits(scores, batch[-1].float())
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
            users, items = self._tensors(batch)
            scores = self.model(users[:, None].expand_as(items), items)
            return int(((scores[:, 1:] >= scores[:, :1]).sum(1) < _TOP).sum())
        images, labels = self._tensors(batch)
        return int((self.model(images).argmax(1) == labels).sum())

    def weights(self) -> Iterator[NDArray[Any]]:
        return (parameter.detach().float().numpy() for parameter in self.model.parameters())

    def zeros(self) -> float:
        return self.probe.zeros

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).numpy()


def _optimizer(parameters: Iterable[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    if task.optimizer == "adam":
        return torch.optim.Adam(parameters)
    return torch.optim.SGD(parameters, momentum=0.9, weight_decay=task.weight_decay)


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group must not keep a failed worker alive
