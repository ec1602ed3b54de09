"""One worker that trains with PyTorch's DistributedDataParallel; see `contract`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from . import torch_models
from .batches import Batch
from .contract import Emit, Plan, serve
from .method_specs import MethodSpec
from .run import Job, Run, train_all
from .tasks import Task, read_data
from .torch_methods import MOMENTUM, method_of
from .torch_precision import DTYPES, Optimizer

_TOP = 10


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
    """One spec, by its method, whose exchanges are watched."""

    def __init__(self, job: Job, spec: str) -> None:
        super().__init__(job, spec)
        plan, method = job.plan, MethodSpec.parse(spec)
        momentum = 0.0 if method.kind == "dgc" else MOMENTUM
        self.model = torch_models.build(plan.model, job.data, plan.seed).to(DTYPES[plan.precision])
        if plan.compiled:
            self._compile()
        clip = _clip(self.task.clip, plan.workers if method.kind == "local" else 1)
        self.optimizer = Optimizer(self.model, plan.precision, partial(_optimizer, task=self.task, momentum=momentum), clip)
        self.method = method_of(method, plan, self.model, self.optimizer.inner, job.steps, self.ledger.exchanges)
        self.period = self.method.period

    def _compile(self) -> None:
        """Compile the model for the batches of this run; a step takes no time for it then. It has the same state afterwards."""
        state = deepcopy(self.model.state_dict())
        self.model.compile()
        _, batch = next(self.batches(1))
        some = [array[:: self.plan.accumulate] for array in batch]
        self._loss(self.model, self._tensors(some)).backward()  # type: ignore[no-untyped-call]
        self.model.load_state_dict(state)
        self.model.zero_grad()

    def warm_up(self) -> None:
        super().warm_up()
        self.method.agree()

    def step(self, number: int, batch: Batch) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self._accumulated(batch)
        backward_end = time.perf_counter()
        self.optimizer.step(self.rate(number))
        seconds = time.perf_counter() - start
        cost, exposed = self.method.finish(backward_end)
        self.ledger.add(seconds, seconds - exposed, cost)
        return loss

    def _accumulated(self, batch: Batch) -> float:
        """Return the loss of the whole batch, whose gradients are exchanged with its last part. Each part has some of all examples."""
        parts, loss = self.plan.accumulate, 0.0
        for number in range(parts):
            some = self._tensors([array[number::parts] for array in batch])
            with nullcontext() if number == parts - 1 else self.method.accumulating():
                part = self._loss(self.method.model, some) * (len(some[0]) / len(batch[0]))
                (part * self.optimizer.loss_scale).backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        return loss

    def _tensors(self, batch: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return a batch as tensors, numbers with fractions in the precision of the model."""
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in batch]
        return [each.to(DTYPES[self.plan.precision]) if each.is_floating_point() else each for each in tensors]

    def _loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        scores = model(*batch[:-1]).float()
        if self.task.kind == "ranking":
            return functional.binary_cross_entropy_with_logits(scores, batch[-1].float())
        if self.task.kind == "text":
            return functional.cross_entropy(scores.flatten(0, 1), batch[-1].flatten())
        return functional.cross_entropy(scores, batch[-1])

    @torch.no_grad()
    def agree(self) -> None:
        """Give all models the same parameters, and the buffers of rank 0."""
        cost, seconds = self.method.agree()
        self.ledger.add(seconds, 0.0, cost)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    @torch.no_grad()
    def quality(self) -> float:
        self.model.eval()
        quality = super().quality()
        self.model.train()
        return quality

    def score(self, batch: Batch) -> float:
        tensors = self._tensors(batch)
        if self.task.kind == "ranking":
            users, items = tensors
            scores = self.model(users[:, None].expand_as(items), items)
            not_below = ~(scores[:, 1:] < scores[:, :1])  # also where a score is NaN: a broken model has nothing right
            return float((not_below.sum(1) < _TOP).sum())
        scores = self.model(tensors[0]).float()
        if self.task.kind == "text":
            return float(functional.cross_entropy(scores.flatten(0, 1), tensors[1].flatten())) * len(scores)
        return float((scores.argmax(1) == tensors[1]).sum())

    def weights(self) -> Iterator[NDArray[Any]]:
        return (parameter.detach().float().numpy() for parameter in self.model.parameters())

    def zeros(self) -> float:
        return self.method.zeros

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).numpy()


def _clip(mean_clip: float | None, workers: int) -> float | None:
    """Return the norm to clip the gradient of one of these workers to, where `mean_clip` is that of their mean, which has less noise.

    >>> _clip(1.0, 4)
    2.0
    """
    return None if mean_clip is None else mean_clip * sqrt(workers)


def _optimizer(parameters: Iterable[nn.Parameter], task: Task, momentum: float) -> torch.optim.Optimizer:
    if task.optimizer == "adam":
        return torch.optim.Adam(parameters)
    if task.optimizer == "adamw":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=task.weight_decay)
    return torch.optim.SGD(parameters, momentum=momentum, weight_decay=task.weight_decay)


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group must not keep a failed worker alive
