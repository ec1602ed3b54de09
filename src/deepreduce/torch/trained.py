"""What an optimizer trains of a model, by name, as a step sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ConfigError
from ..parameters import shown
from .names import plain_names
from .views import view


class Trained:
    """The parameters of an optimizer by their names in the model, and the buffers of floats that are averaged with them.

    Buffers with an infinity or a NaN at the start are masks, not something that training changes: they are left alone.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    >>> trained = Trained(model, torch.optim.SGD(model[0].parameters()), "mean")
    >>> trained.add(trained.new())
    >>> list(trained.parameters), list(trained.tensors())
    (['0.weight', '0.bias'], ['0.weight', '0.bias', '1.running_mean', '1.running_var'])
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, buffers: Literal["mean", "keep"]) -> None:
        if buffers not in ("mean", "keep"):
            raise ConfigError(f"buffers are 'mean' or 'keep', got {shown(buffers)}")
        self._model, self._optimizer = model, optimizer
        self.parameters: dict[str, torch.nn.Parameter] = {}
        finite = [name for name, buffer in self._float_buffers().items() if bool(torch.isfinite(buffer).all())]
        self.averaged_buffers = frozenset(finite if buffers == "mean" else [])

    def new(self, also: Collection[str] = ()) -> dict[str, torch.nn.Parameter]:
        """Return parameters that are new: at the start, from a group that was added, or no longer frozen; frozen ones by name."""
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter) for parameter in self.parameters.values()}
        new = [parameter for parameter in listed if id(parameter) not in known and (parameter.requires_grad or also)]
        if not new:
            return {}
        names = {id(parameter): name for name, parameter in plain_names(self._model.named_parameters()).items()}
        named = {_name(parameter, names): parameter for parameter in new}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad or name in also}

    def add(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Let these be parameters too."""
        self.parameters.update(parameters)

    def is_trained(self, name: str) -> bool:
        """Whether this is a parameter, and not frozen at the moment."""
        return name in self.parameters and self.parameters[name].requires_grad

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


def _name(parameter: torch.nn.Parameter, names: Mapping[int, str]) -> str:
    """Return the name of a parameter of the model. Refuse one that is not, or a shard of one."""
    if id(parameter) not in names:
        raise ConfigError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of the model")
    name = names[id(parameter)]
    if isinstance(parameter, DTensor):
        raise ConfigError(f"local steps are for whole parameters, and {name} is sharded: compress_fsdp compresses the gradients of FSDP2")
    return name
