"""The results as a page of Markdown with its figures beside it, for documentation: numbers are written by the command, never by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .conduct import Done
from .experiment import Result
from .page import earlier_runs, title_of, where
from .scales import Scale

FIGURES = "figures"


def write_markdown(folder: Path, scale: Scale, done: Sequence[Done], shown: Mapping[str, Result], origin: Mapping[str, Any]) -> None:
    """Write paper.md and a folder of SVG files that it shows."""
    (folder / FIGURES).mkdir(exist_ok=True)
    for name, result in shown.items():
        for number, (_, chart) in enumerate(result.charts, start=1):
            (folder / FIGURES / f"{name}-{number}.svg").write_text(f"{chart}\n")
    (folder / "paper.md").write_text("\n\n".join(_parts(scale, done, shown, origin)) + "\n")


def _parts(scale: Scale, done: Sequence[Done], shown: Mapping[str, Result], origin: Mapping[str, Any]) -> list[str]:
    lead = (
        f"Written by `deepreduce paper ... --scale {scale.name}`: {where(origin)}. Qualities within {100 * scale.margin:g} points of each "
        f"other count as equal. {earlier_runs(done, origin)}"
    )
    parts = [
        f"# The paper's evaluation at scale `{scale.name}`",
        lead.strip(),
        table_of(("experiment", "claim", "verdict", "evidence"), _claims(done, shown)),
    ]
    for each in done:
        if not each.left_out:
            parts += _section(each, shown[each.experiment.name])
    return parts


def _claims(done: Sequence[Done], shown: Mapping[str, Result]) -> list[list[str]]:
    rows = [
        [title_of(name), f"{finding.claim} ({finding.section})", f"**{finding.verdict}**", finding.evidence]
        for name, result in shown.items()
        for finding in result.findings
    ]
    return rows + [[title_of(each.experiment.name), "", "left out", each.left_out] for each in done if each.left_out]


def _section(done: Done, result: Result) -> list[str]:
    name = done.experiment.name
    images = [f"![{title}]({FIGURES}/{name}-{number}.svg)" for number, (title, _) in enumerate(result.charts, start=1)]
    heading = f"## {title_of(name)}: {done.experiment.title}"
    return [heading, *([result.notes.strip()] if result.notes.strip() else []), *images, table_of(result.columns, result.rows)]


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table.

    >>> print(table_of(("codec", "bytes"), [("a|b", "90")]))
    | codec | bytes |
    |---|---|
    | a\\|b | 90 |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "|".join(_cell(cell, number == 1) for cell in line) + "|" for number, line in enumerate(lines))


def _cell(text: str, rule: bool) -> str:
    return text if rule else f" {' '.join(text.split()).replace('|', chr(92) + '|')} "
