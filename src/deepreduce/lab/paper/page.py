"""The report of `deepreduce paper`: all claims first, then every figure and table with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..report.page import figures, page, section, table
from .conduct import Done
from .experiment import Finding, Result
from .scales import Scale

_CLAIMS = ("claim", "section", "verdict", "evidence")


def paper_page(scale: Scale, done: Sequence[Done], shown: Mapping[str, Result], origin: Mapping[str, Any]) -> str:
    """Return the whole page."""
    lead = (
        f"The evaluation of the DeepReduce paper at scale {scale.name}. Qualities within {100 * scale.margin:g} points of each other count "
        "as equal. The paper's curves are pictures: only numbers that it prints in text and tables stand beside ours. "
        f"{earlier_runs(done, origin)}"
    )
    sections = [section("All claims", _all_claims(done, shown)), *(_section(each, shown) for each in done)]
    return page("The paper's evaluation", lead, sections, origin)


def _all_claims(done: Sequence[Done], shown: Mapping[str, Result]) -> str:
    rows = [
        [each.experiment.name, *_cells(finding)[:3]]
        for each in done
        if not each.left_out
        for finding in shown[each.experiment.name].findings
    ]
    rows += [[each.experiment.name, "left out", "", each.left_out] for each in done if each.left_out]
    return table(("experiment", "claim", "section", "verdict"), rows)


def _section(done: Done, shown: Mapping[str, Result]) -> str:
    experiment = done.experiment
    title = f"{title_of(experiment.name)}: {experiment.title}"
    if done.left_out:
        return section(title, lead=f"Left out: {done.left_out}")
    result = shown[experiment.name]
    return section(
        title,
        figures(result.charts) if result.charts else "",
        table(result.columns, result.rows),
        "<h3>Claims</h3>",
        table(_CLAIMS, [_cells(finding) for finding in result.findings]),
        lead=f"Section {experiment.section} of the paper. {result.notes}",
    )


def earlier_runs(done: Sequence[Done], origin: Mapping[str, Any]) -> str:
    """Return a sentence that says when and where runs were trained that are not of this commit, day and machine."""
    others = {where(run.origin) for each in done for run in each.stored.values()} - {where(origin)}
    return f"Some runs were trained earlier: {'; '.join(sorted(others))}." if others else ""


def where(origin: Mapping[str, Any]) -> str:
    """Return the commit, the day and the machine of a run.

    >>> where({"commit": "c03072065827", "time": "2026-11-18T01:08:30+00:00", "machine": "2 cores, Linux"})
    'commit c03072065827, 2026-11-18, 2 cores, Linux'
    """
    return f"commit {origin['commit'] or 'unknown'}, {origin['time'][:10]}, {origin['machine']}"


def title_of(name: str) -> str:
    """Return the name of an experiment as the paper writes it.

    >>> title_of("figure15")
    'Figure 15'
    """
    kind = name.rstrip("0123456789")
    return f"{kind.capitalize()} {name.removeprefix(kind)}"


def _cells(finding: Finding) -> list[str]:
    return [finding.claim, finding.section, finding.verdict, finding.evidence]
