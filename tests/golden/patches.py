"""The weights behind the golden patches, by arithmetic that is the same everywhere."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from deepreduce import weights


class PatchCase(NamedTuple):
    """Two versions of weights, and the mode of the patch between them."""

    old: dict[str, np.ndarray]
    new: dict[str, np.ndarray]
    mode: str


def spread(size: int, factor: int, modulus: int) -> np.ndarray:
    """Numbers below `modulus` without an order that one sees."""
    return np.arange(size, dtype=np.int64) * factor % 1_000_003 % modulus


def moved(size: int, dtype: object) -> tuple[np.ndarray, np.ndarray]:
    """Bit patterns of which some move: those of low exponents more often, and further."""
    kind = np.dtype(dtype)
    unsigned, top = np.dtype(f"u{kind.itemsize}"), 8 * kind.itemsize - 2
    exponents = spread(size, 7919, 6)
    old = (exponents << (top - 3)) + spread(size, 104_729, 1 << (top - 4))
    changes = spread(size, 15_485_863, 97) < 40 >> exponents
    steps = np.where(changes, 1 + spread(size, 611_953, 9) // (2 + exponents), 0) * (1 - 2 * spread(size, 86_028_121, 2))
    return old.astype(unsigned).view(kind), np.maximum(old + steps, 0).astype(unsigned).view(kind)


def patch_cases() -> dict[str, PatchCase]:
    """Both modes, with groups of several tensors, every action, and tensors that do not change."""
    pairs = {"a": moved(3000, ml_dtypes.bfloat16), "b": moved(500, ml_dtypes.bfloat16), "c": moved(700, np.float32)}
    old = {name: pair[0] for name, pair in pairs.items()} | {"same": np.arange(5.0), "gone": np.arange(3), "reshaped": np.zeros(4, np.int8)}
    new = {name: pair[1] for name, pair in pairs.items()} | {"same": np.arange(5.0), "reshaped": np.ones((2, 3), np.int8)}
    new["added"] = pairs["b"][1].reshape(20, 25)
    return {f"patch-{mode}": PatchCase(old, new, mode) for mode in ("conditional", "portable")}


def encode_patch(case: PatchCase) -> bytes:
    """The patch of a case."""
    return weights.diff(case.old, case.new, mode=case.mode)
