"""deepreduce for PyTorch: one line in a DDP script.

>>> from deepreduce.torch import DeepReduceState, deepreduce_hook
>>> state = DeepReduceState("topr:0.01/bitmap/fp16")
>>> # ddp_model.register_comm_hook(state, deepreduce_hook)
"""

from importlib import import_module
from typing import Any

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
    "compress_fsdp",
    "deepreduce_hook",
    "noop_hook",
    "reshard",
]


def __getattr__(name: str) -> Any:
    """Return `compress_fsdp`, which imports FSDP when it is first asked for."""
    if name == "compress_fsdp":
        return import_module("deepreduce.integrations.fsdp").compress_fsdp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
