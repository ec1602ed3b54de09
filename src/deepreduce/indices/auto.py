from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codec import IndexCodec
from ..errors import CorruptError
from ..reader import Reader
from ..source import Space
from ..tensor import Positions, Support
from .bitmap import Bitmap
from .delta import Delta
from .deltahuffman import DeltaHuffman
from .gapcodec import GapCodec
from .keys import key_bytes
from .pco import PcoIndex
from .raw import RawIndex
from .rice import Rice
from .rle import RLE
from .shaped import Shaped

_MEASURED: tuple[GapCodec, ...] = (Delta(), Rice(), RLE(), DeltaHuffman())
_PCO_LEAST_BYTES = 10
_PCO_CHUNK = 2**18  # pcodec adapts to so many gaps at a time
_WHOLE = 2**16
_SLICE = 512
_MOST_SLICES_TO_ONE = 8
_IN_DOUBT_PCO = 0.998  # its table does not grow as the sample does, so the estimate is a little high
_SHAPED_LEAST_BYTES = 5
_SHAPED_IN_DOUBT = 1.5  # its estimate may be so high above its size
_SHAPED_GAIN = 1.005  # it is slow to decode, so it has to be smaller by more than that


@dataclass(frozen=True)
class Auto(IndexCodec):
    """`auto`: the lossless codec that is smallest for the tensor at hand. The message names that codec, never `auto`.

    Every codec tells its size after one pass over the positions, except `pco`, which is tried on a sample: all of up to 65,536
    positions, an eighth of very many; if it wins by its sample, it is tried on the whole. So is `shaped` where it may be the smallest.

    >>> import deepreduce as dr, numpy as np
    >>> rows = np.zeros((1000, 64), np.float32)
    >>> rows[[3, 40, 800]] = 1
    >>> dr.inspect(dr.parse("nonzero/auto/raw").encode(rows)).spec
    'nonzero/rle/raw'
    """

    def choose(self, selected: Support, space: Space) -> IndexCodec:
        sizes = self.estimates(selected, space)
        best = min(sizes, key=sizes.__getitem__)
        if isinstance(best, PcoIndex) and selected.nnz > _WHOLE:  # a sample may mislead: what it gains must be seen
            sizes[best] = len(best.encode(selected, space, 0)[0])
            best = min(sizes, key=sizes.__getitem__)
        return best

    def estimates(self, selected: Support, space: Space) -> dict[IndexCodec, float]:
        """Bytes that each codec would take; of two with the same size, the one that is faster to decode comes first."""
        raw_bytes = selected.nnz * key_bytes(space.numel)
        sizes: dict[IndexCodec, float] = {RawIndex(): raw_bytes, Bitmap(): (space.numel + 7) // 8}
        if space.numel > GapCodec.MAX_NUMEL:
            return sizes
        sizes |= {codec: codec.size_bytes(selected, space) for codec in _MEASURED}
        if min(sizes.values()) > _PCO_LEAST_BYTES:
            sizes[PcoIndex()] = _pco_bytes(selected.positions, space)
        smallest = min(sizes.values())
        if smallest > _SHAPED_LEAST_BYTES and Shaped().estimate_bytes(selected, space) < _SHAPED_IN_DOUBT * smallest:
            sizes[Shaped()] = _SHAPED_GAIN * len(Shaped().encode(selected, space, 0)[0])
        return sizes

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support | Positions]:
        return self.choose(selected, space).encode(selected, space, seed)

    def decode(self, part: Reader, nnz: int, space: Space) -> Positions:
        raise CorruptError("index codec 'auto' stands for another one when encoding; no message can name it")


def _pco_bytes(positions: Positions, space: Space) -> float:
    """The size of `pco` from samples, one per chunk; exact where they are all of it.

    From the sample to the chunk, `pco` is taken to grow as `rice` does: both find the same gaps hard.
    """
    total, before = 0.0, 0
    for chunk in np.split(positions, range(_PCO_CHUNK, positions.size, _PCO_CHUNK)):
        whole = Support.trusted(chunk - before, space.numel)
        sample = Support.trusted(_sample(whole.positions), space.numel)
        growth = Rice().size_bytes(whole, space) / Rice().size_bytes(sample, space)
        total += growth * len(PcoIndex().encode(sample, space, 0)[0]) * (1 if sample.nnz == whole.nnz else _IN_DOUBT_PCO)
        before = int(chunk[-1]) + 1
    return total


def _sample(positions: Positions) -> Positions:
    """Positions with the gaps of some slices of `positions`, evenly spread; all of it where it is short."""
    every = min(-(-positions.size // _WHOLE), _MOST_SLICES_TO_ONE)
    if every == 1:
        return positions
    rounds = positions.size // (every * _SLICE)
    gaps = np.diff(positions, prepend=-1)[: rounds * every * _SLICE]
    return gaps.reshape(rounds, every, _SLICE)[:, 0].reshape(-1).cumsum() - 1
