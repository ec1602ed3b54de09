"""Time to quality: when each run was as good as dense training at its end, or as a target, and what a slow link makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from ..report.quantity import in_bytes, in_seconds
from .contract import RunRecord
from .links import parse_rate


@dataclass(frozen=True)
class Arrival:
    """The first evaluation at which a run was as good as was wanted."""

    step: int
    seconds: float
    bytes_sent: float

    def __str__(self) -> str:
        return f"{in_seconds(self.seconds)}, {in_bytes(self.bytes_sent)}"


def dense_run(records: Sequence[RunRecord]) -> RunRecord | None:
    """Return the dense run, if there is one."""
    return next((record for record in records if record.spec == "dense"), None)


def arrival(record: RunRecord, wanted: float, rate: str | None = None) -> Arrival | None:
    """Return when a run reached a quality, None if it did not; with a `rate`, as it would be on a link of it."""
    for point in record.curve:
        if record.reaches(point["quality"], wanted):
            return Arrival(int(point["step"]), seconds_at(record, point, rate), point["bytes_sent"])
    return None


def seconds_at(record: RunRecord, point: dict[str, float], rate: str | None = None) -> float:
    """Return the seconds until an evaluation: as measured, or computed for a link of a rate.

    Computed are those that were not spent with communication, and the time that the link is busy with what was sent until then; NaN where
    the seconds of communication are not known.
    """
    if rate is None:
        return point["seconds"]
    total, communication = record.seconds["total"], record.seconds["communication"]
    if isnan(communication):
        return nan
    computing = 1 - min(1.0, communication / total) if total else 1.0
    return computing * point["seconds"] + 8 * point["bytes_sent"] / parse_rate(rate)
