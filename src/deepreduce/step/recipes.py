"""Settings that go together, by the name of the optimizer that they are for. `docs/training.md` says why, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

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
class LocalSettings:
    """How the changes of local steps are sent, after how many of them, and where what was not sent is kept."""

    spec: Spec
    every: int = 1
    memory: LocalMemory | ResidualMemory = "residual"
    small_tensor_numel: int = 1024


GRADIENT_RECIPES = {"sgd": GradientRecipe("topr:0.01/rice/qsgd", warm_up_steps=500, momentum=0.9)}
LOCAL_RECIPES = {
    "adam": LocalSettings("topr:0.15/rice/lloyd:1", every=4, memory="parameters"),
    "sgd": LocalSettings("none/all/lloyd:1", every=4, small_tensor_numel=16),
}


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


def local_recipe(name: str) -> LocalSettings:
    """Return the recipe for local steps of this name.

    >>> local_recipe("adam").every
    4
    >>> local_recipe("adamw")
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: recipes for local steps are adam, sgd, got 'adamw': "adam" is for AdamW and other adaptive optimizers too
    """
    if name not in LOCAL_RECIPES:
        advice = '"adam" is for AdamW and other adaptive optimizers too'
        raise ConfigError(f"recipes for local steps are {', '.join(LOCAL_RECIPES)}, got {name!r}: {advice}")
    return LOCAL_RECIPES[name]


def local_settings(recipe: str | None, spec: Spec | None, **given: Any) -> LocalSettings:
    """Return the settings of a recipe, or the defaults; what is given and not None replaces its part.

    >>> local_settings("sgd", None, every=8, memory=None)
    LocalSettings(spec='none/all/lloyd:1', every=8, memory='residual', small_tensor_numel=16)
    """
    if recipe is None and spec is None:
        raise ConfigError(f"give a spec, or a recipe: {', '.join(LOCAL_RECIPES)}")
    if isinstance(spec, str) and spec in LOCAL_RECIPES:
        raise ConfigError(f'"{spec}" is a recipe, not a spec: give recipe="{spec}"')
    settings = local_recipe(recipe) if recipe is not None else LocalSettings("")
    return replace(settings, **{name: value for name, value in {"spec": spec, **given}.items() if value is not None})
