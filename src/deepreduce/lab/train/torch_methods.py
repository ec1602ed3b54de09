"""How the workers of a run exchange what they learn: gradients by a hook of DDP, or the changes of local steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import nan
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...step.policy import Spec
from ...step.residual import ResidualMemory
from ...step.schedule import Schedule
from ...step.stats import StepStats
from ...step.topology import TOPOLOGIES
from ...torch import DeepReduceState, LocalSteps
from .contract import Plan
from .method_specs import FP16_HOOK, UNCOMPRESSED, MethodSpec
from .torch_probe import Probe, Watched

MOMENTUM = 0.9
_PROBED_STEP = 5
_BUCKET_MB = 25  # also of the first bucket when it is given: these models then go in one, and the parts of a step can be told apart


class Method(ABC):
    """The exchange of one run. `model` is what computes the loss."""

    model: nn.Module
    period = 1

    def accumulating(self) -> AbstractContextManager[Any]:
        """Inside, gradients are added up and not exchanged."""
        return nullcontext()

    @abstractmethod
    def finish(self, backward_end: float) -> tuple[StepStats, float]:
        """Return what the step cost, and the seconds of it in which nothing was computed; the backward pass ended at `backward_end`."""

    def agree(self) -> tuple[StepStats, float]:
        """Give all workers the same parameters, if they do not have them; return what it cost, and its seconds."""
        return StepStats(step=-1), 0.0

    @property
    @abstractmethod
    def zeros(self) -> float:
        """The share of zeros in a gradient of an early step."""


def method_of(
    method: MethodSpec, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, exchanges: list[float]
) -> Method:
    """Return the exchange of a run, the seconds of which go to `exchanges`."""
    kind = Changes if method.kind == "local" else Gradients
    return kind(method, plan, model, optimizer, min(_PROBED_STEP, steps - 1), exchanges)


class Gradients(Method):
    """DDP with the hook of deepreduce, or without compression: its own allreduce, or PyTorch's hook for half precision."""

    def __init__(
        self, method: MethodSpec, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, probed_step: int, exchanges: list[float]
    ) -> None:
        spec: Spec = Schedule(method.spec, method.steps) if method.kind == "dgc" else method.spec
        memory = "residual" if plan.memory == "parameters" else plan.memory  # for a run without a codec, which leaves nothing over
        self.model = self._parallel = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MB)
        self._parallel.broadcast_buffers = False  # as an argument, torch 2.13 warns of it
        compressed = spec not in UNCOMPRESSED
        self._state = DeepReduceState(
            spec if compressed else "dense",
            topology=Watched(TOPOLOGIES[plan.topology](), plan.link is not None, exchanges) if compressed else "dense",
            memory=ResidualMemory(momentum=MOMENTUM) if method.kind == "dgc" else memory,  # type: ignore[arg-type]
            small_tensor_numel=plan.small,
            model=model,
            seed=plan.seed,
        )
        self._probe = Probe(probed_step, exchanges)
        self._parallel.register_comm_hook(self._state, self._probe.fp16_hook if spec == FP16_HOOK else self._probe.hook)

    def accumulating(self) -> AbstractContextManager[Any]:
        return self._parallel.no_sync()

    def finish(self, backward_end: float) -> tuple[StepStats, float]:
        return self._state.stats().last, backward_end - self._probe.ready_at

    @property
    def zeros(self) -> float:
        return self._probe.zeros


class Changes(Method):
    """`LocalSteps`."""

    def __init__(
        self, method: MethodSpec, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, probed_step: int, exchanges: list[float]
    ) -> None:
        self.model, self.period = model, method.steps
        rate, momentum = method.outer or (1.0, 0.0)
        self._local = LocalSteps(
            model,
            optimizer,
            method.spec,
            method.steps,
            partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0) if method.outer else None,
            warmup=method.warmup,
            delay=method.delay,
            fragments=method.fragments,
            topology=Watched(TOPOLOGIES[plan.topology](), plan.link is not None, exchanges),
            memory=plan.memory,  # type: ignore[arg-type]
            small_tensor_numel=plan.small,
            seed=plan.seed,
            history=max(100, method.fragments),
        )
        self._overlaps = method.delay > 0
        self._probed_step, self._steps, self._counted, self._zeros = probed_step, 0, 0, 0.0

    def finish(self, backward_end: float) -> tuple[StepStats, float]:
        if self._steps == self._probed_step:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            nonzero = sum(int(torch.count_nonzero(gradient)) for gradient in gradients)
            self._zeros = 1 - nonzero / sum(gradient.numel() for gradient in gradients)
        self._steps += 1
        return self._uncounted()

    def _uncounted(self) -> tuple[StepStats, float]:
        """The cost of the syncs of this step, and its seconds in which nothing was computed: not known where an exchange overlaps."""
        syncs, cost = self._local.syncs - self._counted, StepStats(self._steps)
        self._counted += syncs
        for sync in list(self._local.stats().steps)[len(self._local.stats().steps) - syncs :]:
            cost.merge(sync)
        return cost, nan if self._overlaps else cost.encode_seconds + cost.exchange_seconds + cost.decode_seconds

    def agree(self) -> tuple[StepStats, float]:
        start = time.perf_counter()
        self._local.sync()
        return self._uncounted()[0], time.perf_counter() - start

    @property
    def zeros(self) -> float:
        return self._zeros
