"""A whole step of one rank: compensate, select, encode, decode and update the residuals, without a network."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from shapes import Shape, gradients_like

from deepreduce.torch import DeepReduceState, allreduce_


class OneRank:
    """Gradients of these shapes, and the state that reduces them."""

    def __init__(self, shapes: Sequence[Shape], spec: str, threads: int = 1) -> None:
        self._fresh = gradients_like(shapes, seed=0)
        self._gradients = [torch.empty_like(gradient) for gradient in self._fresh]
        self._names = [f"tensor {number}" for number in range(len(shapes))]
        self._state = DeepReduceState(spec, threads=threads)

    def seconds(self) -> float:
        """Return the time of one step; the gradients are made before it."""
        for gradient, fresh in zip(self._gradients, self._fresh, strict=True):
            gradient.copy_(fresh)
        start = time.perf_counter()
        allreduce_(self._gradients, self._state, self._names)
        return time.perf_counter() - start


class Add:
    """`torch.add(a, b, out=c)` on as many elements: what memory allows."""

    def __init__(self, numel: int) -> None:
        self._a, self._b, self._c = (torch.randn(numel) for _ in range(3))

    def seconds(self) -> float:
        """Return the time of one addition."""
        start = time.perf_counter()
        torch.add(self._a, self._b, out=self._c)
        return time.perf_counter() - start


def in_turns(repeat: int, *sides: OneRank | Add) -> list[list[float]]:
    """Return the seconds of each side, which take turns: a slow moment of the machine falls on all. The first turn is not counted."""
    rounds = [[side.seconds() for side in sides] for _ in range(repeat + 1)]
    return [list(column) for column in zip(*rounds[1:], strict=True)]
