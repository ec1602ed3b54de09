"""Table 1: the models, their parameters, and what they reach without compression."""

from __future__ import annotations

from collections.abc import Mapping

from ..report.quantity import in_percent
from ..train.contract import Plan
from . import printed
from .experiment import Experiment, Finding, Measurements, Result, Runs, decided
from .scales import Scale, planned


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return the baseline of ResNet-20: the runs of the other models are those of their figures."""
    return {"ResNet-20": planned("cifar10", "resnet20", "dense", scale.cifar10)}


def measurements(scale: Scale) -> Measurements:
    """Count the parameters of every model, NCF with the users and items of MovieLens-20M."""
    import torch

    from ..train import ml20m
    from ..train.torch_models import DenseNet40, NeuMF, ResNet20, parameter_count
    from ..train.torch_resnet50 import ResNet50

    with torch.device("meta"):
        models = {
            "ResNet-20": ResNet20(),
            "DenseNet40-K12": DenseNet40(),
            "ResNet-50": ResNet50(),
            "NCF": NeuMF(ml20m.USERS, ml20m.ITEMS),
        }
        return {name: {"parameters": parameter_count(model)} for name, model in models.items()}


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Put the counts beside those of the paper."""
    rows = []
    for row in printed.TABLE_1:
        quality = in_percent(found[row.model].best_quality) if row.model in found else "–"
        rows.append(
            [row.model, row.data, f"{measured[row.model]['parameters']:,}", f"{row.parameters:,}", quality, in_percent(row.baseline)]
        )
    columns = ("model", "data", "parameters", "parameters, paper", "baseline", "baseline, paper")
    return Result(columns, rows, [_finding(row, measured) for row in printed.TABLE_1])


def _finding(row: printed.Benchmark, measured: Measurements) -> Finding:
    count = measured[row.model]["parameters"]
    why = "" if count == row.parameters else "; no standard variant of 40 layers and growth rate 12 has the printed number"
    claim = f"{row.model} has {row.parameters:,} parameters."
    return Finding(claim, "6, Table 1", decided(count == row.parameters), f"{count:,} here{why}.")


EXPERIMENT = Experiment("table1", "The benchmarks", "6", {"small": 0.5, "medium": 12, "full": 8000}, show, runs, measurements)
