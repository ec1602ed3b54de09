"""The state of a rank in a checkpoint, and the states of n ranks made into those of m."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..tensor import SparseTensor
from . import sums
from .reducer import ErrorFeedback, Reducer
from .residual import Gradient, ResidualMemory, loaded_tables
from .topology import TOPOLOGIES, Topology

_KEYS = {"step", "seed", "rank", "ranks", "topology", "memory", "owned", "numels"}
_EMPTY: dict[str, Any] = {"residuals": {}, "velocities": {}, "scale": 1.0}


@dataclass(frozen=True)
class Checkpoint:
    """The state of one rank: where it is, its residuals, and those of the ranges that it owns, whose tensors have `numels` elements."""

    step: int
    seed: int
    rank: int
    ranks: int
    topology: str
    memory: Mapping[str, Any]
    owned: Mapping[str, Any]
    numels: Mapping[str, int]

    @classmethod
    def of(cls, step: int, reducer: Reducer, memory: ErrorFeedback, rank: int, ranks: int) -> Checkpoint:
        """Return the checkpoint of a rank."""
        own, owned = (dict(_EMPTY) if held is None else held.state_dict() for held in (memory.own, memory.owned))
        numels = dict(memory.numels) if owned["residuals"] else {}
        return cls(step, reducer.seed, rank, ranks, reducer.topology.name, own, owned, numels)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint in a state dict, checked; nothing is taken over yet."""
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise InputError(f"a state of deepreduce has the keys {', '.join(sorted(_KEYS))}; got {found}")
        checkpoint = cls(**state)
        for number in (checkpoint.step, checkpoint.seed, checkpoint.rank, checkpoint.ranks):
            if not isinstance(number, int) or number < 0:
                raise InputError(f"step, seed, rank and ranks of a state are whole numbers of at least 0, got {number!r}")
        loaded_tables(checkpoint.memory)
        loaded_tables(checkpoint.owned)
        return checkpoint

    def write(self) -> dict[str, Any]:
        """Return the state dict."""
        return {key: getattr(self, key) for key in sorted(_KEYS)}

    def expect(self, reducer: Reducer, rank: int, ranks: int, names: Sequence[str] | None) -> None:
        """Refuse what does not fit this rank: another topology, rank or seed, or a parameter that the model has not."""
        topology = reducer.topology.name
        if self.topology != topology and self.owned["residuals"]:
            raise InputError(f"the state was made with topology {self.topology!r}, which has owners' residuals; here it is {topology!r}")
        if (self.rank, self.ranks) != (rank, ranks) and (self.ranks != ranks or self.owned["residuals"]):
            raise InputError(
                f"the state is that of rank {self.rank} of {self.ranks}, this is rank {rank} of {ranks}: "
                "`reshard` makes the states of all ranks into those of another number of ranks"
            )
        unknown = sorted({*self.memory["residuals"], *self.memory["velocities"]} - set(names)) if names is not None else []
        if unknown:
            raise InputError(f"the state has residuals of parameters that the model has not: {', '.join(unknown[:5])}")
        if self.seed != reducer.seed:
            raise InputError(f"the state was made with seed {self.seed}, this one has seed {reducer.seed}")

    def restore(self, memory: ErrorFeedback) -> None:
        """Let a memory go on from here."""
        for held, state in ((memory.own, self.memory), (memory.owned, self.owned)):
            if held is not None:
                held.load_state_dict(state)
        memory.numels.update(self.numels)


def reshard(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the states of `ranks` ranks from those of any other number, so that no residual is lost.

    Residuals of ranks that leave are added to those of ranks that stay; ranks that join start without. Owners' residuals are cut anew.
    The sum of all residuals is the same before and after.

    >>> states = [Checkpoint(5, 0, rank, 2, "allgather", _with([1.0, rank]), _EMPTY, {}).write() for rank in range(2)]
    >>> [state["memory"]["residuals"]["w"].tolist() for state in reshard(states, 1)]
    [[2.0, 1.0]]
    """
    if ranks < 1:
        raise InputError(f"there is at least one rank, got {ranks}")
    old = sorted((Checkpoint.read(state) for state in states), key=lambda checkpoint: checkpoint.rank)
    if [checkpoint.rank for checkpoint in old] != list(range(len(old))) or {checkpoint.ranks for checkpoint in old} != {len(old)}:
        raise InputError(f"need the states of all ranks of one run, got ranks {[checkpoint.rank for checkpoint in old]}")
    if len({(checkpoint.step, checkpoint.seed, checkpoint.topology) for checkpoint in old}) > 1:
        raise InputError("the states are of different steps, seeds or topologies")
    first, numels = old[0], {name: numel for checkpoint in old for name, numel in checkpoint.numels.items()}
    topology = TOPOLOGIES[first.topology]() if first.topology in TOPOLOGIES else None
    scale = loaded_tables(first.memory)[1]
    whole = _whole_owned(old, topology, numels)
    new = []
    for rank in range(ranks):
        mine = _summed([loaded_tables(checkpoint.memory)[0] for checkpoint in old[rank::ranks]])
        owned = {name: _cut(name, total, topology, rank, ranks) for name, total in whole.items()} if topology else {}
        kept = {name: piece for name, piece in owned.items() if _numel(piece)}
        states_of = [_state(mine["residuals"], mine["velocities"], scale), _state(kept, {}, scale)]
        new.append(Checkpoint(first.step, first.seed, rank, ranks, first.topology, states_of[0], states_of[1], numels).write())
    return new


def _state(residuals: Mapping[str, Gradient], velocities: Mapping[str, Gradient], scale: float) -> dict[str, Any]:
    memory = ResidualMemory()
    memory.residuals, memory.velocities = dict(residuals), dict(velocities)
    return {**memory.state_dict(), "scale": scale}


def _summed(tables: Sequence[dict[str, dict[str, Gradient]]]) -> dict[str, dict[str, Gradient]]:
    total: dict[str, dict[str, Gradient]] = {"residuals": {}, "velocities": {}}
    for state in tables:
        for key, table in state.items():
            for name, held in table.items():
                total[key][name] = _plus(total[key][name], held) if name in total[key] else held
    return total


def _plus(one: Any, other: Any) -> Gradient:
    both_sparse = isinstance(one, SparseTensor) and isinstance(other, SparseTensor)
    return sums.combined([one, other]) if both_sparse else one + other


def _whole_owned(old: Sequence[Checkpoint], topology: Topology | None, numels: Mapping[str, int]) -> dict[str, Gradient]:
    """For every tensor, the residuals of all its owners: flat."""
    whole: dict[str, Gradient] = {}
    for checkpoint in old:
        for name, held in loaded_tables(checkpoint.owned)[0]["residuals"].items():
            if topology is None or name not in numels:
                raise InputError(f"the state has an owner's residual of {name!r}, whose size it does not know")
            low, high = topology.owned_range(name, numels[name], checkpoint.rank, checkpoint.ranks)
            if _numel(held) != high - low:
                raise InputError(f"rank {checkpoint.rank} owns {high - low} elements of {name!r}, its residual has {_numel(held)}")
            whole[name] = _plus(whole[name], _placed(held, low, numels[name])) if name in whole else _placed(held, low, numels[name])
    return whole


def _placed(held: Gradient, low: int, numel: int) -> Gradient:
    """A range as part of a flat tensor that is zero elsewhere."""
    if isinstance(held, SparseTensor):
        return SparseTensor(held.indices + low, held.values, (numel,))
    total = np.zeros(numel, held.dtype)
    total[low : low + held.size] = held.reshape(-1)
    return total


def _cut(name: str, total: Gradient, topology: Topology, rank: int, ranks: int) -> Gradient:
    low, high = topology.owned_range(name, _numel(total), rank, ranks)
    return sums.between(total, low, high, (high - low,)) if isinstance(total, SparseTensor) else total[low:high]


def _numel(held: Gradient) -> int:
    return int(np.prod(held.shape, dtype=np.int64))


def _with(values: list[float]) -> dict[str, Any]:
    """The state of a memory with one residual, for the example above."""
    return _state({"w": np.array(values)}, {}, 1.0)
