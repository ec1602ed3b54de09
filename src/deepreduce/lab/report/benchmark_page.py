"""The report of `deepreduce bench`: for each gradient the two pictures of the paper's Figure 10, and the table behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from .charts import Bar, log_bars, stacked_bars
from .page import figures, page, section, table
from .quantity import in_bytes, in_seconds

if TYPE_CHECKING:
    from ..bench.measure import Row

_SECTIONS = ("header", "index", "order", "value")
_COLUMNS = ("method", "bytes", "of dense", *_SECTIONS, "bits/index", "bits/value", "error", "codec error", "encode", "decode")
_PARTS = ("value", "index", "order", "header")


def benchmark_page(rows: Sequence[Row], origin: Mapping[str, Any]) -> str:
    """The whole page."""
    names = list(dict.fromkeys(row.gradient for row in rows))
    sections = [_section(name, [row for row in rows if row.gradient == name]) for name in names]
    lead = (
        "Volume and time of every method on every gradient. Every round trip was checked before it was timed; times are the best of "
        "several runs. The error is the distance from the whole gradient, relative to its norm; the codec error counts what was sent only: "
        "what the codecs changed, without what the sparsifier left out."
    )
    return page("deepreduce bench", lead, sections, origin)


def volume_chart(rows: Sequence[Row]) -> str:
    """Figure 10a: bytes by section, relative to the dense gradient."""
    bars = [
        Bar(_title(row), {part: getattr(row, f"{part}_bytes") / (row.dense_bytes or 1) for part in _PARTS}, f"{row.relative_volume:.2%}")
        for row in rows
    ]
    return stacked_bars("Data volume relative to the dense gradient", bars, _PARTS)


def time_chart(rows: Sequence[Row]) -> str:
    """Figure 10b: encoding and decoding, logarithmic."""
    bars = [Bar(_title(row), {"encode": row.encode_seconds or 0, "decode": row.decode_seconds or 0}) for row in rows if row.encode_seconds]
    return log_bars("Encoding and decoding time", bars, ("encode", "decode"), in_seconds)


def _section(name: str, rows: Sequence[Row]) -> str:
    sparse = [row for row in rows if row.relative_volume < 0.25]
    left_out = [row.method for row in rows if row not in sparse]
    volume = [("Data volume, relative to dense", volume_chart(sparse))] if sparse else []
    charts = figures([*volume, ("Encoding and decoding time, logarithmic", time_chart(rows))])
    note = f" Over a quarter of dense, and so not among the volume bars: {', '.join(left_out)}." if left_out else ""
    lead = f"{rows[0].numel:,} elements, {in_bytes(rows[0].dense_bytes)} dense.{note}"
    return section(name, charts, table(_COLUMNS, [_cells(row) for row in rows]), lead=lead)


def _title(row: Row) -> str:
    return row.spec if row.method == row.spec else f"{row.method}: {row.spec}"


def _cells(row: Row) -> list[str]:
    return [
        _title(row),
        f"{row.nbytes:,}",
        f"{row.relative_volume:.2%}",
        *(f"{getattr(row, f'{part}_bytes'):,}" for part in _SECTIONS),
        f"{row.bits_per_index:.2f}",
        f"{row.bits_per_value:.2f}",
        *("–" if isnan(error) else f"{error:.4f}" for error in (row.relative_error, row.codec_error)),
        in_seconds(row.encode_seconds),
        in_seconds(row.decode_seconds),
    ]
