"""How much is trained: enough to see the trend on two cores, some hours, or as the paper did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..train.contract import Plan

# Boundaries of the learning rate after epochs 82, 123 and 300 of 328: those of TensorFlow's benchmark, which the paper trains.
PAPER_SCHEDULE = "step:0.25=0.1,0.375=0.01,0.9146=0.002"
THIRDS = "step:0.333=0.1,0.667=0.01,0.889=0.001"  # after epochs 30, 60 and 80 of 90, as ResNet-50 is usually trained


@dataclass(frozen=True)
class Scale:
    """Settings of all trainings. Qualities nearer to each other than `margin` count as equal: runs that differ by their seed do as much."""

    name: str
    margin: float
    cifar10: dict[str, Any]
    densenet: dict[str, Any]
    imagenet: dict[str, Any]
    ncf: dict[str, Any]
    iteration: dict[str, Any]
    fprs: tuple[float, ...]
    random_fprs: tuple[float, ...]

    @property
    def decides(self) -> bool:
        """Whether a lower quality refutes a claim: short runs are behind for reasons of their own."""
        return self.name != "small"


SMALL = Scale(
    name="small",
    margin=0.03,
    cifar10={"workers": 2, "batch": 32, "steps": 150, "evaluations": 3, "test_batches": 4},
    densenet={"workers": 2, "batch": 16, "steps": 24, "evaluations": 1, "test_batches": 1, "warm_up": 1},
    imagenet={"workers": 2, "batch": 2, "steps": 3, "evaluations": 0, "warm_up": 1},
    ncf={"workers": 2, "batch": 4096, "steps": 120, "evaluations": 3, "warm_up": 1},
    iteration={"workers": 4, "batch": 4_000, "steps": 2, "evaluations": 0, "warm_up": 1},
    fprs=(0.1, 0.01, 0.001),
    random_fprs=(0.1, 0.001),
)
MEDIUM = Scale(
    name="medium",
    margin=0.015,
    cifar10={"workers": 2, "batch": 64, "steps": None, "epochs": 6, "evaluations": 6},
    densenet={"workers": 2, "batch": 64, "steps": None, "epochs": 2, "evaluations": 4, "test_batches": 10},
    imagenet={"workers": 2, "batch": 8, "steps": 40, "evaluations": 0, "warm_up": 1},
    ncf={"workers": 2, "batch": 4096, "steps": None, "epochs": 10, "evaluations": 10},
    iteration={"workers": 4, "batch": 20_000, "accumulate": 2, "steps": 5, "evaluations": 0, "warm_up": 1},
    fprs=(0.1, 0.02, 0.004, 0.001),
    random_fprs=(0.1, 0.02, 0.004, 0.001),
)
FULL = Scale(
    name="full",
    margin=0.005,
    cifar10={"workers": 8, "batch": 16, "steps": None, "epochs": 328, "evaluations": 82, "schedule": PAPER_SCHEDULE},
    densenet={"workers": 8, "batch": 16, "steps": None, "epochs": 328, "evaluations": 82, "schedule": PAPER_SCHEDULE},
    imagenet={
        "workers": 8,
        "batch": 32,
        "steps": None,
        "epochs": 90,
        "evaluations": 45,
        "schedule": THIRDS,
    },
    ncf={"workers": 8, "batch": 200_000, "steps": None, "epochs": 30, "evaluations": 30},
    iteration={"workers": 4, "batch": 200_000, "accumulate": 10, "steps": 10, "evaluations": 0, "warm_up": 1},
    fprs=(0.1, 0.02, 0.01, 0.004, 0.001, 0.0001),
    random_fprs=(0.1, 0.02, 0.01, 0.004, 0.001, 0.0001),
)
SCALES = {scale.name: scale for scale in (SMALL, MEDIUM, FULL)}


def scale_of(name: str) -> Scale:
    """Return the scale of this name.

    >>> scale_of("full").cifar10["epochs"]
    328
    """
    if name not in SCALES:
        raise ConfigError(f"a scale is {', '.join(SCALES)}; got {name!r}")
    return SCALES[name]


def planned(task: str, model: str, spec: str, settings: dict[str, Any], **more: Any) -> Plan:
    """Return the plan of one run. As in the paper, tensors of every size are compressed."""
    rates = {"cifar10": 0.1, "imagenet": 0.1, "ml1m": 1e-3, "ml20m": 1e-3}
    return Plan(task=task, model=model, specs=(spec,), learning_rate=rates[task], small=0, **settings | more)
