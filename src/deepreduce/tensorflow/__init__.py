"""deepreduce for TensorFlow: one line in a Keras script.

>>> import keras
>>> from deepreduce.tensorflow import DistributedOptimizer, enable_fit
>>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), "topr:0.01/rice/qsgd")
>>> # model.compile(optimizer, loss=...)
>>> # enable_fit(model)
"""

from ..errors import PeerError
from ..step.stats import ParameterStats, Stats, StepStats
from ..step.topology import AllGather, Server, Sharded
from .fitting import enable_fit
from .optimizer import DistributedOptimizer

__all__ = [
    "AllGather",
    "DistributedOptimizer",
    "ParameterStats",
    "PeerError",
    "Server",
    "Sharded",
    "Stats",
    "StepStats",
    "enable_fit",
]
