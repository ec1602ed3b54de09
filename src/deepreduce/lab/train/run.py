"""One training run, the same for every framework: the loop, what its steps cost, and the record of it."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...step.stats import StepStats, ring_bytes
from .batches import Batch, Data
from .contract import Emit, Event, Plan, RunRecord, Throttle, evaluation_steps
from .schedules import schedule_of
from .tasks import task_of

_CURVE_POINTS = 200


@dataclass(frozen=True)
class Job:
    """What all runs of a worker share."""

    plan: Plan
    data: Data
    rank: int
    parameters: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which all workers together see every example once."""
        return self.data.steps_per_epoch(self.plan.workers, self.plan.batch * self.plan.accumulate)

    @property
    def steps(self) -> int:
        """How many steps every run takes."""
        return self.plan.steps or self.plan.epochs * self.steps_per_epoch


def train_all(job: Job, warm: Callable[[str], Run], emit: Emit) -> None:
    """Train every spec of the plan; rank 0 emits. `warm` gives a run at its start, when all that it needs is compiled."""
    say = emit if job.rank == 0 else _silent
    say({"event": "ready", "parameters": job.parameters, "steps": job.steps, "steps_per_epoch": job.steps_per_epoch})
    for spec in job.plan.specs:
        say(warm(spec).go(say).to_event())


def _silent(event: Event) -> None:
    """Not rank 0."""


@dataclass
class Ledger:
    """What all steps cost this rank. `exchanges` has the seconds of every single exchange, in an order that all ranks share.

    >>> ledger = Ledger()
    >>> ledger.add(seconds=3.0, computing=1.0, cost=StepStats(step=0, sent_bytes=44, encode_seconds=0.5))
    >>> ledger.exchanges += [1.0, 0.5]
    >>> parts = ledger.seconds(everyone=np.array([[1.0, 0.5], [0.25, 0.75]]))
    >>> parts["communication"], parts["waiting"]
    (0.75, 0.75)
    """

    total: float = 0.0
    forward_backward: float = 0.0
    cost: StepStats = field(default_factory=lambda: StepStats(step=0))
    exchanges: list[float] = field(default_factory=list)

    def add(self, seconds: float, computing: float, cost: StepStats) -> None:
        """Count one step, of which forward and backward pass took `computing` seconds."""
        self.total += seconds
        self.forward_backward += computing
        self.cost.merge(cost)

    def seconds(self, everyone: NDArray[np.float64]) -> dict[str, float]:
        """The parts, given the exchanges of every rank. Who comes last to an exchange waits for nobody: its time is the network's."""
        communication = float(everyone.min(0).sum())
        return {
            "total": self.total,
            "forward_backward": self.forward_backward,
            "encode": self.cost.encode_seconds,
            "decode": self.cost.decode_seconds,
            "communication": communication,
            "waiting": float(np.sum(self.exchanges)) - communication,
        }


class StolenTime:
    """The share of the cores' time that the host of this virtual machine used for others, since this was made. 0 where no system tells.

    >>> 0 <= StolenTime().share() <= 1
    True
    """

    _STEAL = 7  # of the times in /proc/stat; those after it are part of others

    def __init__(self) -> None:
        self._start = self._times()

    def share(self) -> float:
        """So far."""
        spent = [now - then for now, then in zip(self._times(), self._start, strict=True)]
        return spent[self._STEAL] / sum(spent) if sum(spent) > 0 else 0.0

    def _times(self) -> list[int]:
        try:
            first, *_ = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return [0] * (self._STEAL + 1)
        return [int(time) for time in first.split()[1 : self._STEAL + 2]]


class Run(ABC):
    """One spec, trained from the initial weights of the plan's seed. A framework fills in what is abstract."""

    period = 1  # steps between two moments at which all workers can have the same model at little cost

    def __init__(self, job: Job, spec: str) -> None:
        self.job, self.plan, self.spec, self.task = job, job.plan, spec, task_of(job.plan.task)
        self.ledger = Ledger()
        self._stolen = StolenTime()
        self._losses: list[tuple[int, float]] = []
        self._curve: list[dict[str, float]] = []

    @abstractmethod
    def step(self, number: int, batch: Batch) -> float:
        """Train on one batch, all that is accumulated, at `rate(number)`; put the cost and the exchanges in the ledger; return the loss."""

    @abstractmethod
    def score(self, batch: Batch) -> float:
        """How many examples of a test batch the model has right; for texts, the sum of their losses."""

    @abstractmethod
    def weights(self) -> Iterable[NDArray[Any]]:
        """The trained parameters."""

    @abstractmethod
    def zeros(self) -> float:
        """The share of zeros in the gradient of one early step, before anything is left out."""

    @abstractmethod
    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        """The numbers of every rank, a row for each. All ranks call it together, with equally many numbers."""

    def agree(self) -> None:  # noqa: B027 (there is nothing to do where every step ends with the same model)
        """Give all workers the same model, where their steps do not; put the cost in the ledger."""

    def warm_up(self) -> None:
        """Take a few steps: what is compiled at first use is compiled then. The run is of no use afterwards."""
        for number, batch in self.batches(self.plan.warm_up):
            self.step(number, batch)

    def go(self, emit: Emit) -> RunRecord:
        """Train, measure quality now and then, and sum up."""
        steps = self.job.steps
        measured = evaluation_steps(steps, self.plan.evaluations, self.period)
        throttle, identical = Throttle(), True
        self._start_together()
        for number, batch in self.batches(steps):
            loss = self.step(number, batch)
            if number % max(1, steps // _CURVE_POINTS) == 0 or number == steps:
                self._losses.append((number, loss))
            if throttle.ready():
                emit({"event": "step", "spec": self.spec, "step": number, "loss": loss})
            if number in measured:
                self.agree()
                quality = self.quality()
                self._note(number, loss, quality)
                emit({"event": "evaluation", "spec": self.spec, "step": number, "quality": quality})
                identical = identical and self.identical()
        if not measured:
            self.agree()
            identical = self.identical()
        return self._record(identical)

    def _start_together(self) -> None:
        """Wait until all workers are here: on a slow link some receive the initial weights much later, and no step is to count that."""
        self.gathered([0.0])

    def batches(self, count: int) -> Iterator[tuple[int, Batch]]:
        """The first training batches of this rank, numbered from 1."""
        plan = self.plan
        endless = self.job.data.train_batches(self.job.rank, plan.workers, plan.batch * plan.accumulate, plan.seed)
        return enumerate(itertools.islice(endless, count), start=1)

    def rate(self, number: int) -> float:
        """The learning rate of a step."""
        return self.plan.learning_rate * schedule_of(self.plan.schedule)(number / self.job.steps)

    def quality(self) -> float:
        """The mean score over the test set, or the part of it that the plan asks for."""
        score, seen = 0.0, 0
        batches = self.job.data.test_batches(self.job.rank, self.plan.workers)
        for batch in itertools.islice(batches, self.plan.test_batches):
            score += self.score(batch)
            seen += len(batch[0])
        whole_score, all_seen = self.gathered([score, seen]).sum(0).tolist()
        return float(whole_score / all_seen)

    def identical(self) -> bool:
        """Whether all ranks have the same weights, bit for bit."""
        digest = hashlib.sha256()
        for array in self.weights():
            digest.update(array.tobytes())
        digests = self.gathered(list(digest.digest()))
        return bool((digests == digests[0]).all())

    def _note(self, step: int, loss: float, quality: float) -> None:
        spent = {"bytes_sent": self.ledger.cost.sent_bytes, "seconds": self.ledger.total}
        self._curve.append({"step": step, "loss": loss, "quality": quality} | spent)

    def _record(self, identical: bool) -> RunRecord:
        qualities = [point["quality"] for point in self._curve] or [float("nan")]
        ledger, cost = self.ledger, self.ledger.cost
        largest = self.gathered([cost.sent_bytes, cost.dense_bytes, cost.message_bytes]).max(0)
        sent_bytes, dense_bytes, message_bytes = map(int, largest)
        return RunRecord(
            spec=self.spec,
            metric=self.task.metric,
            quality=qualities[-1],
            best_quality=(min if self.task.lower_is_better else max)(qualities),
            parameters=self.job.parameters,
            steps=self.job.steps,
            steps_per_epoch=self.job.steps_per_epoch,
            bytes_sent=sent_bytes,
            bytes_dense=ring_bytes(dense_bytes, self.plan.workers),
            message_bytes=message_bytes,
            gradient_bytes=dense_bytes,
            seconds=ledger.seconds(self.gathered(ledger.exchanges)),
            replicas_identical=identical,
            gradient_zeros=self.zeros(),
            stolen_share=self._stolen.share(),
            data_note=self.job.data.note,
            lower_is_better=self.task.lower_is_better,
            seed=self.plan.seed,
            losses=self._losses,
            curve=self._curve,
        )
