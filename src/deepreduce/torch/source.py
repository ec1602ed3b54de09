"""A gradient as a torch tensor: the steps that touch all its elements run as torch operations on its device.

They give exactly what the numba kernels give on the host, so a message has the same bytes wherever its gradient lives. Only what is kept
crosses to the host, where the codecs work.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import kernels
from ..errors import InputError
from ..message import DEFAULT_MAX_NUMEL, Record
from ..pipeline import read_single, restore
from ..source import DenseSource, Source, Space, SparseSource
from ..tensor import FLOAT_DTYPES, Positions, Shape, SparseTensor, Support, Values
from . import membership
from .convert import to_numpy, to_torch

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = dict(zip((torch.float16, torch.bfloat16, torch.float32, torch.float64), FLOAT_DTYPES, strict=True))
_DIGIT_BITS = 16
_NOTHING = np.empty(0)


@cache
def numpy_dtype(dtype: torch.dtype, what: str = "gradient") -> np.dtype[Any]:
    """The numpy form of a supported dtype.

    >>> numpy_dtype(torch.bfloat16)
    dtype(bfloat16)
    """
    if dtype not in _DTYPES:
        raise InputError(f"a {what} holds float16, bfloat16, float32 or float64, got {dtype}")
    return _DTYPES[dtype]


class TorchSpace(Space):
    """The positions of a tensor that lives on `device`."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape)
        self.device = device

    def members(self, packed: NDArray[np.uint8], hashes: int, salt: int, at_most: int) -> Positions:
        return to_numpy(membership.members(to_torch(packed).to(self.device), hashes, salt, self.numel, at_most))


class TorchSource(Source):
    """A strided tensor on any device. It is read, never written; made contiguous only if it is not.

    >>> import deepreduce as dr
    >>> gradient = torch.tensor([1.0, -4.0, 2.0, -3.0])
    >>> TorchSource(gradient).top(2).positions
    array([1, 3])
    >>> dr.decode(dr.encode(TorchSource(gradient), "topr:2/raw/raw"))
    array([ 0., -4.,  0., -3.], dtype=float32)
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kept: tuple[Support | None, Values] = None, _NOTHING
        self.dtype = numpy_dtype(tensor.dtype)
        self.space = TorchSpace(tuple(tensor.shape), tensor.device)
        self._flat = tensor.detach().reshape(-1).contiguous()
        self._bits = self._flat.view(_BITS[self.dtype.itemsize])

    def all(self) -> Support:
        return Support.all(self.numel)

    def nonzero(self) -> Support:
        return self._selected(self._magnitudes() != 0)

    def top(self, count: int) -> Support:
        if count >= self.numel:
            return self.all()
        keys = self._magnitudes()
        kept = (keys >= self._infinity).sum(0, keepdim=True).clamp(min=count)
        least, ties = _cut(keys, self.numel - kept, self.dtype.itemsize)
        candidates = (keys >= least).nonzero().reshape(-1)
        tied = keys[candidates] == least
        return Support.trusted(to_numpy(candidates[~tied | (tied.cumsum(0) <= ties)]), self.numel)

    def above(self, threshold: float) -> Support:
        return self._selected(self._magnitudes() >= kernels.selection.pattern_of(threshold, self.dtype))

    def chunk_top(self, chunk: int, count: int) -> Support:
        if self.numel == 0:
            return self.all()
        chunk = min(chunk, self.numel)
        # What fills up the last chunk is below every key.
        keys = torch.nn.functional.pad(self._magnitudes(), (0, -self.numel % chunk), value=-1).view(-1, chunk)
        least = keys.topk(min(count, chunk), dim=1, sorted=False).values.amin(1, keepdim=True).clamp(max=self._infinity)
        ties = count - (keys > least).sum(1, keepdim=True)
        tied = keys == least
        first = tied & (tied.cumsum(1, dtype=torch.int32) <= ties)
        keep = (keys > least) | first | (keys >= self._infinity)
        return self._selected(keep.view(-1)[: self.numel])

    def gather(self, support: Support) -> Values:
        if support is self._kept[0]:
            return self._kept[1]
        if support.is_all:
            return to_numpy(self._flat)
        return to_numpy(self._flat[to_torch(support.positions).to(self._flat.device)])

    def keep(self, support: Support, values: Values) -> None:
        self._kept = support, values

    def _selected(self, chosen: torch.Tensor) -> Support:
        return Support.trusted(to_numpy(chosen.nonzero().reshape(-1)), self.numel)

    @property
    def _infinity(self) -> int:
        return kernels.selection.pattern_of(np.inf, self.dtype)

    def _magnitudes(self) -> torch.Tensor:
        """The bits of |x| as numbers: they sort like |x|, then Inf, then NaN. At least 32 bits, as a digit has 16."""
        bits = self._bits.to(torch.int32) if self.dtype.itemsize == 2 else self._bits
        return bits.bitwise_and(2 ** (8 * self.dtype.itemsize - 1) - 1)


def _cut(keys: torch.Tensor, rank: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The key that has `rank` keys before it in sorted order, and how many of the keys equal to it are not among those.

    Digit by digit from the front: each pass counts the digits of the keys that share the front found so far. The first pass sees all
    keys, the next ones hardly any. No sort; and as all numbers are tensors of one element, the host reads none.
    """
    found = torch.zeros_like(rank)
    for shift in range(8 * itemsize - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (keys >> shift) & (2**_DIGIT_BITS - 1)
        counts = torch.bincount(digits, minlength=2**_DIGIT_BITS)
        up_to = counts.cumsum(0)
        digit = torch.searchsorted(up_to, rank, right=True)
        rank = rank - (up_to[digit] - counts[digit])
        found = (found << _DIGIT_BITS) | digit
        keys = keys[digits == digit.to(keys.dtype)]
    return found.to(keys.dtype), keys.numel() - rank


def source_of(tensor: torch.Tensor) -> Source:
    """The source for a tensor: the numba kernels on the memory of a CPU tensor, torch operations elsewhere; COO tensors are sparse.

    >>> type(source_of(torch.ones(3))).__name__, type(source_of(torch.eye(3).to_sparse())).__name__
    ('DenseSource', 'SparseSource')
    """
    if tensor.layout == torch.sparse_coo:
        return SparseSource(sparse_of(tensor))
    if tensor.layout != torch.strided:
        raise InputError(f"a gradient is a strided or a sparse COO tensor, got layout {tensor.layout}")
    return DenseSource(to_numpy(tensor)) if tensor.device.type == "cpu" else TorchSource(tensor)


def sparse_of(tensor: torch.Tensor) -> SparseTensor:
    """A COO tensor as a `SparseTensor` on the host: entries of one position are summed, dense trailing dimensions are spread out.

    >>> table = torch.nn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False, sparse=True)
    >>> table(torch.tensor([1, 1])).sum().backward()
    >>> sparse_of(table.weight.grad).indices, sparse_of(table.weight.grad).values
    (array([2, 3]), array([2., 2.], dtype=float32))
    """
    stored = tensor.detach().coalesce()
    sparse_shape, dense_shape = stored.shape[: stored.sparse_dim()], stored.shape[stored.sparse_dim() :]
    rows = torch.zeros(stored.values().shape[0], dtype=torch.int64, device=stored.device)
    for size, along in zip(sparse_shape, stored.indices(), strict=True):
        rows = rows * size + along
    inner = torch.arange(prod(dense_shape), device=stored.device)
    indices = rows[:, None] * inner.numel() + inner
    return SparseTensor(to_numpy(indices.reshape(-1)), to_numpy(stored.values().reshape(-1)), tuple(stored.shape))


def scatter(tensor: SparseTensor, device: torch.device) -> torch.Tensor:
    """The dense tensor on a device, zero elsewhere; only what is stored crosses to it.

    >>> scatter(SparseTensor([1], np.float32([5]), (1, 3)), torch.device("cpu"))
    tensor([[0., 5., 0.]])
    """
    positions, values = to_torch(tensor.indices).to(device), to_torch(tensor.values).to(device)
    return torch.zeros(tensor.numel, dtype=values.dtype, device=device).index_copy_(0, positions, values).view(tensor.shape)


def decode_sparse(blob: Buffer, device: torch.device, max_numel: int = DEFAULT_MAX_NUMEL) -> SparseTensor:
    """`deepreduce.decode_sparse`, with the steps over all positions on a device.

    >>> import deepreduce as dr
    >>> decode_sparse(dr.encode(np.float32([0, 3, 0]), "nonzero/raw/raw"), torch.device("cpu")).values
    array([3.], dtype=float32)
    """
    return _restored(read_single(blob, max_numel), device)


def _restored(record: Record, device: torch.device) -> SparseTensor:
    """Positions are enumerated by the numba kernels on a CPU, by torch operations elsewhere."""
    return restore(record, None if device.type == "cpu" else TorchSpace(record.shape, device))
