"""Settings that go together, by the name of the optimizer that they are for. `docs/training.md` says why, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .policy import Spec
from .residual import ResidualMemory
from .schedule import Schedule

LocalMemory = Literal["residual", "parameters", "none"]
"""Where local steps keep what was not sent: beside the parameters, in them, or nowhere."""


@dataclass(frozen=True)
class GradientRecipe:
    """How gradients are sent. `momentum` is accumulated in the memory: the optimizer has none itself."""

    spec: str
    warm_up_steps: int
    momentum: float

    def schedule(self) -> Schedule:
        """Return the spec with its warm-up."""
        return Schedule(self.spec, self.warm_up_steps)

    def memory(self) -> ResidualMemory:
        """Return a memory with momentum correction."""
        return ResidualMemory(momentum=self.momentum)


@dataclass(frozen=True)
class LocalRecipe:
    """How the changes of local steps are sent, after how many of them, and where what was not sent is kept."""

    spec: str
    every: int
    memory: LocalMemory


GRADIENT_RECIPES = {"sgd": GradientRecipe("topr:0.01/rice/qsgd", warm_up_steps=500, momentum=0.9)}
LOCAL_RECIPES = {"adam": LocalRecipe("topr:0.15/rice/lloyd:1", every=4, memory="parameters")}
_FOR_ADAPTIVE = '"adam" is for AdamW and other adaptive optimizers too'


def gradient_recipe(name: str) -> GradientRecipe:
    """Return the recipe for compressed gradients of this name.

    >>> gradient_recipe("adam")
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: recipes for gradients are sgd, got 'adam': compressed gradients make adaptive optimizers slow, so
    LocalSteps with recipe="adam" sends what the optimizer changed
    """
    if name not in GRADIENT_RECIPES:
        why = f': compressed gradients make adaptive optimizers slow, so LocalSteps with recipe="{name}" sends what the optimizer changed'
        raise ConfigError(f"recipes for gradients are {', '.join(GRADIENT_RECIPES)}, got {name!r}{why if name in LOCAL_RECIPES else ''}")
    return GRADIENT_RECIPES[name]


def local_recipe(name: str) -> LocalRecipe:
    """Return the recipe for local steps of this name.

    >>> local_recipe("adam").every
    4
    >>> local_recipe("adamw")
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: recipes for local steps are adam, got 'adamw': "adam" is for AdamW and other adaptive optimizers too
    """
    if name not in LOCAL_RECIPES:
        advice = 'DeepReduceState(recipe="sgd") sends gradients, which suits SGD' if name in GRADIENT_RECIPES else _FOR_ADAPTIVE
        raise ConfigError(f"recipes for local steps are {', '.join(LOCAL_RECIPES)}, got {name!r}: {advice}")
    return LOCAL_RECIPES[name]


def local_settings(recipe: str | None, spec: Spec | None, every: int | None, memory: LocalMemory | None) -> tuple[Spec, int, LocalMemory]:
    """Return the settings of local steps: those of a recipe, where nothing else is given; without a recipe, every step and ``"residual"``.

    >>> local_settings("adam", None, 40, None)
    ('topr:0.15/rice/lloyd:1', 40, 'parameters')
    >>> local_settings(None, "topr:0.1/rice/qsgd", None, None)
    ('topr:0.1/rice/qsgd', 1, 'residual')
    """
    if recipe is None and spec is None:
        raise ConfigError(f"give a spec, or a recipe: {', '.join(LOCAL_RECIPES)}")
    chosen = LocalRecipe("", every=1, memory="residual") if recipe is None else local_recipe(recipe)
    return (
        chosen.spec if spec is None else spec,
        chosen.every if every is None else every,
        chosen.memory if memory is None else memory,
    )
