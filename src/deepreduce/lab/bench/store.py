"""Rows to files: CSV for a spreadsheet, JSON for everything else."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from ..report.plain import plain
from .measure import Row

_DERIVED = ("relative_volume", "encode_mb_per_second", "decode_mb_per_second")


def as_record(row: Row) -> dict[str, Any]:
    """Return all columns of a row; numbers that do not exist are None, infinite ones the text "inf".

    >>> from deepreduce.lab.bench.measure import measure
    >>> import numpy as np
    >>> as_record(measure("ones", np.ones(64, np.float32), "dense", repeat=1))["bits_per_value"]
    32.0
    """
    columns = dataclasses.asdict(row) | {name: getattr(row, name) for name in _DERIVED}
    record: dict[str, Any] = plain({name: "inf" if value == inf else value for name, value in columns.items()})
    return record


def write_json(path: Path, rows: Sequence[Row], origin: Mapping[str, Any]) -> None:
    """Write where the numbers come from, and the rows."""
    path.write_text(json.dumps({"provenance": origin, "rows": [as_record(row) for row in rows]}, indent=1) + "\n")


def write_csv(path: Path, rows: Sequence[Row], origin: Mapping[str, Any]) -> None:
    """Write one line per row; each carries the commit, the machine and the versions it was measured with."""
    versions = " ".join(f"{name}={version}" for name, version in origin["versions"].items())
    source = {"commit": origin["commit"], "machine": origin["machine"], "versions": versions, "time": origin["time"]}
    records = [as_record(row) | source for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]) if records else [])
        writer.writeheader()
        writer.writerows(records)
