"""Figure 8: how fast the two curve fits converge."""

from __future__ import annotations

from collections.abc import Mapping

from ..report.quantity import in_percent
from ..report.training_page import quality_by_epochs
from ..train.contract import Plan
from . import printed
from .experiment import Experiment, Finding, Measurements, Result, Runs, as_good, decided, mean_quality, told
from .scales import Scale, planned

SPECS = {
    "Baseline": "dense",
    "Top-r": "topr:0.01/raw/raw",
    "Fit-Poly": "topr:0.01/raw/fitpoly:degree=5",
    "Fit-DExp": "topr:0.01/raw/fitdexp",
}
FITS = ("Fit-Poly", "Fit-DExp")


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return the baseline, Top-r and both fits on Top-r."""
    return {method: planned("cifar10", "resnet20", spec, scale.cifar10) for method, spec in SPECS.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw accuracy against epochs and judge what section 6.2 says of it."""
    columns = ("method", "accuracy at the end", "mean of all evaluations", "relative volume")
    rows = [[method, in_percent(run.quality), in_percent(mean_quality(run)), f"{run.relative_volume:.4f}"] for method, run in found.items()]
    saved = {method: 1 - found[method].relative_volume / found["Top-r"].relative_volume for method in FITS}
    findings = [_end(scale, found), _speed(scale, found), *volumes(saved)]
    chart = quality_by_epochs(list(found.values()), list(found))
    return Result(columns, rows, findings, [("Convergence", chart)])


def _end(scale: Scale, found: Runs) -> Finding:
    baseline = found["Baseline"].quality
    evidence = f"baseline {in_percent(baseline)}; {', '.join(f'{method} {in_percent(found[method].quality)}' for method in FITS)}"
    reached = all(as_good(scale, found[method].quality, baseline) for method in FITS)
    return Finding("Both fits reach the accuracy of the baseline.", "6.2", told(scale, reached), f"{evidence}.")


def _speed(scale: Scale, found: Runs) -> Finding:
    means = {method: mean_quality(run) for method, run in found.items()}
    evidence = f"mean accuracy of all evaluations: {', '.join(f'{method} {in_percent(mean)}' for method, mean in means.items())}"
    faster = all(means[method] > means["Top-r"] + scale.margin / 2 for method in FITS)
    return Finding("Both fits converge in fewer steps than plain Top-r.", "6.2", told(scale, faster), f"{evidence}.")


def volumes(saved: Mapping[str, float]) -> list[Finding]:
    """Judge how much less than plain Top-r the fits send."""
    wanted = {"Fit-Poly": printed.FIT_POLY_SAVING, "Fit-DExp": printed.FIT_DEXP_SAVING}
    evidence = ", ".join(f"{method} saves {in_percent(saved[method])} (printed {in_percent(wanted[method].value)})" for method in FITS)
    near = all(abs(saved[method] - wanted[method].value) < 0.1 for method in FITS)
    less = saved["Fit-DExp"] > saved["Fit-Poly"]
    return [
        Finding("Fit-Poly sends roughly 40% and Fit-DExp 50% fewer data than plain Top-r.", "6.2", decided(near), f"{evidence}."),
        Finding("Fit-DExp sends fewer data than Fit-Poly.", "6.2", decided(less), f"{evidence}; both send next to nothing but keys."),
    ]


EXPERIMENT = Experiment(
    "figure8", "Convergence of the value compressors, ResNet-20 on CIFAR-10", "6.2", {"small": 2, "medium": 45, "full": 33_000}, show, runs
)
