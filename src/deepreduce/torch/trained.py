"""What an optimizer trains of a model, by name, as a step sees it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim import Optimizer

from ..errors import ConfigError
from ..parameters import shown
from .names import plain_names
from .views import view


class Trained:
    """The parameters of an optimizer by their names in the model, and the buffers of floats that are averaged with them.

    Buffers that begin with an infinity are masks, not something that training changes: they are left alone.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    >>> trained = Trained(model, torch.optim.SGD(model[0].parameters()), "mean")
    >>> list(trained.add_new()), list(trained.tensors())
    (['0.weight', '0.bias'], ['0.weight', '0.bias', '1.running_mean', '1.running_var'])
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, buffers: Literal["mean", "keep"]) -> None:
        if buffers not in ("mean", "keep"):
            raise ConfigError(f"buffers are 'mean' or 'keep', got {shown(buffers)}")
        self._model, self._optimizer = model, optimizer
        self.parameters: dict[str, torch.nn.Parameter] = {}
        finite = [name for name, buffer in self._float_buffers().items() if bool(torch.isfinite(buffer).all())]
        self.averaged_buffers = frozenset(finite if buffers == "mean" else [])

    def add_new(self) -> dict[str, torch.nn.Parameter]:
        """Add and return parameters that are new: at the start, from a group that was added, or no longer frozen."""
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter) for parameter in self.parameters.values()}
        new = [parameter for parameter in listed if parameter.requires_grad and id(parameter) not in known]
        if not new:
            return {}
        names = {id(parameter): name for name, parameter in plain_names(self._model.named_parameters()).items()}
        for parameter in new:
            if id(parameter) not in names:
                raise ConfigError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of the model")
        named = {names[id(parameter)]: parameter for parameter in new}
        self.parameters.update(named)
        return named

    def parameter_views(self, frozen: bool = True) -> dict[str, Any]:
        """Return the parameters as a step sees them; without `frozen`, those that are trained at the moment."""
        return {name: view(name, each) for name, each in self.parameters.items() if frozen or each.requires_grad}

    def tensors(self) -> dict[str, Any]:
        """Return all that is exchanged, as a step sees it: the parameters in the order of the optimizer, then the buffers."""
        buffers = {name: buffer for name, buffer in self._float_buffers().items() if name in self.averaged_buffers}
        return self.parameter_views() | {name: view(name, buffer) for name, buffer in buffers.items()}

    def _float_buffers(self) -> dict[str, torch.Tensor]:
        buffers = plain_names(self._model.named_buffers())
        return {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.numel()}
