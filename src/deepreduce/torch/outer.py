"""The outer optimizer of local steps: it moves the parameters from the last sync by the mean change of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import ConfigError
from ..parameters import shown
from .convert import to_torch

OuterOptimizer = Optimizer | Callable[[list[torch.nn.Parameter]], Optimizer]


class Outer:
    """An optimizer that is given, or made of the parameters when they are known; parameters that come later join one that was made.

    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> outer = Outer(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    >>> outer.add({"w": parameter})
    >>> outer.step({"w": torch.tensor([1.0, 0.0])})
    >>> parameter.data
    tensor([0.5000, 1.0000])
    """

    def __init__(self, given: OuterOptimizer) -> None:
        if not callable(given) and not isinstance(given, Optimizer):
            raise ConfigError(f"outer is an optimizer, or a function that makes one of a list of parameters; got {shown(given)}")
        self.optimizer = given if isinstance(given, Optimizer) else None
        self._make = None if isinstance(given, Optimizer) else given
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def add(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Take new parameters over."""
        for name, parameter in parameters.items():
            if parameter.itemsize < torch.float32.itemsize:
                raise ConfigError(f"an outer optimizer takes steps in float32 or float64, and {name} is {parameter.dtype}: use outer=None")
        self._parameters.update(parameters)
        if self._make is None:
            known = {id(parameter) for parameter in self._all()}
            missing = [name for name, parameter in parameters.items() if id(parameter) not in known]
            if missing:
                raise ConfigError(f"the outer optimizer does not have the parameter {missing[0]}: give it all that are trained")
        elif self.optimizer is None:
            self.optimizer = self._make(list(parameters.values()))
        elif parameters:
            self.optimizer.add_param_group({"params": list(parameters.values())})

    def step(self, means: Mapping[str, Any]) -> None:
        """Take a step with these means as gradients; the gradients of the user stay as they are."""
        assert self.optimizer is not None
        everything = self._all()
        kept = [parameter.grad for parameter in everything]
        try:
            for parameter in everything:
                parameter.grad = None
            for name, mean in means.items():
                parameter = self._parameters[name]
                parameter.grad = (mean if isinstance(mean, torch.Tensor) else to_torch(mean)).to(parameter.dtype)
            self.optimizer.step()
        finally:
            for parameter, gradient in zip(everything, kept, strict=True):
                parameter.grad = gradient

    def _all(self) -> Sequence[torch.nn.Parameter]:
        assert self.optimizer is not None
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def has_momentum(self) -> bool:
        """Whether it carries a step over to the next ones."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return any(group.get("momentum") or "betas" in group for group in groups)
