"""Stable names for parameters, whatever bucket they are in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigError

T = TypeVar("T")
_COMPILED = "_orig_mod"  # what torch.compile calls the module inside


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and `torch.compile`, however they are nested."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, _COMPILED, None)
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def plain_names(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return what has names, such as the parameters of a module, by the names that it has where nothing is compiled.

    >>> plain_names([("0._orig_mod.weight", 1), ("0._orig_mod.bias", 2)])
    {'0.weight': 1, '0.bias': 2}
    """
    return {name.replace(f"{_COMPILED}.", ""): value for name, value in named}


class Names:
    """The name of every parameter: that of a model, or its number in the order in which they are first seen.

    DDP fills its buckets in the same order on all ranks and after every restart, so numbers stay the same when buckets are rebuilt.

    >>> model = torch.nn.Linear(2, 3)
    >>> Names(model).of(model.bias), Names().of(model.bias)
    ('bias', 'parameter 0')
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._names = WeakIdKeyDictionary()
        self._known: list[str] | None = None
        self._count = 0
        if model is not None:
            self.bind(model)

    def bind(self, model: torch.nn.Module) -> None:
        """Take the names of a model; parameters that are not in it are refused from then on."""
        named = plain_names(unwrapped(model).named_parameters())
        for name, parameter in named.items():
            self._names[parameter] = name
        self._known = list(named)

    @property
    def known(self) -> list[str] | None:
        """All names of the model; None without one."""
        return self._known

    def of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter."""
        if parameter not in self._names:
            if self._known is not None:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is not one of the {len(self._known)} of the model that the state was "
                    "made for: give the state the model that is trained (a state that was unpickled needs `state.bind(model)`)"
                )
            self._names[parameter] = f"parameter {self._count}"
            self._count += 1  # a number is not given twice, even if its parameter is gone
        return str(self._names[parameter])

    def __deepcopy__(self, memo: dict[int, Any]) -> Names:
        """A copy for the same parameters."""
        copied = Names()
        copied._names, copied._known, copied._count = WeakIdKeyDictionary(dict(self._names)), self._known, self._count
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"known": self._known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._names, self._known, self._count = WeakIdKeyDictionary(), state["known"], 0
