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
import torch.distributed as dist

from ..indices.seeded import Seeded
from ..message import DEFAULT_MAX_NUMEL
from ..pipeline import DeepReduce, parse
from ..step.residual import ResidualMemory
from ..step.seeds import StepSeed
from ..tensor import SparseTensor
from .convert import to_numpy, to_torch
from .source import decode_sparse, scatter, source_of


class Compressor:
    """GRACE's `Compressor`: a tensor becomes one flat uint8 tensor on its device, which describes itself, so that `ctx` is None.

    The messages of the ranks differ in length (`tensors_size_are_same` is False), so they travel by GRACE's `Allgather`. Every rank and
    every call for a name draw from a seed of their own. A message may hold as many elements as the largest tensor compressed here.

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
        self._max_numel = DEFAULT_MAX_NUMEL

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], None]:
        """The message as a list of one tensor, and no context."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        seed = StepSeed(0, self._steps[name], rank).of(name, shared=isinstance(self.codec.index, Seeded))
        blob = self.codec.encode(source_of(tensor), seed=seed)
        self._steps[name] += 1
        self._max_numel = max(self._max_numel, tensor.numel())
        return [to_torch(np.frombuffer(blob, np.uint8)).to(tensor.device)], None

    def decompress(self, tensors: Sequence[torch.Tensor], ctx: object = None) -> torch.Tensor:
        """The dense tensor of any rank's message, on the device of the message."""
        (message,) = tensors
        return scatter(self.received(message), message.device)

    def received(self, message: torch.Tensor) -> SparseTensor:
        """Return the sparse tensor of a message, its positions enumerated on the device of the message."""
        return decode_sparse(to_numpy(message).data, message.device, self._max_numel)

    def aggregate(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum, in the order of the ranks; the communicator divides it by their number if `average` is set."""
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total


class Memory:
    """GRACE's `Memory` over a `ResidualMemory`: error feedback that a NaN or Inf does not poison.

    >>> memory, compressor = Memory(), Compressor("topr:1/raw/raw")
    >>> gradient = memory.compensate(torch.tensor([3.0, 2.0]), "w")
    >>> memory.update(gradient, "w", compressor, *compressor.compress(gradient, "w"))
    >>> memory.compensate(torch.tensor([3.0, 2.0]), "w")
    tensor([3., 4.])
    """

    def __init__(self, decay: float = 1.0, momentum: float = 0.0) -> None:
        self.residuals = ResidualMemory(decay, momentum)

    def compensate(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensor plus its residual."""
        compensated: torch.Tensor = self.residuals.compensate(name, tensor)
        return compensated

    def update(self, tensor: torch.Tensor, name: str, compressor: Compressor, tensors: Sequence[torch.Tensor], ctx: object) -> None:
        """Store what the message of this tensor has not as its residual."""
        (message,) = tensors
        self.residuals.update(name, tensor, compressor.received(message))
