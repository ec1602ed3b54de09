"""Stable names for parameters, whatever bucket they are in."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary


class Names:
    """The name and the number of every parameter: those of a model, or by the order in which they are first seen.

    DDP fills its buckets in the same order on all ranks and after every restart, so both stay the same when buckets are rebuilt.

    >>> model = torch.nn.Linear(2, 3)
    >>> names = Names(model)
    >>> names.of(model.bias), names.number("bias")
    ('bias', 1)
    >>> Names().of(model.bias)
    'parameter 0'
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._names = WeakIdKeyDictionary()
        self._numbers: dict[str, int] = {}
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for name, parameter in inner.named_parameters() if inner is not None else ():
            self._names[parameter] = name
            self.number(name)

    def of(self, parameter: torch.Tensor) -> str:
        """The name of this parameter."""
        if parameter not in self._names:
            name = f"parameter {len(self._numbers)}"
            self._names[parameter] = name
            self.number(name)
        return str(self._names[parameter])

    def number(self, name: str) -> int:
        """A small number of its own for every name: seeds are made of it."""
        return self._numbers.setdefault(name, len(self._numbers))
