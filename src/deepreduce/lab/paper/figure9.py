"""Figure 9: DeepReduce on Top-r against stand-alone compressors, ResNet-50."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from ..report.charts import Bar, stacked_bars
from ..train.contract import Plan
from .drawings import scatter
from .experiment import UNTOLD, Experiment, Finding, Measurements, Result, Runs, as_good, decided, percent, told
from .scales import Scale, planned

SPECS = {
    "Baseline": "dense",
    "BF-P2": "topr:0.01/bloom:p2,fpr=0.001/raw",
    "Fit-Poly": "topr:0.01/raw/fitpoly:degree=5",
    "3LC": "none/all/threelc:s=1",
    "SketchML": "nonzero/delta/sketch:bits=6",
}
OURS, ALONE = ("BF-P2", "Fit-Poly"), ("3LC", "SketchML")


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return the baseline, two instances of DeepReduce on the largest 1%, and two compressors of the whole gradient."""
    return {method: planned("imagenet", "resnet50", spec, scale.imagenet) for method, spec in SPECS.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw volume against accuracy, or volume alone for made images, and judge section 6.3."""
    made = found["Baseline"].data_note
    rows = [
        [method, run.spec, "–" if made or isnan(run.quality) else percent(run.quality), f"{run.relative_volume:.4f}", f"{run.steps:,}"]
        for method, run in found.items()
    ]
    points = {method: (run.relative_volume, run.quality) for method, run in found.items()}
    bars = [Bar(method, {"message": run.relative_volume}, f"{run.relative_volume:.4f}") for method, run in found.items()]
    drawn = stacked_bars("Figure 9", bars, ("message",)) if made else scatter("Figure 9", points, "relative data volume", "top-1 accuracy")
    notes = f"{found['Baseline'].parameters:,} parameters. {made.capitalize()}." if made else ""
    columns = ("method", "spec", "accuracy", "relative volume", "steps")
    return Result(columns, rows, [_volume(found), _balance(scale, found)], [("Relative volume", drawn)], notes)


def _volume(found: Runs) -> Finding:
    volumes = {method: found[method].relative_volume for method in (*OURS, *ALONE)}
    less = max(volumes[method] for method in OURS) < min(volumes[method] for method in ALONE)
    evidence = ", ".join(f"{method} {volume:.4f}" for method, volume in volumes.items())
    return Finding("DeepReduce on Top-r sends less than the stand-alone methods.", "6.3", decided(less), f"{evidence}.")


def _balance(scale: Scale, found: Runs) -> Finding:
    claim = "DeepReduce balances volume and accuracy, where each stand-alone method is biased to one of them."
    if found["Baseline"].data_note:
        return Finding(claim, "6.3", UNTOLD, "There is no accuracy without the images of ImageNet (--data).")
    qualities = {method: run.quality for method, run in found.items()}
    true = all(as_good(scale, qualities[method], qualities["Baseline"]) for method in OURS)
    return Finding(claim, "6.3", told(scale, true), f"{', '.join(f'{method} {percent(each)}' for method, each in qualities.items())}.")


EXPERIMENT = Experiment(
    "figure9",
    "DeepReduce against stand-alone compressors, ResNet-50 on ImageNet",
    "6.3",
    {"small": 3, "medium": 60, "full": 600_000},
    show,
    runs,
)
