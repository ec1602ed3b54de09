from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, log, log2
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..codec import IndexCodec, spelled
from ..errors import ConfigError, CorruptError
from ..reader import Reader, varint
from ..source import Space
from ..tensor import Positions, Support

Policy = Literal["naive", "p0", "p1", "p2", "p2exact", "leftmost", "middle", "rightmost"]

MIN_FPR, MAX_FPR = 1e-15, 0.99
_MAX_AUTO_FPR = 0.5
_MAX_HASHES = 50
_VALUE_BITS = 32
_HARMLESS = 2**16


@dataclass(frozen=True)
class Bloom(IndexCodec):
    """`bloom`: a Bloom filter of the selected positions; the policy makes a support of its positives. Lossy; paper, section 4.

    ``p0``
        All positives: what was selected, and with it a share `fpr` of all others, with their own values. Nothing that was selected is
        lost, so a gradient that is sparse by itself comes back exactly.
    ``p1``
        As many positives as were selected, at random.
    ``p2``
        As many as were selected, those first that the filter proves to have been selected (Algorithm 1). Conflict sets of 255 items
        or more count as equally large, which takes a quarter of the memory of ``p2exact``.
    ``p2exact``
        Algorithm 1 as published: conflict sets by their exact sizes.
    ``leftmost``, ``middle``, ``rightmost``
        As many as were selected, from the start, the middle or the end of the positives.
    ``naive``
        The values of the selected positions, put at the first positives: every false positive moves all values behind it. A bad example.

    The filter takes 1.44 log2(1 / fpr) bits per selected position. Where `fpr` is None it is the one with the fewest bytes in all for
    `p0` and values of 32 bits. Encoding and decoding look at all positions of the tensor, in a few nanoseconds each.

    >>> import deepreduce as dr, numpy as np
    >>> gradient = np.random.default_rng(0).standard_normal(10000, np.float32)
    >>> blob = dr.parse("topr:0.01/bloom:p0,fpr=0.01/raw").encode(gradient, seed=4)
    >>> dr.inspect(blob).nnz, dr.inspect(blob).index_bytes
    (194, 123)
    >>> selected = np.flatnonzero(dr.decode(dr.parse("topr:0.01/raw/raw").encode(gradient)))
    >>> bool(np.all(dr.decode(blob)[selected] == gradient[selected]))
    True
    """

    policy: Policy = spelled("p0")
    fpr: float | None = None

    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fpr is not None and not MIN_FPR <= self.fpr <= MAX_FPR:
            raise ConfigError(f"bloom takes a false positive rate of {MIN_FPR} to {MAX_FPR}, got {self.fpr}")

    @property
    def slips(self) -> bool:
        return self.policy == "naive"

    def encode(self, selected: Support, space: Space, seed: int) -> tuple[bytes, Support]:
        bloom = Filter.holding(selected.positions, self._rate(selected.nnz, space.numel), seed)
        if self.slips:
            return bloom.part(), selected
        wanted = space.numel if self.policy == "p0" else selected.nnz
        return bloom.part(), Support.trusted(_POLICIES[self.policy](bloom, space, wanted), space.numel)

    def decode(self, part: Reader, nnz: int, space: Space) -> Support:
        support = _POLICIES[self.policy](Filter.read(part), space, nnz)
        if support.size != nnz:
            raise CorruptError(f"a Bloom filter gives {support.size} positions or more by policy {self.policy}, the header says {nnz}")
        return Support.trusted(support, space.numel)

    def max_bytes(self, nnz: int, space: Space) -> int:
        # The rate that is chosen where none is given grows with what is selected, so that of one position needs the most bits for each.
        return 16 + _filter_bytes(nnz, self._rate(1, space.numel))

    def _rate(self, selected: int, numel: int) -> float:
        if self.fpr is not None:
            return self.fpr
        # The least of filter bits plus value bits, r ln(1/e)/ln(2)^2 + v e (d - r), over the rate e.
        best = selected / (log(2) ** 2 * _VALUE_BITS * max(1, numel - selected))
        return min(max(best, MIN_FPR), _MAX_AUTO_FPR)


def _filter_bytes(selected: int, rate: float) -> int:
    """The least size that gives this rate of false positives, in whole bytes: remark 2 of the paper; above a half, that of one hash."""
    size_bits = ceil(-selected * log(rate) / log(2) ** 2 if rate <= 0.5 else -selected / log(1 - rate))
    return min((size_bits + 7) // 8, kernels.bloom.MAX_BYTES)


def _hashes(rate: float) -> int:
    return max(1, round(-log2(rate)))


@dataclass(frozen=True, eq=False)
class Filter:
    """The bits, the number of hashes, and the seed that salts them and that random policies draw from: an index section."""

    bits: NDArray[np.uint8]
    hashes: int
    seed: int

    @classmethod
    def holding(cls, positions: Positions, rate: float, seed: int) -> Filter:
        """A filter of these positions that also holds a share `rate` of all others."""
        hashes, salt = _hashes(rate), _salt(seed)
        return cls(kernels.bloom.insert(_filter_bytes(positions.size, rate), hashes, salt, positions), hashes, seed)

    @classmethod
    def read(cls, part: Reader) -> Filter:
        """The filter of a section. All numbers are sent, as logarithms may differ in their last bit between machines."""
        seed, hashes = part.varint(), part.byte()
        if not 1 <= hashes <= _MAX_HASHES:
            raise CorruptError(f"a Bloom filter of {hashes} hashes, allowed are 1 to {_MAX_HASHES}")
        return cls(part.array(np.uint8, part.varint(kernels.bloom.MAX_BYTES)), hashes, seed)

    def part(self) -> bytes:
        """The section."""
        return b"".join((varint(self.seed), bytes((self.hashes,)), varint(self.bits.size), self.bits.tobytes()))

    def positives(self, space: Space, at_most: int) -> Positions:
        """The first `at_most` positions that it holds."""
        return space.members(self.bits, self.hashes, _salt(self.seed), at_most)

    def all_positives(self, space: Space) -> Positions:
        """Every position that it holds."""
        return self.positives(space, space.numel)


def _salt(seed: int) -> int:
    return int(kernels.draw.state(seed, kernels.draw.HASHING))


# Policies: from a filter to a support, with nothing but what the reader knows. The reader refuses a support that is not of the size wanted.


def _everything(bloom: Filter, space: Space, wanted: int) -> Positions:
    return bloom.positives(space, wanted + 1)  # one more, so that a reader notices if there are too many


def _leftmost(bloom: Filter, space: Space, wanted: int) -> Positions:
    return bloom.positives(space, wanted)


def _middle(bloom: Filter, space: Space, wanted: int) -> Positions:
    positives = bloom.all_positives(space)
    start = max(0, positives.size - wanted) // 2
    return positives[start : start + wanted]


def _rightmost(bloom: Filter, space: Space, wanted: int) -> Positions:
    positives = bloom.all_positives(space)
    return positives[max(0, positives.size - wanted) :]


def _random(bloom: Filter, space: Space, wanted: int) -> Positions:
    return kernels.policies.some_of(bloom.all_positives(space), wanted, _draws(bloom))


def _conflict_sets(bloom: Filter, space: Space, wanted: int, exact: bool = False) -> Positions:
    size_bits = 8 * bloom.bits.size
    positives = bloom.all_positives(space)
    # Every set of every positive takes memory. A writer with k hashes has at least (k - 1/2) / ln 2 bits per selected position, for two
    # hashes or more, and sets at most k of them. So less than 1.73 / k of all positions can be positives, be the filter ever so small.
    probes, selected_probes = bloom.hashes * positives.size, bloom.hashes * wanted
    if probes > selected_probes + 1.75 * space.numel + _HARMLESS or selected_probes > 8 * size_bits + _HARMLESS:
        raise CorruptError(
            f"a Bloom filter of {size_bits} bits and {bloom.hashes} hashes has {positives.size} of {space.numel} positions "
            f"for {wanted} selected ones: no writer makes that"
        )
    return kernels.policies.by_conflict_sets(positives, wanted, size_bits, bloom.hashes, _salt(bloom.seed), _draws(bloom), exact)


def _draws(bloom: Filter) -> np.uint64:
    return kernels.draw.state(bloom.seed, kernels.draw.POLICY)


_POLICIES: dict[Policy, Callable[[Filter, Space, int], Positions]] = {
    "naive": _leftmost,
    "p0": _everything,
    "p1": _random,
    "p2": _conflict_sets,
    "p2exact": partial(_conflict_sets, exact=True),
    "leftmost": _leftmost,
    "middle": _middle,
    "rightmost": _rightmost,
}
