"""The steps of an optimizer that a `GradScaler` skips, which no hook of the optimizer sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

Skipped = Callable[[], object]


class SkippedSteps:
    """Stands in for `GradScaler.step`, and calls back where the scaler skips the step of an optimizer.

    One object serves a scaler, so that callbacks may be removed in any order; with the last one, the scaler is as it was.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._step = scaler, scaler.step
        self._replaced = {name: own for name, own in vars(scaler).items() if name == "step"}
        self._callbacks: list[tuple[Optimizer, Skipped]] = []

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> SkippedSteps:
        """Return the object that stands on a scaler; put one there if there is none."""
        if not isinstance(vars(scaler).get("step"), cls):
            vars(scaler)["step"] = cls(scaler)
        standing: SkippedSteps = vars(scaler)["step"]
        return standing

    def add(self, optimizer: Optimizer, skipped: Skipped) -> Callable[[], object]:
        """Call `skipped` for every step of this optimizer that is skipped; return what ends that."""
        entry = optimizer, skipped
        self._callbacks.append(entry)
        return partial(self._remove, entry)

    def _remove(self, entry: tuple[Optimizer, Skipped]) -> None:
        self._callbacks.remove(entry)
        if not self._callbacks and vars(self._scaler).get("step") is self:
            del vars(self._scaler)["step"]  # what the class has shows again
            vars(self._scaler).update(self._replaced)

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            result = self._step(optimizer, *args, **kwargs)
        finally:
            hook.remove()
        for known, skipped in list(self._callbacks):
            if known is optimizer and not stepped:
                skipped()
        return result
