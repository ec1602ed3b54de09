"""Train what is missing, experiment by experiment, and say how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..report.provenance import provenance
from ..train.contract import Event, Plan, RunRecord
from ..train.failures import DataError, LinkError, WorkerError
from ..train.launcher import launch
from ..train.links import check_links
from ..train.tasks import read_data
from .experiment import Experiment, Measurements, Runs
from .scales import Scale
from .store import RunStore, StoredRun

Say = Callable[[str], None]
Listen = Callable[[Event], None]

# What makes a folder of data sets hold the one of a task: without it, these tasks make their data.
_MARKS = {"imagenet": ("imagenet/train", "train"), "ml20m": ("ml-20m/ratings.csv", "ratings.csv")}


@dataclass(frozen=True)
class Done:
    """An experiment with all its runs and measurements, or the reason why it was left out."""

    experiment: Experiment
    stored: Mapping[str, StoredRun] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=dict)
    left_out: str = ""

    @property
    def runs(self) -> Runs:
        """The records, by the name of the method."""
        return {method: run.record for method, run in self.stored.items()}


class Conductor:
    """Runs experiments one after the other, taking from the store what it has."""

    def __init__(self, scale: Scale, data: Path | None, store: RunStore, say: Say, listen: Listen) -> None:
        self._scale, self._data, self._store, self._say, self._listen = scale, data, store, say, listen
        self._checked: dict[tuple[str, str | None], str] = {}
        self._clock = Clock()

    def run(self, experiments: Sequence[Experiment]) -> list[Done]:
        """Run all; one that cannot run, for want of data or links, is left out with the reason."""
        done = []
        for number, experiment in enumerate(experiments):
            later = sum(each.minutes[self._scale.name] for each in experiments[number + 1 :])
            done.append(self._one(experiment, later))
        return done

    def _one(self, experiment: Experiment, later_minutes: float) -> Done:
        plans = {method: self._with_data(plan) for method, plan in experiment.runs(self._scale).items()}
        missing = {method: plan for method, plan in plans.items() if self._store.load(plan) is None}
        reason = self._obstacle(experiment, missing) if missing else ""
        if reason:
            self._say(f"{experiment.name}: left out: {reason}")
            return Done(experiment, left_out=reason)
        self._say(
            f"{experiment.name}: {len(plans) - len(missing)} of {len(plans)} runs are there already" if plans else f"{experiment.name}"
        )
        try:
            self._train(experiment, missing, later_minutes)
        except (WorkerError, LinkError) as error:
            reason = str(error)
            self._say(f"{experiment.name}: failed: {reason}")
            return Done(experiment, left_out=f"it failed: {reason.splitlines()[-1]}")
        stored = {method: self._store.load(plan) for method, plan in plans.items()}
        return Done(experiment, {method: run for method, run in stored.items() if run}, experiment.measure(self._scale))

    def _with_data(self, plan: Plan) -> Plan:
        if self._data is None:
            return plan
        marks = _MARKS.get(plan.task)
        if marks is None:
            return replace(plan, data=str(self._data))
        found = next((mark for mark in marks if (self._data / mark).exists()), None)
        folder = self._data / "imagenet" if found == "imagenet/train" else self._data
        return replace(plan, data=str(folder)) if found else plan

    def _obstacle(self, experiment: Experiment, missing: Mapping[str, Plan]) -> str:
        if "links" in experiment.needs:
            try:
                check_links()
            except LinkError as error:
                return str(error)
        for plan in missing.values():
            key = plan.task, plan.data
            if key not in self._checked:
                self._checked[key] = _unreadable(plan)
            if self._checked[key]:
                return self._checked[key]
        return ""

    def _train(self, experiment: Experiment, missing: Mapping[str, Plan], later_minutes: float) -> None:
        expected = experiment.minutes[self._scale.name] / max(len(experiment.runs(self._scale)), 1)
        left = len(missing)
        for plan in _together(missing.values()):

            def listen(event: Event, plan: Plan = plan) -> None:
                nonlocal left
                self._listen(event)
                if event["event"] == "run":
                    record = RunRecord(**event["record"])
                    self._store.save(replace(plan, specs=(record.spec,)), record, provenance())
                    left -= 1
                    self._clock.tick(expected)
                    minutes = self._clock.minutes(left * expected + later_minutes)
                    self._say(f"{experiment.name}: {record.spec} done, {left} runs left; all that was asked for: about {minutes:.0f} min")

            self._clock.start()
            launch(plan, listen)


class Clock:
    """Scales the minutes that experiments expect by what the finished runs took.

    >>> clock = Clock()
    >>> clock.minutes(10)
    10
    """

    def __init__(self) -> None:
        self._spent, self._expected, self._since = 0.0, 0.0, time.monotonic()

    def start(self) -> None:
        """Count from now on."""
        self._since = time.monotonic()

    def tick(self, expected_minutes: float) -> None:
        """Count a run that was expected to take so long."""
        now = time.monotonic()
        self._spent += (now - self._since) / 60
        self._expected += expected_minutes
        self._since = now

    def minutes(self, expected_minutes: float) -> float:
        """Return how long this takes at the speed so far."""
        return expected_minutes * self._spent / self._expected if self._expected else expected_minutes


def _together(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans that differ by their spec only as one: their workers start once."""
    joined: dict[Plan, list[str]] = {}
    for plan in plans:
        joined.setdefault(replace(plan, specs=()), []).extend(plan.specs)
    return [replace(plan, specs=tuple(dict.fromkeys(specs))) for plan, specs in joined.items()]


def _unreadable(plan: Plan) -> str:
    try:
        read_data(plan)
    except DataError as error:
        return str(error)
    return ""
