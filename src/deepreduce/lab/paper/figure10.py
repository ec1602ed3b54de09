"""Figure 10: volume by section, and time, of every method on one convolution gradient of ResNet-20."""

from __future__ import annotations

from dataclasses import asdict

from ..bench.measure import Row, measure
from ..bench.specs import FIGURE_10
from ..data import load
from ..report.benchmark_page import volume_chart
from ..report.charts import Bar, log_bars
from ..report.quantity import in_seconds
from . import figure8, printed
from .experiment import Experiment, Finding, Measurements, Result, Runs, decided
from .scales import Scale

_REPEATS = {"small": 20, "medium": 50, "full": 200}
METHODS = FIGURE_10 | {"BF-P0 + QSGD": "topr:0.01/bloom:p0,fpr=0.001/qsgd"}


def measurements(scale: Scale) -> Measurements:
    """Measure every method on the recorded gradient, of 36,864 elements as in the paper."""
    gradient = load("resnet20")["l.8.c2.weight"]
    return {method: asdict(measure("convolution", gradient, spec, method, _REPEATS[scale.name])) for method, spec in METHODS.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw both parts and judge sections 6.2 to 6.4."""
    rows = {method: Row(**numbers) for method, numbers in measured.items()}
    table = [
        [method, f"{row.relative_volume:.4f}", f"{row.codec_error:.4f}", in_seconds(_seconds(row)), _paper_code(method)]
        for method, row in rows.items()
    ]
    columns = ("method", "relative volume", "codec error", "encode + decode", "the authors' code")
    charts = [
        ("(a) Data volume relative to dense", volume_chart(list(rows.values()))),
        ("(b) Encoding and decoding, logarithmic", _time_chart(rows)),
    ]
    saved = {method: 1 - rows[method].nbytes / rows["Top-r"].nbytes for method in figure8.FITS}
    findings = [_fewer(rows), _best(rows), *figure8.volumes(saved), _slower_fit(rows), *_skcompress(rows)]
    notes = "The authors' code was measured anew on one core of a CPU; the paper's own times, some of them of a GPU, are a picture."
    return Result(columns, table, findings, charts, notes)


def _seconds(row: Row) -> float:
    return (row.encode_seconds or 0.0) + (row.decode_seconds or 0.0)


def _paper_code(method: str) -> str:
    return in_seconds(printed.PAPER_CODE_SECONDS.get(method))


def _time_chart(rows: dict[str, Row]) -> str:
    bars = [
        Bar(method, {"encode + decode": _seconds(row), "the authors' code": printed.PAPER_CODE_SECONDS.get(method, 0.0)})
        for method, row in rows.items()
    ]
    return log_bars("Figure 10b", bars, ("encode + decode", "the authors' code"), in_seconds)


def _fewer(rows: dict[str, Row]) -> Finding:
    plain = rows["Top-r"].relative_volume
    more = [method for method, row in rows.items() if method != "Top-r" and row.relative_volume >= plain]
    others = [row.relative_volume for method, row in rows.items() if method != "Top-r"]
    evidence = f"Top-r {plain:.4f}, the others {min(others):.4f} to {max(others):.4f}"
    return Finding("All instances send fewer data than plain Top-r.", "6.4", decided(not more), f"{evidence}.")


def _best(rows: dict[str, Row]) -> Finding:
    best = min(rows, key=lambda method: rows[method].nbytes)
    evidence = f"least is {best} with {rows[best].relative_volume:.4f}; SKCompress has {rows['SKCompress'].relative_volume:.4f}"
    return Finding("SKCompress sends the least on this gradient.", "6.4", decided(best == "SKCompress"), f"{evidence}.")


def _slower_fit(rows: dict[str, Row]) -> Finding:
    ratio = _seconds(rows["Fit-DExp"]) / _seconds(rows["Fit-Poly"])
    claim = f"Fit-DExp takes {printed.FIT_DEXP_SLOWER} times as long as Fit-Poly."
    return Finding(claim, printed.FIT_DEXP_SLOWER.section, decided(ratio > 2), f"{ratio:.1f} times as long here.")


def _skcompress(rows: dict[str, Row]) -> list[Finding]:
    beside = (("BF-P0 + QSGD", printed.SKCOMPRESS_SLOWER_THAN_P0_QSGD), ("QSGD", printed.SKCOMPRESS_SLOWER_THAN_QSGD))
    findings = []
    for method, paper in beside:
        ratio = _seconds(rows["SKCompress"]) / _seconds(rows[method])
        evidence = f"{ratio:.1f} times as long here, both compiled for one core; the paper has QSGD on a GPU and SKCompress in Python"
        claim = f"SKCompress takes {paper} times as long as {method}."
        findings.append(Finding(claim, paper.section, decided(ratio > paper.value / 3), f"{evidence}."))
    return findings


EXPERIMENT = Experiment(
    "figure10",
    "Volume and time of every method on the top 1% of one gradient (36,864 elements)",
    "6.4",
    {"small": 0.5, "medium": 2, "full": 5},
    show,
    measure=measurements,
)
