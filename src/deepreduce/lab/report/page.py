"""The frame of a report: title, tables and figures in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color: #1a1a1a; background: #fff; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
body { margin: 0 auto; padding: 16px; max-width: 1200px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .4em 0; }
h2 { font-size: 1.2rem; margin: 1.8em 0 .4em; border-bottom: 2px solid #1a1a1a; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: .2em 0 .6em; }
p { max-width: 75ch; margin: .5em 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 24px 40px; margin: 16px 0; }
figure { margin: 0; min-width: 0; max-width: 560px; }
figure svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 8px; text-align: right; border-bottom: 1px solid #c9ced6; }
th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
code { font: .92em/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: .875rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 800px) {
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 20px; padding: 10px 0; border-bottom: 1px solid #1a1a1a; }
  td, td:first-child { display: flex; justify-content: space-between; gap: 6px; padding: 1px 0; border: 0; font-size: .8rem; }
  td::before { content: attr(data-title); color: #555; }
  td { white-space: nowrap; }
  td:first-child { font-weight: 600; font-size: .9rem; grid-column: 1 / -1; white-space: normal; }
  td:first-child::before { content: none; }
}
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""


def page(title: str, lead: str, sections: Sequence[str], origin: Mapping[str, Any]) -> str:
    """A whole HTML document that needs nothing from outside."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(lead)}</p>\n"
        + "\n".join(sections)
        + _origin(origin)
        + "</body></html>\n"
    )


def section(title: str, *parts: str, lead: str = "") -> str:
    """A heading with what belongs to it."""
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(lead)}</p>' if lead else ''}{''.join(parts)}</section>"


def figures(charts: Sequence[tuple[str, str]]) -> str:
    """Charts with their titles: side by side where there is room, one below the other on a phone."""
    drawn = (f"<figure><h3>{escape(title)}</h3>{chart}</figure>" for title, chart in charts)
    return f'<div class="figures">{"".join(drawn)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; on a phone each row becomes a card.

    >>> "<td" in table(["codec", "bytes"], [["dense", "90"]])
    True
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(columns: Sequence[str], row: Sequence[str]) -> str:
    return "".join(f'<td data-title="{escape(column)}">{escape(cell)}</td>' for column, cell in zip(columns, row, strict=True))


def _origin(origin: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    facts = {"machine": origin["machine"], "versions": versions, "commit": origin["commit"] or "not in a git tree", "time": origin["time"]}
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return section("Where these numbers come from", f"<dl>{listed}</dl>")
