"""Figure 9: DeepReduce on Top-r against stand-alone compressors, ResNet-50."""

from __future__ import annotations

from collections.abc import Mapping

from ..report.charts import Bar, stacked_bars
from ..report.quantity import in_percent
from ..train.contract import Plan
from .drawings import scatter
from .experiment import UNTOLD, Experiment, Finding, Measurements, Result, Runs, as_good, is_rated, sentence, told
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
    """Draw volume against accuracy, or volume alone where there is none, and judge section 6.3."""
    rated = is_rated(found["Baseline"])
    rows = [
        [method, run.spec, in_percent(run.quality) if rated else "–", f"{run.relative_volume:.4f}", f"{run.steps:,}"]
        for method, run in found.items()
    ]
    notes = f"{found['Baseline'].parameters:,} parameters. {sentence(found['Baseline'].data_note)}"
    columns = ("method", "spec", "accuracy", "relative volume", "steps")
    return Result(columns, rows, [_balance(scale, found)], [("Relative volume", _chart(found, rated))], notes)


def _chart(found: Runs, rated: bool) -> str:
    if rated:
        points = {method: (run.relative_volume, run.quality) for method, run in found.items()}
        return scatter("Figure 9", points, "relative data volume", "top-1 accuracy")
    bars = [Bar(method, {"message": run.relative_volume}, f"{run.relative_volume:.4f}") for method, run in found.items()]
    return stacked_bars("Figure 9", bars, ("message",))


def _balance(scale: Scale, found: Runs) -> Finding:
    claim = "DeepReduce balances volume and accuracy, where each stand-alone method is biased to one of them."
    volumes = {method: found[method].relative_volume for method in (*OURS, *ALONE)}
    evidence = f"volumes: {', '.join(f'{method} {volume:.4f}' for method, volume in volumes.items())}"
    if not is_rated(found["Baseline"]):
        return Finding(claim, "6.3", UNTOLD, f"{evidence}; accuracy means something only after epochs on the images of ImageNet.")
    qualities = {method: run.quality for method, run in found.items()}
    ours = all(as_good(scale, qualities[method], qualities["Baseline"]) for method in OURS)
    biased = all(
        volumes[each] > max(volumes[one] for one in OURS) or not as_good(scale, qualities[each], qualities["BF-P2"]) for each in ALONE
    )
    evidence += f"; accuracies: {', '.join(f'{method} {in_percent(each)}' for method, each in qualities.items())}"
    return Finding(claim, "6.3", told(scale, ours and biased), f"{evidence}.")


EXPERIMENT = Experiment(
    "figure9",
    "DeepReduce against stand-alone compressors, ResNet-50 on ImageNet",
    "6.3",
    {"small": 1.5, "medium": 60, "full": 600_000},
    show,
    runs,
)
