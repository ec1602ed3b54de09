"""deepreduce for JAX: one link in an optax chain.

>>> import optax
>>> from deepreduce.jax import compressed_mean
>>> optimizer = optax.chain(compressed_mean("topr:0.01/bitmap/fp16"), optax.sgd(0.1))
"""

from ..errors import PeerError
from ..step.stats import ParameterStats, Stats, StepStats
from ..step.topology import AllGather, Server, Sharded
from .transform import CompressedMean, CompressedMeanState, compressed_mean

__all__ = [
    "AllGather",
    "CompressedMean",
    "CompressedMeanState",
    "ParameterStats",
    "PeerError",
    "Server",
    "Sharded",
    "Stats",
    "StepStats",
    "compressed_mean",
]
