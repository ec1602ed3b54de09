"""deepreduce for JAX: one link in an optax chain.

>>> import optax
>>> from deepreduce.jax import compressed_mean
>>> optimizer = optax.chain(compressed_mean("topr:0.01/bitmap/fp16"), optax.sgd(0.1))
"""

from ..accounting import ParameterStats, Stats, StepStats
from ..errors import PeerError
from .transform import CompressedMean, CompressedMeanState, compressed_mean

__all__ = [
    "CompressedMean",
    "CompressedMeanState",
    "ParameterStats",
    "PeerError",
    "Stats",
    "StepStats",
    "compressed_mean",
]
