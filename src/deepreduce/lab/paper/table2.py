"""Table 2: a model whose gradients are sparse by themselves. On MovieLens-1M, which at this batch has the paper's share of zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from ..bench.measure import Row, measure
from ..report.quantity import in_percent
from ..train.contract import Plan
from . import printed
from .experiment import UNTOLD, Experiment, Finding, Measurements, Result, Runs, as_good, decided, is_rated, sentence, told
from .scales import Scale, planned

SPECS = {
    "Baseline": "dense",
    "BF-P2 + Fit-Poly": "nonzero/bloom:p2,fpr=0.01/fitpoly:degree=5,block=2147483648",
    "SKCompress": "nonzero/deltahuffman/sketch:bits=7,huffman=true",
    "BF-P0 + QSGD": "nonzero/bloom:p0,fpr=0.6/qsgd:7",
}


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return the baseline and the three methods with the paper's settings, without error feedback."""
    task = "ml20m" if scale.name == "full" else "ml1m"
    return {method: planned(task, "neumf", spec, scale.ncf, memory="none") for method, spec in SPECS.items()}


def measurements(scale: Scale) -> Measurements:
    """Measure the methods on a support without rows as well: 60% of a million positions, at random."""
    draw = np.random.default_rng(0)
    gradient = np.where(draw.random(1_000_000) < 0.6, draw.standard_normal(1_000_000), 0).astype(np.float32)
    return {method: asdict(measure("uniform", gradient, spec, method, repeat=1)) for method, spec in SPECS.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Put volumes and hit rates beside those of the paper."""
    rows = []
    for method, run in found.items():
        volume, hit_rate = printed.TABLE_2[method]
        volumes = run.relative_volume, Row(**measured[method]).relative_volume, volume.value
        reached = f"{run.best_quality:.4f}" if is_rated(run) else "–"
        rows.append([method, run.spec, *(f"{volume:.4f}" for volume in volumes), reached, f"{hit_rate.value:.4f}"])
    columns = ("method", "spec", "relative volume", "on a uniform support", "paper", "best hit rate", "paper, ML-20M")
    zeros = found["Baseline"].gradient_zeros
    notes = (
        f"{in_percent(zeros)} of a gradient's elements are zero; the paper has roughly {in_percent(printed.NCF_ZEROS.value)}. The paper "
        f"ranks on MovieLens-20M, where hit rates are higher for every method. {sentence(found['Baseline'].data_note)}"
    )
    return Result(columns, rows, [_volumes(found), _ranking(found, measured), _hit_rates(scale, found)], notes=notes)


def _volumes(found: Runs) -> Finding:
    near = {
        method: abs(found[method].relative_volume / printed.TABLE_2[method][0].value - 1) for method in ("BF-P2 + Fit-Poly", "BF-P0 + QSGD")
    }
    evidence = ", ".join(
        f"{method} {found[method].relative_volume:.4f} (printed {printed.TABLE_2[method][0].value:.4f})" for method in near
    )
    return Finding("BF-P0 + QSGD sends 0.2063 of dense, BF-P2 + Fit-Poly 0.5879.", "6.3", decided(max(near.values()) < 0.1), f"{evidence}.")


def _ranking(found: Runs, measured: Measurements) -> Finding:
    ours, theirs = found["BF-P0 + QSGD"].relative_volume, found["SKCompress"].relative_volume
    keys = Row(**measured["SKCompress"])
    evidence = (
        f"BF-P0 + QSGD {ours:.4f}, SKCompress {theirs:.4f}. Non-zeros of embeddings come in whole rows: most gaps between keys are 1 and "
        f"take about one bit each by Huffman codes. On a uniform support it is {keys.bits_per_index:.2f} bits per key, and SKCompress "
        f"{keys.relative_volume:.4f} in all; the paper's 0.2175 leaves 4.6 bits per key beside 7 per value"
    )
    return Finding("BF-P0 + QSGD sends less than SKCompress.", "6.3", decided(ours < theirs), f"{evidence}.")


def _hit_rates(scale: Scale, found: Runs) -> Finding:
    claim = "All methods reach virtually the same hit rate."
    if not is_rated(found["Baseline"]):
        return Finding(claim, "6.3", UNTOLD, "Hit rates mean something on recorded interactions only.")
    rates = {method: run.best_quality for method, run in found.items()}
    near = all(as_good(scale, rate, rates["Baseline"]) for rate in rates.values())
    evidence = ", ".join(f"{method} {in_percent(rate)}" for method, rate in rates.items())
    return Finding(claim, "6.3", told(scale, near), f"{evidence}.")


EXPERIMENT = Experiment(
    "table2", "An inherently sparse model: NCF", "6.3", {"small": 9, "medium": 40, "full": 10_000}, show, runs, measurements
)
