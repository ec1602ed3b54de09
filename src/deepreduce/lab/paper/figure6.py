"""Figure 6: the false positive rate of a Bloom filter against accuracy and volume, for three policies and two sparsifiers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from ..report.charts import Line
from ..report.quantity import in_percent
from ..train.contract import Plan
from . import printed
from .drawings import panels
from .experiment import Experiment, Finding, Measurements, Result, Runs, as_good, decided, told
from .scales import Scale, planned

POLICIES = ("p0", "p1", "p2")
SPARSIFIERS = {"Top-r": "topr:0.01", "Rand-r": "randomr:0.01"}


def rates(scale: Scale, sparsifier: str) -> tuple[float, ...]:
    """Return the false positive rates that are trained, the largest first."""
    return scale.fprs if sparsifier == "Top-r" else scale.random_fprs


def name(policy: str, sparsifier: str, fpr: float) -> str:
    """Return the name of a run.

    >>> name("p2", "Top-r", 0.001)
    'BF-P2 on Top-r, FPR 0.001'
    """
    return f"BF-{policy.upper()} on {sparsifier}, FPR {fpr:g}"


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return the baseline, both sparsifiers alone, and every policy at every rate on both."""
    specs = {"Baseline": "dense"} | {title: f"{piece}/raw/raw" for title, piece in SPARSIFIERS.items()}
    for title, piece in SPARSIFIERS.items():
        for fpr in rates(scale, title):
            specs |= {name(policy, title, fpr): f"{piece}/bloom:{policy},fpr={fpr:g}/raw" for policy in POLICIES}
    return {method: planned("cifar10", "resnet20", spec, scale.cifar10) for method, spec in specs.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw the three panels, accuracy above volume, and judge what section 6.1 says of them."""
    rows = [[method, record.spec, in_percent(record.quality), f"{record.relative_volume:.4f}"] for method, record in found.items()]
    findings = [_p0_accuracy(scale, found), _p0_volume(scale, found), _p1(scale, found), _p2(scale, found)]
    return Result(("method", "spec", "accuracy", "relative volume"), rows, findings, [("Accuracy and volume by FPR", _chart(scale, found))])


def _chart(scale: Scale, found: Runs) -> str:
    above: dict[str, list[Line]] = {}
    below: dict[str, list[Line]] = {}
    ends = scale.fprs[-1], scale.fprs[0]
    for policy in POLICIES:
        title = f"BF-{policy.upper()}"
        curves = {each: [(fpr, found[name(policy, each, fpr)]) for fpr in rates(scale, each)] for each in SPARSIFIERS}
        flat = {"plain Top-r": found["Top-r"], "plain Rand-r": found["Rand-r"], "baseline": found["Baseline"]}
        above[title] = [Line(f"Bloom filter on {each}", [(fpr, run.quality) for fpr, run in points]) for each, points in curves.items()]
        below[title] = [Line(each, [(fpr, run.relative_volume) for fpr, run in points]) for each, points in curves.items()]
        above[title] += [Line(each, [(end, run.quality) for end in ends]) for each, run in flat.items()]
        below[title] += [Line(each, [(end, run.relative_volume) for end in ends]) for each, run in list(flat.items())[:2]]
    return panels("Figure 6", above, below, "false positive rate")


def _qualities(scale: Scale, found: Runs, policy: str, sparsifier: str = "Top-r") -> list[float]:
    return [found[name(policy, sparsifier, fpr)].quality for fpr in rates(scale, sparsifier)]


def _p0_accuracy(scale: Scale, found: Runs) -> Finding:
    spreads, worst = [], []
    for each in SPARSIFIERS:
        qualities = _qualities(scale, found, "p0", each)
        spreads.append(max(qualities) - min(qualities))
        worst.append(as_good(scale, min(qualities), found[each].quality))
    evidence = f"BF-P0 spans {in_percent(spreads[0])} on Top-r and {in_percent(spreads[1])} on Rand-r over all rates"
    return Finding("With BF-P0, accuracy is only marginally affected by FPR.", "6.1", told(scale, all(worst)), f"{evidence}.")


def _p0_volume(scale: Scale, found: Runs) -> Finding:
    volumes = [(fpr, found[name("p0", "Top-r", fpr)].relative_volume) for fpr in scale.fprs]
    plain = found["Top-r"].relative_volume
    grows = all(one > other for (_, one), (_, other) in pairwise(volumes))
    crosses = volumes[0][1] > plain > volumes[-1][1]
    evidence = (
        f"{', '.join(f'{volume:.4f} at {fpr:g}' for fpr, volume in volumes)}; plain Top-r {plain:.4f}; the volumes cross near "
        f"{crossing(volumes, plain):.4f}, where the paper has {printed.P0_CROSSING_FPR}"
    )
    claim = "BF-P0 sends more with higher FPR and, if it is high enough, more than the sparse input."
    return Finding(claim, printed.P0_CROSSING_FPR.section, decided(grows and crosses), f"{evidence}.")


def crossing(volumes: list[tuple[float, float]], plain: float) -> float:
    """Return the rate at which volumes, largest first, equal a plain one, between two measured rates.

    >>> round(crossing([(0.1, 0.05), (0.001, 0.01)], 0.03), 3)
    0.05
    """
    for (high, more), (low, less) in pairwise(volumes):
        if more >= plain >= less and more > less:
            return low + (high - low) * (plain - less) / (more - less)  # the filter itself changes little
    return float("nan")


def _p1(scale: Scale, found: Runs) -> Finding:
    wide, narrow = (found[name("p1", "Top-r", fpr)] for fpr in (scale.fprs[0], scale.fprs[-1]))
    less = wide.relative_volume < narrow.relative_volume
    drop = narrow.quality - wide.quality
    evidence = (
        f"FPR {scale.fprs[-1]:g} to {scale.fprs[0]:g}: volume {narrow.relative_volume:.4f} to {wide.relative_volume:.4f}, "
        f"accuracy {in_percent(narrow.quality)} to {in_percent(wide.quality)}"
    )
    verdict = told(scale, drop > scale.margin) if less else decided(False)
    return Finding("With BF-P1, volume falls when FPR grows, and accuracy with it.", "6.1", verdict, f"{evidence}.")


def _p2(scale: Scale, found: Runs) -> Finding:
    p0, p1, p2 = (_qualities(scale, found, policy) for policy in POLICIES)
    wide = name("p0", "Top-r", scale.fprs[0]), name("p2", "Top-r", scale.fprs[0])
    less = found[wide[1]].relative_volume < found[wide[0]].relative_volume
    better = p2[0] > p1[0] and as_good(scale, min(p2), min(p0))
    evidence = f"at FPR {scale.fprs[0]:g}: BF-P0 {in_percent(p0[0])}, BF-P1 {in_percent(p1[0])}, BF-P2 {in_percent(p2[0])}"
    claim = "BF-P2 combines the accuracy of BF-P0 with the volume of BF-P1."
    return Finding(claim, "6.1", told(scale, better) if less else decided(False), f"{evidence}.")


EXPERIMENT = Experiment(
    "figure6",
    "Effect of the false positive rate, ResNet-20 on CIFAR-10",
    "6.1",
    {"small": 13.5, "medium": 270, "full": 120_000},
    show,
    runs,
)
