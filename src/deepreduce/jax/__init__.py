"""deepreduce for JAX: one link in an optax chain, or local steps around an optimizer.

>>> import optax
>>> from deepreduce.jax import compressed_mean, local_steps
>>> optimizer = optax.chain(compressed_mean("topr:0.01/bitmap/fp16"), optax.sgd(0.1))
>>> optimizer = local_steps(optax.adamw(1e-3), recipe="adam")
"""

from ..errors import PeerError
from ..step.stats import ParameterStats, Stats, StepStats
from ..step.topology import AllGather, Server, Sharded
from .local_steps import LocalSteps, LocalStepsState, local_steps
from .transform import CompressedMean, CompressedMeanState, compressed_mean

__all__ = [
    "AllGather",
    "CompressedMean",
    "CompressedMeanState",
    "LocalSteps",
    "LocalStepsState",
    "ParameterStats",
    "PeerError",
    "Server",
    "Sharded",
    "Stats",
    "StepStats",
    "compressed_mean",
    "local_steps",
]
