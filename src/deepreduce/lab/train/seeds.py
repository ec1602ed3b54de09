"""Runs of several seeds as one: the mean of their numbers, and how far they spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from statistics import fmean, stdev

from .contract import RunRecord


def averaged(records: Sequence[RunRecord]) -> RunRecord:
    """Return the mean of runs of one spec that differ in their seeds; replicas are identical if they were in all of them."""
    if len(records) == 1:
        return records[0]
    return replace(
        records[0],
        quality=fmean(record.quality for record in records),
        best_quality=fmean(record.best_quality for record in records),
        bytes_sent=round(fmean(record.bytes_sent for record in records)),
        message_bytes=round(fmean(record.message_bytes for record in records)),
        seconds=_mean([record.seconds for record in records]),
        replicas_identical=all(record.replicas_identical for record in records),
        stolen_share=fmean(record.stolen_share for record in records),
        losses=[(step, fmean(losses)) for step, losses in _by_step(records).items()],
        curve=[_mean(points) for points in zip(*(record.curve for record in records), strict=True)],
    )


def by_spec(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the runs of each spec, in the order in which they were first run."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(record.spec, []).append(record)
    return found


def spread(numbers: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds: None for one, NaN where a number is not finite.

    >>> spread([1.0, 3.0]), spread([1.0]), spread([1.0, nan])
    (1.4142135623730951, None, nan)
    """
    if len(numbers) < 2:
        return None
    return stdev(numbers) if all(map(isfinite, numbers)) else nan


def _mean(points: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(point[name] for point in points) for name in points[0]}


def _by_step(records: Sequence[RunRecord]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in records:
        for step, loss in record.losses:
            found.setdefault(step, []).append(loss)
    return found
