"""Finished runs in a folder, by their settings: what was trained once is not trained again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from ..report.plain import plain
from ..train.contract import Plan, RunRecord


class StoredRun(NamedTuple):
    """A record and its origin: what `provenance` said when it was trained, and the folder of its data."""

    record: RunRecord
    origin: Mapping[str, Any]


class RunStore:
    """Records of single runs, one file each. A file is written whole or not at all, so an interrupted run leaves none.

    Data sets are moved and copied, so a run is found again whatever folder its data lies in: a store is for one copy of the data.

    >>> import tempfile
    >>> plan = Plan("digits", "mlp", ("dense",), workers=2, batch=32, steps=10, evaluations=2, learning_rate=0.1)
    >>> RunStore(Path(tempfile.mkdtemp())).load(plan) is None
    True
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, plan: Plan) -> StoredRun | None:
        """Return the run of a plan with one spec, or None if it was not run yet."""
        try:
            stored = json.loads(self._path(plan).read_text())
        except FileNotFoundError:
            return None
        record = stored["record"]
        numbers = {name: _number(record[name]) for name in ("quality", "best_quality")}
        return StoredRun(RunRecord(**record | numbers), stored["provenance"])

    def save(self, plan: Plan, record: RunRecord, origin: Mapping[str, Any]) -> None:
        """Keep the record of a plan with one spec."""
        path = self._path(plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = plain({"settings": settings(plan), "record": asdict(record), "provenance": {**origin, "data": plan.data}})
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
        temporary.replace(path)

    def _path(self, plan: Plan) -> Path:
        key = hashlib.sha256(json.dumps(settings(plan), sort_keys=True).encode()).hexdigest()[:16]
        return self._folder / f"{plan.task}-{plan.model}-{key}.json"


def settings(plan: Plan) -> dict[str, Any]:
    """Return all that makes a run what it is, but for defaults: of the data, whether it is recorded, not the folder it lies in."""
    (spec,) = plan.specs
    defaults = {field.name: field.default for field in fields(plan)}
    chosen = {name: value for name, value in asdict(plan).items() if name not in ("specs", "data") and value != defaults[name]}
    return chosen | {"spec": spec, "recorded_data": plan.data is not None}


def _number(value: float | None) -> float:
    """JSON has no NaN."""
    return float("nan") if value is None else value
