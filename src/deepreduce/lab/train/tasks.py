"""The tasks: their data, their models by name, and the settings that train them well. No framework is named here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from . import cifar10, digits, imagenet, ml1m, ml20m, text
from .batches import Data
from .contract import Plan


@dataclass(frozen=True)
class Task:
    """One thing to learn. `kind` says what batches mean and how quality is measured; the first model is the default one.

    `batch` is the number of examples (for rankings: of positives) that one worker takes in a step. `steps` is how long a run is where
    epochs are too long, `clip` the norm that the mean gradient of all workers is clipped to.
    """

    name: str
    kind: Literal["classes", "ranking", "text"]
    metric: str
    models: tuple[str, ...]
    read: Callable[..., Data]
    batch: int
    epochs: int
    evaluations: int
    optimizer: Literal["sgd", "adam", "adamw"]
    learning_rate: float
    weight_decay: float = 0.0
    steps: int | None = None
    clip: float | None = None

    @property
    def lower_is_better(self) -> bool:
        """Whether quality is a loss."""
        return self.kind == "text"


TASKS = {
    task.name: task
    for task in (
        Task("digits", "classes", "accuracy", ("mlp", "cnn"), digits.read, 32, 18, 9, "sgd", 0.1),
        Task("cifar10", "classes", "accuracy", ("resnet20", "densenet40", "convnet"), cifar10.read, 64, 100, 5, "sgd", 0.1, 1e-4),
        Task("imagenet", "classes", "accuracy", ("resnet50",), imagenet.read, 32, 90, 5, "sgd", 0.1, 1e-4),
        Task("ml1m", "ranking", "HR@10", ("neumf",), ml1m.read, 4096, 10, 5, "adam", 1e-3),
        Task("text", "text", "validation loss", ("gpt",), text.read, 8, 1, 8, "adamw", 2e-3, 0.1, steps=800, clip=1.0),
        Task("ml20m", "ranking", "HR@10", ("neumf",), ml20m.read, 20_000, 10, 5, "adam", 1e-3),
    )
}


def task_of(name: str) -> Task:
    """The task of this name.

    >>> task_of("digits").models
    ('mlp', 'cnn')
    """
    if name not in TASKS:
        raise ConfigError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def read_data(plan: Plan) -> Data:
    """Return the data of a plan."""
    task = task_of(plan.task)
    options: dict[str, Any] = {"negatives": plan.negatives} if task.kind == "ranking" else {}
    return task.read(Path(plan.data) if plan.data else None, plan.seed, **options)
