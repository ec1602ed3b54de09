"""What random positions must take."""

from __future__ import annotations

from math import log2


def entropy_bits(nnz: int, numel: int) -> float:
    """Return the entropy of `nnz` random positions of `numel` in bits; at densities above one half, a bit per element.

    >>> entropy_bits(1, 4), entropy_bits(3, 4), entropy_bits(0, 4)
    (3.2451124978365313, 4.0, 0.0)
    """
    density = nnz / numel if numel else 0.0
    if density in (0.0, 1.0):
        return 0.0
    if density > 0.5:
        return float(numel)
    return -numel * (density * log2(density) + (1 - density) * log2(1 - density))
