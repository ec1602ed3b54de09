"""FSDP2 over several nodes: dense inside a node, compressed between nodes.

Every node holds a replica of the model, sharded over its processes: `fully_shard` on the 1-D mesh of the node. Gradients are
reduce-scattered there as ever; each shard then goes to the processes of the other nodes that hold the same shard, compressed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, InputError
from ..step.local import check_equal, digest
from ..torch.allreduce import allreduce_
from ..torch.convert import to_numpy
from ..torch.names import plain_names
from ..torch.state import DeepReduceState
from ..torch.transport import rank_and_size

_OWN_MESH = 'shard with fully_shard(..., mesh=mesh["shard"]) and give the state process_group=mesh["replicate"].get_group()'


def compress_fsdp(model: torch.nn.Module, state: DeepReduceState) -> None:
    """Send the gradients of a model under `fully_shard` compressed between the replicas: the ranks of the state's process group.

    ::

        mesh = init_device_mesh("cuda", (nodes, processes), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        compress_fsdp(model, DeepReduceState("topr:0.01/rice/qsgd", process_group=mesh["replicate"].get_group()))

    All replicas must start from the same parameters: compared in the first step. Mixed precision and gradient accumulation, by
    `set_requires_gradient_sync` or `set_requires_all_reduce`, are those of FSDP, and so is `set_gradient_divide_factor`.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError("compress_fsdp takes a model after fully_shard, and found no FSDP module in it")
    groups = {module: group for module in modules if (group := _parameter_group(module)) is not None}
    replicas = _Replicas(list(groups.values()), state)
    for module, group in groups.items():
        _expect_own_mesh(_unit(group), state)
        module.set_all_reduce_hook(partial(replicas.reduce, group))
    state.bind(model)


class RankState:
    """What `torch.distributed.checkpoint` saves and loads of a state: every rank its own.

    ::

        dcp.save({"model": model.state_dict(), "deepreduce": RankState(state)}, checkpoint_id=path)
    """

    def __init__(self, state: DeepReduceState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, bytes]:
        """Return the state of this rank, as bytes that other ranks have no part in."""
        buffer = io.BytesIO()
        torch.save(self.state.state_dict(), buffer)
        return {f"rank {dist.get_rank()}": buffer.getvalue()}

    def load_state_dict(self, saved: dict[str, bytes]) -> None:
        """Go on from what this rank has saved."""
        self.state.load_state_dict(torch.load(io.BytesIO(saved[f"rank {dist.get_rank()}"]), weights_only=True))


@dataclass(eq=False)
class _Replicas:
    """The hook of all FSDP modules of a model."""

    groups: Sequence[Any]
    state: DeepReduceState
    compared: bool = False
    partial_sums: dict[Any, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def reduce(self, group: Any, buffer: torch.Tensor) -> None:
        """Replace the gradients of the shards of one module, as they are after the reduce-scatter, by their mean over the replicas."""
        unit = _unit(group)
        if not self._accumulated(group, buffer, unit.exchanges):
            return
        if not self.compared:
            digests = {name: own for group in self.groups for name, own in _digests(group).items()}
            check_equal(list(digests), digests.values(), self.state.transport, self.state.step)
            self.compared = True
        gradients = {shard.name: gradient for shard, gradient in _cut(buffer, unit.shards) if gradient.numel()}
        _after_backward(self._close_step)
        if gradients:
            allreduce_(list(gradients.values()), self.state, list(gradients), last=False)
        if unit.sums:
            buffer *= rank_and_size(self.state.options.process_group)[1]

    def _accumulated(self, group: Any, buffer: torch.Tensor, exchanges: bool) -> bool:
        """Return whether the buffer is to be exchanged, with all that `set_requires_all_reduce(False)` has kept back before."""
        kept = self.partial_sums.pop(group, None)
        if kept is not None:
            buffer += kept
        if not exchanges:
            self.partial_sums[group] = buffer.clone()
            buffer.zero_()
        return exchanges

    def _close_step(self) -> None:
        if self.state.stats().is_open:
            self.state.end_step()


# What FSDP2 does not tell in public


@dataclass(frozen=True)
class _Shard:
    """A parameter in the buffer of its module: the shape of this rank's part, and how many elements it takes with its padding."""

    name: str
    shape: torch.Size
    padded_numel: int


@dataclass(frozen=True)
class _Unit:
    """One FSDP module: its parameters in the order of its buffer, who holds the other shards, and whether this backward exchanges.

    `sums`: gradients are divided by what the user has set, and added up over the replicas.
    """

    shards: Sequence[_Shard]
    shard_ranks: Sequence[int]
    has_replicas: bool
    exchanges: bool
    sums: bool


def _parameter_group(module: FSDPModule) -> Any | None:
    """Return the parameters that FSDP keeps in one buffer for a module; None if all of them belong to other modules. Seen in torch 2.13."""
    try:
        groups = module._get_fsdp_state()._fsdp_param_groups
    except AttributeError as error:
        raise _unknown(error) from error
    return groups[0] if groups else None  # FSDP itself refuses a hook for several


def _unit(group: Any) -> _Unit:
    """Return what is used of a parameter group. Seen in torch 2.13. Parameters have names from the first forward on."""
    try:
        trained = plain_names((str(held._param_fqn), held) for held in group.fsdp_params if held.sharded_param.requires_grad)
        shards = [_Shard(name, held.sharded_size, held.padded_sharded_param_size.numel()) for name, held in trained.items()]
        ranks = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
        return _Unit(shards, ranks, group._is_hsdp, group.all_reduce_grads, group.gradient_divide_factor is not None)
    except AttributeError as error:
        raise _unknown(error) from error


def _digests(group: Any) -> dict[str, bytes]:
    """Return a digest of this rank's shard of every parameter. Seen in torch 2.13.

    The model itself shows gathered parameters in the midst of a step, whose storage FSDP frees afterwards.
    """
    try:
        return plain_names((str(held._param_fqn), _digest(held.sharded_param)) for held in group.fsdp_params)
    except AttributeError as error:
        raise _unknown(error) from error


def _unknown(error: AttributeError) -> ConfigError:
    return ConfigError(f"compress_fsdp knows FSDP2 as it is in torch 2.13, found torch {torch.__version__}: {error}")


def _after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that is under way is done. Seen in torch 2.6 to 2.13; FSDP itself ends its steps so."""
    try:
        engine: Any = torch.autograd.Variable._execution_engine
        queue = engine.queue_callback
    except AttributeError as error:
        raise ConfigError(f"compress_fsdp needs the callbacks of autograd, not found in torch {torch.__version__}: {error}") from error
    queue(callback)


# Checks


def _expect_own_mesh(unit: _Unit, state: DeepReduceState) -> None:
    if unit.has_replicas:
        raise ConfigError(f"the mesh of fully_shard has replicas itself, and FSDP would all-reduce between them, dense: {_OWN_MESH}")
    group = state.options.process_group
    replicas = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    common = sorted(set(replicas) & set(unit.shard_ranks))
    if common != [dist.get_rank()]:
        raise ConfigError(f"ranks {common} hold different shards of one model, and would be averaged: {_OWN_MESH}")


def _digest(parameter: torch.Tensor) -> bytes:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return digest(to_numpy(local.detach().clone()))


def _cut(buffer: torch.Tensor, shards: Sequence[_Shard]) -> list[tuple[_Shard, torch.Tensor]]:
    """Return the gradient of every shard, as a view of the buffer without its padding."""
    ends = list(accumulate(shard.padded_numel for shard in shards))
    if ends[-1] != buffer.numel():
        raise InputError(
            f"of the parameters {', '.join(shard.name for shard in shards[:5])} not all got a gradient, and FSDP does not say which: "
            "call model.set_reduce_scatter_unused_params(True)"
        )
    starts = [0, *ends[:-1]]
    return [(shard, buffer[start : start + shard.shape.numel()].view(shard.shape)) for shard, start in zip(shards, starts, strict=True)]
