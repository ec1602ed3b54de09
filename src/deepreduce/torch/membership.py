"""Bloom membership as torch operations: the hash of `kernels.bloom` in signed 64-bit integers, which wrap to the same bits."""

from __future__ import annotations

import torch

# Bounds the memory: every position in work takes some 40 bytes.
BLOCK = 2**22


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_GOLDEN, _MIX_A, _MIX_B, _STEP = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD1342543DE82EF95))


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    """A right shift that brings in zeros, where torch's brings in the sign."""
    return (number >> by).bitwise_and(2 ** (64 - by) - 1)


def _hashed(positions: torch.Tensor, salt: int) -> torch.Tensor:
    x = (positions + 1) * _GOLDEN + _signed(salt)
    x = (x ^ _shifted(x, 30)) * _MIX_A
    x = (x ^ _shifted(x, 27)) * _MIX_B
    return x ^ _shifted(x, 31)


def members(packed: torch.Tensor, hashes: int, salt: int, numel: int, at_most: int) -> torch.Tensor:
    """The first `at_most` of the positions 0..numel-1 that a filter holds, on the device of its bytes, `packed`.

    Probe by probe over blocks of positions, half of which survive each probe.

    >>> members(torch.tensor([192, 10], dtype=torch.uint8), 3, 7, numel=12, at_most=12)
    tensor([4, 6, 9])
    """
    found = [torch.empty(0, dtype=torch.int64, device=packed.device)]
    wanted = at_most if packed.numel() else 0  # an empty filter holds nothing
    for start in range(0, numel, BLOCK):
        if wanted <= 0:
            break
        positions = torch.arange(start, min(start + BLOCK, numel), device=packed.device)
        found.append(_survivors(packed, hashes, salt, positions)[:wanted])
        wanted -= found[-1].numel()
    return torch.cat(found)


def _survivors(packed: torch.Tensor, hashes: int, salt: int, positions: torch.Tensor) -> torch.Tensor:
    hashed, size_bits = _hashed(positions, salt), 8 * packed.numel()
    for _ in range(hashes):
        bit = _shifted(_shifted(hashed, 32) * size_bits, 32)
        held = ((packed[bit >> 3] >> (bit & 7)) & 1).nonzero().reshape(-1)
        hashed, positions = hashed[held] * _STEP, positions[held]
    return positions
