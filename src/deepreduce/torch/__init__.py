"""deepreduce for PyTorch: one line in a DDP script.

>>> from deepreduce.torch import DeepReduceState, deepreduce_hook
>>> state = DeepReduceState("topr:0.01/bitmap/fp16")
>>> # ddp_model.register_comm_hook(state, deepreduce_hook)
"""

from ..errors import PeerError
from ..step.residual import ResidualMemory
from ..step.schedule import Schedule
from ..step.stats import ParameterStats, Stats, StepStats
from ..step.topology import AllGather, Server, Sharded
from .allreduce import allreduce_
from .hook import deepreduce_hook, noop_hook
from .local_steps import LocalSteps
from .reshard import reshard
from .state import DeepReduceState
from .weight_sync import SyncStats, WeightSync

__all__ = [
    "AllGather",
    "DeepReduceState",
    "LocalSteps",
    "ParameterStats",
    "PeerError",
    "ResidualMemory",
    "Schedule",
    "Server",
    "Sharded",
    "Stats",
    "StepStats",
    "SyncStats",
    "WeightSync",
    "allreduce_",
    "deepreduce_hook",
    "noop_hook",
    "reshard",
]
