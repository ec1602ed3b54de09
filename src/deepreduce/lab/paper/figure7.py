"""Figure 7: how fast the policies of a Bloom filter converge."""

from __future__ import annotations

from collections.abc import Mapping

from ..report.quantity import in_percent
from ..report.training_page import quality_by_epochs
from ..train.contract import Plan
from . import printed
from .experiment import Experiment, Finding, Measurements, Result, Runs, as_good, decided, mean_quality, told
from .scales import Scale, planned

POLICIES = ("p0", "p1", "p2")
SPECS = {"Baseline": "dense", "Top-r": "topr:0.01/raw/raw", "BF-Naive": "topr:0.01/bloom:naive,fpr=0.001/raw"} | {
    f"BF-{policy.upper()}": f"topr:0.01/bloom:{policy},fpr=0.001/raw" for policy in POLICIES
}


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return the baseline, Top-r and every policy at FPR 0.001."""
    return {method: planned("cifar10", "resnet20", spec, scale.cifar10) for method, spec in SPECS.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw accuracy against epochs and judge what section 6.1 says of it."""
    columns = ("method", "accuracy at the end", "mean of all evaluations", "relative volume")
    rows = [[method, in_percent(run.quality), in_percent(mean_quality(run)), f"{run.relative_volume:.4f}"] for method, run in found.items()]
    chart = quality_by_epochs(list(found.values()), list(found))
    return Result(columns, rows, [_end(scale, found), _naive(scale, found), _speed(scale, found), _volume(found)], [("Convergence", chart)])


def _end(scale: Scale, found: Runs) -> Finding:
    policies = {f"BF-{policy.upper()}": found[f"BF-{policy.upper()}"].quality for policy in POLICIES}
    baseline = found["Baseline"].quality
    evidence = f"baseline {in_percent(baseline)}; {', '.join(f'{method} {in_percent(quality)}' for method, quality in policies.items())}"
    reached = all(as_good(scale, quality, baseline) for quality in policies.values())
    return Finding("All policies reach the accuracy of the baseline.", "6.1", told(scale, reached), f"{evidence}.")


def _naive(scale: Scale, found: Runs) -> Finding:
    naive, others = found["BF-Naive"].quality, found["BF-P2"].quality
    evidence = f"BF-Naive {in_percent(naive)}, BF-P2 {in_percent(others)}"
    return Finding(
        "The naive Bloom filter reaches a much lower accuracy.", "6.1", told(scale, naive < others - scale.margin), f"{evidence}."
    )


def _speed(scale: Scale, found: Runs) -> Finding:
    mine, plain = mean_quality(found["BF-P2"]), mean_quality(found["Top-r"])
    evidence = f"mean accuracy of all evaluations: BF-P2 {in_percent(mine)}, plain Top-r {in_percent(plain)}"
    return Finding("BF-P2 converges faster than plain Top-r.", "6.1", told(scale, mine > plain + scale.margin / 2), f"{evidence}.")


def _volume(found: Runs) -> Finding:
    saving = 1 - found["BF-P2"].relative_volume / found["Top-r"].relative_volume
    evidence = (
        f"{in_percent(saving)} less at FPR 0.001, printed {in_percent(printed.P2_SAVING.value)}. A filter of 14.4 bits per key for 32 "
        "saves 27.5% at most; 33% takes 10.9 bits, an FPR of 0.005"
    )
    claim = "BF-P2 sends 33% fewer data than plain Top-r."
    near = abs(saving - printed.P2_SAVING.value) < 0.03
    return Finding(claim, printed.P2_SAVING.section, decided(near), f"{evidence}.")


EXPERIMENT = Experiment(
    "figure7",
    "Convergence of the Bloom filter policies, ResNet-20 on CIFAR-10",
    "6.1",
    {"small": 7, "medium": 70, "full": 50_000},
    show,
    runs,
)
