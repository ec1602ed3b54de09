"""The steps of an optimizer on the host, in three calls of the graph: before, between and after the exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

from ..step.reducer import Bucket, ErrorFeedback, Reducer
from ..step.residual import ResidualMemory
from ..step.stats import Stats, StepStats
from ..step.transport import Transport
from ..step.worker import Worker
from ..tensor import Values
from .transport import HostStep, Replicas, Words
from .views import Slot, View


class HostSteps:
    """Runs a `Reducer` for every replica of this process; all that it keeps from one step to the next are their stats, summed."""

    def __init__(self, reducer: Reducer, feedback: bool, history: int) -> None:
        self.reducer, self.feedback, self.stats = reducer, feedback, Stats(history)
        self._workers: defaultdict[int, Worker] = defaultdict(lambda: Worker("deepreduce step"))
        self._open: dict[int, HostStep[tuple[list[Values], StepStats]]] = {}

    def begin(self, slots: Sequence[Slot], size: int, step: Any, since: Any, rank: Any, scale: Any, *arrays: Values) -> list[Words]:
        """Start a step; return its first frame.

        `since` is how many steps the gradients stand for, and `scale` the loss scale that they have and the residuals have not.
        """
        number, left = int(rank), list(arrays)
        if number in self._open:
            self._open.pop(number).give_up()  # its graph was interrupted

        def work(transport: Replicas) -> tuple[list[Values], StepStats]:
            return self._step([slot.take(left) for slot in slots], int(step), int(since), float(scale), transport)

        self._open[number] = HostStep(self._workers[number], Replicas(number, size), self.reducer.topology.rounds, work)
        return [self._open[number].first()]

    def between(self, rank: Any, gathered: Words) -> list[Words]:
        """Take the frames of all replicas; return the next one."""
        return [self._open[int(rank)].following(gathered)]

    def finish(self, rank: Any, gathered: Words) -> list[Values]:
        """Take the frames of all replicas; return for each gradient its sum over all of them, and its residuals from now on."""
        arrays, cost = self._open.pop(int(rank)).last(gathered)
        self.stats.add(cost, last=not self._open)  # all replicas have begun, and a graph makes these calls one after another
        return arrays

    def _step(self, views: Sequence[View], step: int, since: int, scale: float, transport: Transport) -> tuple[list[Values], StepStats]:
        memory = ErrorFeedback(ResidualMemory(), ResidualMemory()) if self.feedback else ErrorFeedback(None, None)
        for view in views:
            low, high = self.reducer.topology.owned_range(view.slot.name, prod(view.slot.shape), transport.rank, transport.size)
            view.load_residuals(memory, high - low)
        memory.rescale(scale)
        bucket = Bucket([view.slot.name for view in views], [view.gradient for view in views], step)
        totals, cost = self.reducer.reduce(bucket, memory, transport)
        memory.rescale(1.0)
        cost.count_dense_steps(since, bucket.names)
        return [array for view, total in zip(views, totals, strict=True) for array in view.results(total, memory)], cost
