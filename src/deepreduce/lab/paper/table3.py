"""Table 3: every method that the paper implements, on one recorded gradient."""

from __future__ import annotations

from dataclasses import asdict

from ...presets import TABLE_3
from ..bench.measure import Row, measure
from ..data import load
from .experiment import Experiment, Finding, Measurements, Result, Runs, decided
from .scales import Scale


def measurements(scale: Scale) -> Measurements:
    """Send the gradient by every method; `measure` refuses one that does not come back as promised."""
    gradient = load("resnet20")["l.8.c2.weight"]
    return {method: asdict(measure("convolution", gradient, spec, method, repeat=1)) for method, spec in TABLE_3.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """List the methods with their specs."""
    rows = {method: Row(**numbers) for method, numbers in measured.items()}
    table = [[method, row.spec, f"{row.relative_volume:.4f}", f"{row.codec_error:.4f}"] for method, row in rows.items()]
    finding = Finding(
        "Every method of Table 3 is implemented.", "11", decided(set(rows) == set(TABLE_3)), f"{len(rows)} methods came back as promised."
    )
    return Result(("method", "spec", "relative volume", "codec error"), table, [finding])


EXPERIMENT = Experiment("table3", "The implemented methods", "11", {"small": 0.5, "medium": 0.5, "full": 0.5}, show, measure=measurements)
