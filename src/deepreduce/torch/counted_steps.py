"""The steps of an optimizer that a `GradScaler` skips, which no hook of the optimizer sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class StepCounter(Protocol):
    """What counts the steps of one optimizer."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        ...

    @property
    def steps_seen(self) -> int:
        """How many of its steps were counted."""
        ...

    def count_skipped_step(self) -> None:
        """Count a step that was skipped."""
        ...


class CountedSteps:
    """Stands in for `GradScaler.step`, and tells those that count the steps of an optimizer which ones the scaler skipped.

    A skipped step does not call the optimizer. One object serves a scaler, so that its counters may be removed in any order.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._step = scaler, scaler.step
        self._replaced = {name: own for name, own in vars(scaler).items() if name == "step"}
        self._counters: list[StepCounter] = []

    @classmethod
    def on(cls, scaler: torch.amp.GradScaler) -> CountedSteps:
        """Return the object that stands on a scaler; put one there if there is none."""
        if not isinstance(vars(scaler).get("step"), cls):
            vars(scaler)["step"] = cls(scaler)
        standing: CountedSteps = vars(scaler)["step"]
        return standing

    def add(self, counter: StepCounter) -> Callable[[], object]:
        """Tell this counter too; return what ends that."""
        self._counters.append(counter)
        return partial(self._remove, counter)

    def _remove(self, counter: StepCounter) -> None:
        self._counters.remove(counter)
        if not self._counters and vars(self._scaler).get("step") is self:
            del vars(self._scaler)["step"]  # what the class has shows again
            vars(self._scaler).update(self._replaced)

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = [(counter, counter.steps_seen) for counter in self._counters if counter.optimizer is optimizer]
        result = self._step(optimizer, *args, **kwargs)
        for counter, seen in before:
            if counter.steps_seen == seen:
                counter.count_skipped_step()
        return result
