"""deepreduce for PyTorch: one line in a DDP script.

>>> from deepreduce.torch import DeepReduceState, deepreduce_hook
>>> state = DeepReduceState("topr:0.01/bitmap/fp16")
>>> # ddp_model.register_comm_hook(state, deepreduce_hook)
"""

from ..accounting import ParameterStats, Stats, StepStats
from ..errors import PeerError
from .allreduce import allreduce_
from .hook import deepreduce_hook, noop_hook
from .memory import TorchMemory
from .state import DeepReduceState
from .topology import AllGather, Server, Sharded
from .weight_sync import SyncStats, WeightSync

__all__ = [
    "AllGather",
    "DeepReduceState",
    "ParameterStats",
    "PeerError",
    "Server",
    "Sharded",
    "Stats",
    "StepStats",
    "SyncStats",
    "TorchMemory",
    "WeightSync",
    "allreduce_",
    "deepreduce_hook",
    "noop_hook",
]
