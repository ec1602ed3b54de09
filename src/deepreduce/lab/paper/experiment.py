"""What a figure or table is made of: runs or measurements, a drawing, and claims with a verdict each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Literal

from ..train.contract import Plan, RunRecord
from .scales import Scale

Verdict = Literal["holds", "does not hold", "cannot be told at this scale"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNTOLD: Verdict = "cannot be told at this scale"

Runs = Mapping[str, RunRecord]
Measurements = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and what we found: one sentence of evidence, with numbers."""

    claim: str
    section: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Result:
    """What a reader sees of an experiment. `charts` are titles with SVG text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    findings: Sequence[Finding]
    charts: Sequence[tuple[str, str]] = ()
    notes: str = ""


def nothing_to_train(scale: Scale) -> Mapping[str, Plan]:
    """Return no runs: some experiments measure codecs only."""
    return {}


def nothing_to_measure(scale: Scale) -> Measurements:
    """Return no measurements: most experiments train."""
    return {}


@dataclass(frozen=True)
class Experiment:
    """One figure or table. `runs` are plans of one spec each, by the paper's name of the method.

    `minutes` is the time on two cores of what an experiment does not share with those before it in the catalogue.
    """

    name: str
    title: str
    section: str
    minutes: Mapping[str, float]
    show: Callable[[Scale, Runs, Measurements], Result]
    runs: Callable[[Scale], Mapping[str, Plan]] = nothing_to_train
    measure: Callable[[Scale], Measurements] = nothing_to_measure
    needs: Sequence[str] = field(default=())


# Verdicts


def told(scale: Scale, true: bool) -> Verdict:
    """Return the verdict on a claim about quality: a short run may confirm it, but not refute it.

    >>> from .scales import SMALL, MEDIUM
    >>> told(SMALL, False), told(MEDIUM, False)
    ('cannot be told at this scale', 'does not hold')
    """
    return HOLDS if true else FAILS if scale.decides else UNTOLD


def decided(true: bool) -> Verdict:
    """Return the verdict on a claim about bytes or seconds, which any scale decides."""
    return HOLDS if true else FAILS


def is_rated(run: RunRecord) -> bool:
    """Return whether the quality of a run means something: it was measured, and on recorded data."""
    return not run.data_note and not isnan(run.quality)


def as_good(scale: Scale, quality: float, reference: float) -> bool:
    """Return whether a quality is no more than the margin below another."""
    return quality >= reference - scale.margin


def mean_quality(record: RunRecord) -> float:
    """Return the mean of all evaluations of a run: of two runs that end alike, the faster one has more."""
    return sum(point["quality"] for point in record.curve) / max(len(record.curve), 1)


def sentence(note: str) -> str:
    """Return a note as a sentence of its own.

    >>> sentence("made on the fly"), sentence("")
    ('Made on the fly.', '')
    """
    return f"{note[0].upper()}{note[1:]}." if note else ""
