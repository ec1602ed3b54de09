"""Figure 15: volume against accuracy of the Bloom filter policies, on ResNet-20 and DenseNet40."""

from __future__ import annotations

from collections.abc import Mapping

from ..report.quantity import in_percent
from ..train.contract import Plan
from .drawings import scatter
from .experiment import Experiment, Finding, Measurements, Result, Runs, as_good, told
from .scales import Scale, planned

POLICIES = {"BF-Naive": "naive", "BF-P0": "p0", "BF-P1": "p1", "BF-P2": "p2"}
MODELS = {"ResNet-20": ("resnet20", 0.01), "DenseNet40": ("densenet40", 0.005)}


def specs(ratio: float) -> dict[str, str]:
    """Return the methods of one half of the figure."""
    bloom = {method: f"topr:{ratio:g}/bloom:{policy},fpr=0.001/raw" for method, policy in POLICIES.items()}
    return {"Baseline": "dense", "Top-r": f"topr:{ratio:g}/raw/raw"} | bloom


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return all methods on both models: 1% of ResNet-20, 0.5% of DenseNet40."""
    settings = {"ResNet-20": scale.cifar10, "DenseNet40": scale.densenet}
    return {
        f"{title}, {method}": planned("cifar10", model, spec, settings[title])
        for title, (model, ratio) in MODELS.items()
        for method, spec in specs(ratio).items()
    }


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw both halves and judge appendix 11."""
    rows = [[method, run.spec, in_percent(run.quality), f"{run.relative_volume:.4f}", f"{run.steps:,}"] for method, run in found.items()]
    charts = []
    for title in MODELS:
        mine = {method: found[f"{title}, {method}"] for method in specs(0.01)}
        points = {method: (run.relative_volume, run.quality) for method, run in mine.items()}
        charts.append((f"{title} on CIFAR-10", scatter(f"Figure 15, {title}", points, "relative data volume", "top-1 accuracy")))
    notes = "The standard DenseNet40-K12 has 1,019,722 parameters; the paper's 357,491 belong to no standard variant."
    return Result(
        ("run", "spec", "accuracy", "relative volume", "steps"), rows, [_finding(scale, found, title) for title in MODELS], charts, notes
    )


def _finding(scale: Scale, found: Runs, title: str) -> Finding:
    quality = {method: found[f"{title}, {method}"].quality for method in specs(0.01)}
    volume = {method: found[f"{title}, {method}"].relative_volume for method in specs(0.01)}
    less = all(volume[method] < volume["Top-r"] for method in POLICIES)
    near = as_good(scale, quality["BF-P2"], quality["Top-r"]) and quality["BF-Naive"] < quality["BF-P2"] - scale.margin
    evidence = ", ".join(f"{method} {in_percent(quality[method])} at {volume[method]:.4f}" for method in quality)
    claim = f"{title}: BF-P2 keeps the accuracy of Top-r with fewer data, the naive filter does not."
    return Finding(claim, "11", told(scale, less and near), f"{evidence}.")


EXPERIMENT = Experiment(
    "figure15", "Volume against accuracy of the Bloom filter policies", "11", {"small": 4.5, "medium": 200, "full": 300_000}, show, runs
)
