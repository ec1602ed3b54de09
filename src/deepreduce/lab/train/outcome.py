"""What came of a training job: the runs, and where and with what they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

from ..report.plain import plain
from ..report.quantity import in_bytes, in_percent, in_seconds, in_times, quality_format
from .contract import Plan, RunRecord
from .links import parse_rate
from .race import arrival, dense_run
from .seeds import averaged, by_spec, spread

COMPUTED_RATE = "100mbit"

_DISTURBING_SHARE = 0.02


class Outcome:
    """A plan and the records of its runs, for each of its `seeds`; all workers on `one_machine`, or who knows where.

    `target` is the quality that runs are timed by; None for that of the dense run at its end.
    """

    def __init__(
        self, plan: Plan, origin: Mapping[str, Any], one_machine: bool = True, seeds: int = 1, target: float | None = None
    ) -> None:
        self.plan, self.origin, self.one_machine, self.seeds, self.target = plan, origin, one_machine, seeds, target
        self.records: list[RunRecord] = []

    def write_json(self, path: Path) -> None:
        """Write everything, for programs."""
        path.write_text(json.dumps(plain(self.as_json()), indent=1, allow_nan=False) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Return plan, provenance and runs as plain JSON; a run has its share of the link where there is one."""
        return {
            "plan": asdict(self.plan),
            "target": self.target,
            "provenance": dict(self.origin),
            "runs": [self._run(record) for record in self.records],
        }

    def _run(self, record: RunRecord) -> dict[str, Any]:
        goal = self._goal([each for each in self.records if each.seed == record.seed])
        reached = None if goal is None else arrival(record, goal, self.computed_rate)
        numbers: dict[str, Any] = {"ratio": ratio(record), "relative_volume": record.relative_volume}
        key = "as_good_as_dense" if self.target is None else "as_good_as_target"
        numbers[key] = None if reached is None else asdict(reached) | {"link": self.plan.link or self.computed_rate}
        run = asdict(record) | numbers | {"versions": self.origin["versions"], "machine": self.origin["machine"]}
        if self.plan.link:
            run["link_seconds"] = link_seconds(record, self.plan.link)
        return run

    def columns(self) -> list[str]:
        """Return the titles of the table."""
        metric = self.records[0].metric if self.records else "quality"
        goal = "dense" if self.target is None else f"{self.target:g}"
        race = [f"as good as {goal}{self._on_a_link()}"] if self._goal(self.runs()) is not None else []
        times = ["seconds", "forward/backward", "encode/decode", "communication"]
        by_rate = ["bytes/rate"] if self.plan.link else []
        return ["codec", metric, *race, "relative volume", "bytes sent", "ratio", *times, *by_rate, "replicas"]

    def rows(self) -> list[list[str]]:
        """Return the table, one row per run, or one for the runs of all seeds."""
        goal = self._goal(self.runs())
        return [self._row(record, goal) for record in self.runs()]

    def _goal(self, records: Sequence[RunRecord]) -> float | None:
        """Return the quality that runs are timed by: the target, or that of the dense one of these records, if it has one."""
        dense = dense_run(records)
        if self.target is not None or dense is None or isnan(dense.quality):
            return self.target
        return dense.quality

    def runs(self) -> list[RunRecord]:
        """Return one record per spec: the mean over its seeds."""
        return [averaged(records) for records in by_spec(self.records).values()]

    def quality(self, record: RunRecord) -> str:
        """Return a quality as people read it, with the standard deviation over seeds."""
        show = quality_format(record.lower_is_better)
        deviation = spread([each.quality for each in by_spec(self.records)[record.spec]])
        return show(record.quality) + ("" if deviation is None else f" ± {show(deviation)}")

    @property
    def computed_rate(self) -> str | None:
        """The rate of the link that times to quality are computed for, where no link was shaped."""
        return COMPUTED_RATE if not self.plan.link and self.one_machine and self.plan.workers > 1 else None

    def _on_a_link(self) -> str:
        return f" (at {self.computed_rate}, computed)" if self.computed_rate else ""

    def _row(self, record: RunRecord, goal: float | None) -> list[str]:
        seconds = record.seconds
        times = (seconds["total"], seconds["forward_backward"], seconds["encode"] + seconds["decode"], seconds["communication"])
        by_rate = [in_seconds(link_seconds(record, self.plan.link))] if self.plan.link else []
        identical = "identical" if record.replicas_identical else "DIFFERENT"
        return [
            record.spec,
            self.quality(record),
            *([] if goal is None else [str(arrival(record, goal, self.computed_rate) or "not reached")]),
            f"{record.relative_volume:.4f}",
            in_bytes(record.bytes_sent),
            in_times(ratio(record)),
            *map(in_seconds, times),
            *by_rate,
            identical,
        ]

    def remarks(self) -> list[str]:
        """Return what a reader must know beside the table."""
        return list(filter(None, (self.missing(), self.data_note(), self.outlook(), self.disturbance())))

    def missing(self) -> str:
        """Say how many runs there are, where an error or an interrupt ended the training before all were done; else nothing."""
        planned = self.seeds * len(self.plan.specs)
        done = len(self.records)
        return f"These are {done} of {planned} runs: the training was ended before the others." if done < planned else ""

    def data_note(self) -> str:
        """Say what a reader must know of the data; nothing for recorded data."""
        note = self.records[0].data_note if self.records else ""
        return f"The data: {note}." if note else ""

    def outlook(self, rate: str = COMPUTED_RATE) -> str:
        """Say what a slow link would make of runs that had none: how long it would be busy with one step. Nothing for runs that had one."""
        if self.plan.link or self.plan.workers < 2 or not self.one_machine:
            return ""
        busy = (f"{record.spec} {in_seconds(link_seconds(record, rate) / record.steps)}" for record in self.runs())
        return f"These workers share one machine's memory. A link of {rate} per worker would be busy with each step for: {', '.join(busy)}."

    def disturbance(self) -> str:
        """Say which runs the host of a virtual machine slowed down by giving its cores to others; nothing where it did not."""
        slowed = [f"{record.spec} {in_percent(record.stolen_share)}" for record in self.runs() if record.stolen_share >= _DISTURBING_SHARE]
        if not slowed:
            return ""
        return f"The host of this machine gave its cores to others for part of the time, so seconds are longer: {', '.join(slowed)}."


def ratio(record: RunRecord) -> float:
    """Return how many times fewer bytes went over the network than with dense gradients."""
    return record.bytes_dense / record.bytes_sent if record.bytes_sent else 1.0


def link_seconds(record: RunRecord, rate: str) -> float:
    """Return how long a link of this rate is busy with what one worker sends."""
    return 8 * record.bytes_sent / parse_rate(rate)


def beside_dense(records: Sequence[RunRecord]) -> dict[str, str]:
    """Say of each codec how far its quality is from that of the dense run.

    >>> beside_dense([])
    {}
    """
    dense = dense_run(records)
    if dense is None:
        return {}
    return {record.spec: _distance(record, dense) for record in records if record.spec != "dense"}


def _distance(record: RunRecord, dense: RunRecord) -> str:
    above = record.quality - dense.quality
    if isnan(above):
        return "no quality to compare with dense"
    if abs(above) < 0.0005:
        return "equal to dense"
    how_far = f"{abs(above):.3f}" if record.lower_is_better else f"{100 * abs(above):.1f} points"
    return f"{how_far} {'above' if above > 0 else 'below'} dense"
