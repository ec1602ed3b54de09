from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from .. import kernels
from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Part, Reader
from ..source import Space
from ..tensor import Positions, Support
from .bitmap import Bitmap
from .delta import Delta
from .deltahuffman import FINEST, DeltaHuffman
from .entropy import entropy_bits
from .gapcodec import GapCodec
from .keys import key_bytes
from .pco import PcoIndex
from .raw import RawIndex
from .rice import Rice
from .rle import RLE
from .shaped import Shaped

_RAW, _BITMAP, _DELTA, _RICE, _RLE = RawIndex(), Bitmap(), Delta(), Rice(), RLE()
_HUFFMAN, _PCO, _SHAPED = DeltaHuffman(), PcoIndex(), Shaped()
_SLICE = 256
_LEAST_SLICES = 8
_ONE_SLICE_OF = 32
_DELTA_AT_MOST = 256  # with more positions, the code that `deltahuffman` sends is always worth its bytes
_RLE_RUNS = 0.2  # of the positions directly follow another one: with fewer, runs are no shorter than gaps
_PCO_TABLE_BYTES = 30
_PCO_BIN_BYTES = 1 / 3
_SHAPED_LEAST_BYTES = 5
_RICE_FROM, _RICE_UP_TO = 64, 0.25  # least number of positions, largest density: else `delta` or `bitmap` may be smallest
_NEAREST, _NEAR = 1.01, 1.012  # times the bound for random positions: so near, no other codec, or no slow one, is worth a look
_LEAST_EXCESS_BYTES = 0.15  # times the square root of nnz: every other codec takes this above the bound, for a table or to learn
_MOST_BELOW, _MOST_ABOVE = 0.9, 1.15  # its estimate lies between these times its size, but for nearly full rows
_SHAPED_TRIED_UP_TO = 4096
_SHAPED_LEARNING_BYTES = 16  # so many bytes it may take above its estimate, to learn that rows are full
_GAINS: dict[IndexCodec, float] = {_HUFFMAN: 1.005, _PCO: 1.008, _SHAPED: 1.008}
"""These are slow, so they have to be smaller by more than that."""


@dataclass(frozen=True)
class Auto(IndexCodec):
    """`auto`: the lossless codec that is smallest for the tensor at hand, within 1%. The message names that codec, never `auto`.

    Sizes follow from the gaps of a sample, slices of 256 positions that are spread evenly: all of up to 2,048 positions, a thirty-second
    of very many. `pco` and `shaped` are looked at more closely only where the sample says that they may be the smallest.
    Where the sample looks random and `rice` is near the bound for such positions, no other codec is looked at: encoding takes up to twice
    the time of `rice` for 100 to 5,000 positions, and a fifth more for 20,000. Where rows and columns are of unlike weight, as in most
    gradients, the smallest codec is a slow one, mostly `shaped`: encoding takes the time of that codec, and one to two times as much again
    to find out.

    >>> import deepreduce as dr, numpy as np
    >>> rows = np.zeros((1000, 64), np.float32)
    >>> rows[[3, 40, 800]] = 1
    >>> dr.inspect(dr.parse("nonzero/auto/raw").encode(rows)).spec
    'nonzero/rle/raw'
    """

    def choose(self, selected: Support, space: Space) -> IndexCodec:
        if _rice_is_near_optimal(selected, space):
            return _RICE
        sizes = self.estimates(selected, space)
        return min(sizes, key=lambda codec: sizes[codec] * _GAINS.get(codec, 1))

    def estimates(self, selected: Support, space: Space) -> dict[IndexCodec, float]:
        """About the bytes that each codec would take, without those that cannot be the smallest; of two, the faster one comes first."""
        sizes: dict[IndexCodec, float] = {
            _RAW: selected.nnz * key_bytes(space.numel),
            _BITMAP: (space.numel + 7) // 8,
        }
        if selected.nnz in (0, space.numel):
            return sizes | {_DELTA: 0}
        if space.numel > GapCodec.MAX_NUMEL:
            return sizes
        sample, growth = _sample(selected)
        sizes[_RICE] = _RICE.size_bytes(sample, space, growth)
        if selected.nnz <= _DELTA_AT_MOST:
            sizes[_DELTA] = _DELTA.size_bytes(selected, space)
        if kernels.gaps.count_adjacent(sample.positions) >= _RLE_RUNS * sample.nnz:  # a sample does not see the few gaps of whole rows
            sizes[_RLE] = _RLE.size_bytes(selected, space)
        coded_bytes, table_bytes = _entropy_bytes(sample, growth)
        if _GAINS[_HUFFMAN] * coded_bytes < min(sizes.values()):
            sizes[_HUFFMAN] = _HUFFMAN.size_bytes(sample, space, growth)
        if _GAINS[_PCO] * (coded_bytes + table_bytes) < min(sizes.values()):
            sizes[_PCO] = len(_PCO.encode(selected, space, 0)[0])
            sizes[_HUFFMAN] = _HUFFMAN.size_bytes(selected, space)  # exact too, as pco's size now is
        smallest = min(sizes.values())
        slices = _slices(selected.nnz)
        bound_bytes = growth * kernels.uniform.bound_bits(selected.positions, *slices) / 8
        is_random = smallest <= _NEAR * bound_bytes and _SHAPED.looks_uniform(selected, space, *slices)
        if smallest > _SHAPED_LEAST_BYTES and not is_random:
            sizes[_SHAPED] = _shaped_bytes(selected, space, smallest)
        return sizes

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support | Positions]:
        return self.choose(selected, space).encode(selected, space, seed)

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        raise CorruptError("index codec 'auto' stands for another one when encoding; no message can name it")

    def encode_batch(
        self, selected: Sequence[Support], spaces: Sequence[Space], seeds: Sequence[int]
    ) -> list[tuple[IndexCodec, Part, Support]]:
        groups: dict[IndexCodec, list[int]] = {}
        for index, (support, space) in enumerate(zip(selected, spaces, strict=True)):
            groups.setdefault(self.choose(support, space), []).append(index)
        encoded: dict[int, tuple[IndexCodec, Part, Support]] = {}
        for codec, group in groups.items():
            own = list(map(selected.__getitem__, group)), list(map(spaces.__getitem__, group)), list(map(seeds.__getitem__, group))
            encoded.update(zip(group, codec.encode_batch(*own), strict=True))
        return [encoded[index] for index in range(len(selected))]

    def expected_bits(self, nnz: int, numel: int) -> float:
        return entropy_bits(nnz, numel)


def _rice_is_near_optimal(selected: Support, space: Space) -> bool:
    """Whether the sample looks random and `rice` is so near the bound for such positions that no other codec is smaller by 1%."""
    nnz = selected.nnz
    if not _RICE_FROM <= nnz <= _RICE_UP_TO * space.numel or space.numel > GapCodec.MAX_NUMEL:
        return False
    starts, length = _slices(nnz)
    excess_bits = 8 * _LEAST_EXCESS_BYTES * sqrt(nnz) * starts.size * length / nnz
    others_bits = kernels.uniform.bound_bits(selected.positions, starts, length) + excess_bits
    is_near = kernels.uniform.rice_bits(selected.positions, starts, length) <= _NEAREST * others_bits
    return is_near and _SHAPED.looks_uniform(selected, space, starts, length)


def _slices(nnz: int) -> tuple[Positions, int]:
    """Where the slices of the sample begin, and their length; one slice where it is all."""
    count = max(_LEAST_SLICES, nnz // (_ONE_SLICE_OF * _SLICE))
    if nnz <= count * _SLICE:
        return np.zeros(1, np.int64), nnz
    return np.arange(count) * (nnz - _SLICE) // (count - 1), _SLICE


def _sample(selected: Support) -> tuple[Support, float]:
    """A support with the gaps of the slices, and how many times as much all gaps take: as many as the sum of their widths says."""
    starts, length = _slices(selected.nnz)
    if length == selected.nnz:
        return selected, 1
    sample = kernels.gaps.joined_slices(selected.positions, starts, length)
    return Support.trusted(sample, selected.numel), kernels.gaps.sum_widths(selected.positions) / kernels.gaps.sum_widths(sample)


def _entropy_bytes(sample: Support, growth: float) -> tuple[float, float]:
    """Return about the bytes of all gaps at their entropy, which `pco` comes near, and of the table that `pco` adds."""
    size_bits, used = kernels.prefixes.entropy_bits(sample.positions, FINEST)
    unseen_bits = 0.72 * used  # the entropy of a sample is lower than that of what it is drawn from (Miller and Madow)
    return growth * (size_bits + unseen_bits) / 8, _PCO_TABLE_BYTES + _PCO_BIN_BYTES * used


def _shaped_bytes(selected: Support, space: Space, smallest: float) -> float:
    """About the size of `shaped`; exact where it is near the smallest and soon known."""
    about = _SHAPED.estimate_bytes(selected, space)
    if selected.nnz > _SHAPED_TRIED_UP_TO:
        return about + _SHAPED_LEARNING_BYTES
    in_doubt = about / _MOST_ABOVE < smallest < about / _MOST_BELOW
    return len(_SHAPED.encode(selected, space, 0)[0]) if in_doubt else about
