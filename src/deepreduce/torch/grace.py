"""For users of GRACE (sands-lab/grace): its two interfaces, with a deepreduce spec behind them.

A GRACE communicator takes these where it took its own, in ``grace_dl.dist`` and in ``grace_dl.torch``::

    Allgather(TopKCompressor(0.01), ResidualMemory(), world_size)                            # before
    Allgather(Compressor("topr:0.01/rice/qsgd"), Memory(), world_size)                       # after
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from ..pipeline import DeepReduce, parse
from ..tensor import SparseTensor
from .convert import to_numpy, to_torch
from .memory import TorchMemory
from .source import decode_sparse, scatter, source_of


class Compressor:
    """GRACE's `Compressor`: a tensor becomes one flat uint8 tensor on its device, which describes itself, so that `ctx` is None.

    The messages of the ranks differ in length (`tensors_size_are_same` is False), so they travel by GRACE's `Allgather`. Every call for
    a name draws from a new seed, counted here.

    >>> compressor = Compressor("topr:2/raw/raw")
    >>> tensors, ctx = compressor.compress(torch.tensor([1.0, -4.0, 2.0, -3.0]), "fc.weight")
    >>> compressor.decompress(tensors, ctx)
    tensor([ 0., -4.,  0., -3.])
    """

    tensors_size_are_same = False

    def __init__(self, spec: str | DeepReduce, average: bool = True) -> None:
        self.codec = parse(spec) if isinstance(spec, str) else spec
        self.average = average
        self._steps: Counter[str] = Counter()

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], None]:
        """The message as a list of one tensor, and no context."""
        blob = self.codec.encode(source_of(tensor), seed=self._steps[name])
        self._steps[name] += 1
        return [to_torch(np.frombuffer(blob, np.uint8)).to(tensor.device)], None

    def decompress(self, tensors: Sequence[torch.Tensor], ctx: object = None) -> torch.Tensor:
        """The dense tensor of any rank's message, on the device of the message."""
        (message,) = tensors
        return scatter(received(message), message.device)

    def aggregate(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum, in the order of the ranks; the communicator divides it by their number if `average` is set."""
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total


class Memory:
    """GRACE's `Memory` over a `TorchMemory`: error feedback that a NaN or Inf does not poison.

    >>> memory, compressor = Memory(), Compressor("topr:1/raw/raw")
    >>> gradient = memory.compensate(torch.tensor([3.0, 2.0]), "w")
    >>> memory.update(gradient, "w", compressor, *compressor.compress(gradient, "w"))
    >>> memory.compensate(torch.tensor([3.0, 2.0]), "w")
    tensor([3., 4.])
    """

    def __init__(self, decay: float = 1.0, momentum: float = 0.0) -> None:
        self.residuals = TorchMemory(decay, momentum)

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor with what is owed added to it."""
        return self.residuals.compensate(name, tensor)

    def update(self, tensor: torch.Tensor, name: str, compressor: Compressor, tensors: Sequence[torch.Tensor], ctx: object) -> None:
        """Remember what the message of this tensor has not."""
        (message,) = tensors
        self.residuals.update(name, tensor, received(message))


def received(message: torch.Tensor) -> SparseTensor:
    """The sparse tensor of a message, its positions enumerated on the device of the message."""
    return decode_sparse(to_numpy(message).data, message.device)
