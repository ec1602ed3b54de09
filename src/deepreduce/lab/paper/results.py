"""What came of the experiments, for programs: JSON with everything, CSV with one line per run or measurement."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..report.plain import plain
from .conduct import Done
from .experiment import Result
from .store import StoredRun

_NUMBERS = ("quality", "best_quality", "relative_volume", "message_bytes", "gradient_bytes", "bytes_sent", "bytes_dense", "gradient_zeros")
_PARTS = ("total", "forward_backward", "encode", "decode", "communication", "waiting")
_TIMES = (*(f"seconds_{part}" for part in _PARTS), "encode_seconds", "decode_seconds")
_SIZES = ("parameters", "steps", "steps_per_epoch", "numel", "nnz", "dense_bytes", "nbytes", "relative_error", "codec_error")
_SOURCE = ("replicas_identical", "data_note", "data", "commit", "machine", "time")
_COLUMNS = ("experiment", "method", "spec", "metric", *_NUMBERS, *_SIZES, *_TIMES, *_SOURCE)


def as_json(scale: str, done: Sequence[Done], shown: Mapping[str, Result], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return runs with their origins, measurements, tables and findings of all experiments; those left out with the reason."""
    return {"scale": scale, "provenance": dict(origin), "experiments": {each.experiment.name: _one(each, shown) for each in done}}


def _one(done: Done, shown: Mapping[str, Result]) -> dict[str, Any]:
    if done.left_out:
        return {"title": done.experiment.title, "left_out": done.left_out}
    result = shown[done.experiment.name]
    return {
        "title": done.experiment.title,
        "section": done.experiment.section,
        "findings": [asdict(finding) for finding in result.findings],
        "table": {"columns": list(result.columns), "rows": [list(row) for row in result.rows]},
        "runs": {method: _numbers(run) | {"provenance": dict(run.origin)} for method, run in done.stored.items()},
        "measurements": {method: dict(numbers) for method, numbers in done.measurements.items()},
    }


def write(folder: Path, scale: str, done: Sequence[Done], shown: Mapping[str, Result], origin: Mapping[str, Any]) -> None:
    """Write paper.json and paper.csv."""
    whole = plain(as_json(scale, done, shown, origin))
    (folder / "paper.json").write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    with (folder / "paper.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore", restval="")
        writer.writeheader()
        for each in done:
            for method, run in each.stored.items():
                writer.writerow({"experiment": each.experiment.name, "method": method} | _flat(run))
            for method, numbers in each.measurements.items():
                writer.writerow({"experiment": each.experiment.name, "method": method} | dict(numbers) | dict(origin))


def _numbers(run: StoredRun) -> dict[str, Any]:
    return asdict(run.record) | {"relative_volume": run.record.relative_volume}


def _flat(run: StoredRun) -> dict[str, Any]:
    seconds = {f"seconds_{part}": value for part, value in run.record.seconds.items()}
    return _numbers(run) | seconds | dict(run.origin)
