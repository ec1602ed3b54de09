"""Weights that change as those of a model do."""

import ml_dtypes
import numpy as np

from deepreduce.weights.kinds import KINDS

DTYPES = [kind.dtype for kind in KINDS]


def trained(shape: tuple[int, ...] = (64, 48), rate: float = 3e-6, seed: int = 0, dtype=ml_dtypes.bfloat16):
    """Two versions of a tensor: float32 master weights before and after a small step, rounded."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(shape) * 0.02
    return master.astype(dtype), (master + rng.standard_normal(shape) * rate).astype(dtype)


def models(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Three versions of a small model with tensors of several dtypes, of which one never changes."""
    rng = np.random.default_rng(seed)
    master = {f"layer{n}.weight": rng.standard_normal((40, 30)) * 0.02 for n in range(3)}
    versions = []
    for version in range(3):
        tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in master.items()}
        tensors |= {"norm": np.ones(30, np.float32), "bias": np.full(8, version, np.float16), "step": np.array(version, np.int64)}
        versions.append(tensors)
        master = {name: array + rng.standard_normal(array.shape) * 1e-5 for name, array in master.items()}
    return versions


def same_bits(left, right) -> bool:
    """Whether two models are equal, bit for bit."""
    return left.keys() == right.keys() and all(
        (left[name].dtype, left[name].shape, left[name].tobytes()) == (right[name].dtype, right[name].shape, right[name].tobytes())
        for name in left
    )
