"""Error feedback: what one step could not send is added to the next (paper, section 6.3: memory compensation).

One rule for every framework. Residuals are kept in the accumulation dtype (float32 for the half precisions), sums of finite numbers stay
finite, and a step with a NaN or an infinity anywhere leaves no trace.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import numpy as np

from ..errors import ConfigError, InputError
from ..tensor import Shape, SparseTensor, Values
from . import sums
from .arrays import HOST, Array, accumulation_dtype, arrays_of
from .packed import Packed, Residuals, small_ones

Gradient = Array | SparseTensor
_TABLES = ("residuals", "velocities")


@dataclass
class ResidualMemory:
    """Keeps, for every parameter by name, the part of its gradients that was not sent yet.

    `decay` scales the residual before it is added. With `clip`, a gradient of a larger Euclidean norm is scaled down to that norm before
    anything is added to it, parameter by parameter; a loss scale is taken into account. Of N ranks, each clips its own gradient: for a
    norm of the mean of `c`, give ``c / N**0.5``. With `momentum` above 0, momentum is accumulated before sparsifying, and cleared where
    an element was selected and sent; a tensor that is sent whole keeps it, so that dense steps are those of SGD with momentum. (Momentum
    correction, factor masking and local clipping of Deep Gradient Compression, Lin et al. 2018.) The optimizer then has no momentum
    itself. Takes numpy arrays, tensors of a framework whose adapter is imported, and `SparseTensor`; of a sparse gradient, only
    the positions that were touched or not sent yet take part.

    >>> import deepreduce as dr, numpy as np
    >>> memory, codec = dr.ResidualMemory(), dr.parse("topr:1/raw/raw")
    >>> for step in range(2):
    ...     gradient = memory.compensate("w", np.float32([3, 2]))
    ...     sent = dr.decode_sparse(codec.encode(gradient))
    ...     memory.update("w", gradient, sent)
    ...     print(gradient, "sent", sent.to_dense())
    [3. 2.] sent [3. 0.]
    [3. 4.] sent [0. 4.]
    """

    decay: float = 1.0
    momentum: float = 0.0
    clip: float | None = None
    residuals: dict[str, Gradient] = field(default_factory=dict, init=False, repr=False)
    velocities: dict[str, Gradient] = field(default_factory=dict, init=False, repr=False)
    _scale: float = field(default=1.0, init=False, repr=False)
    _spares: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Arrays of residuals that were replaced: the memory for the next sum, as fresh memory costs more than the sum itself."""
    _packs: dict[tuple[str, ...], Residuals] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The residuals of small gradients, by the names that travel together."""

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay is above 0 and at most 1, got {self.decay}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is at least 0 and below 1, got {self.momentum}")
        if self.clip is not None and not 0 < self.clip < inf:
            raise ConfigError(f"clip is a norm above 0, or None; got {self.clip}")

    @classmethod
    def of(cls, residuals: Mapping[str, Gradient]) -> ResidualMemory:
        """Return a memory that begins with these residuals: for one step of a framework that keeps them itself."""
        memory = cls()
        memory.residuals.update(residuals)
        return memory

    def compensate(self, name: str, gradient: Any) -> Any:
        """Return the gradient plus its residual, in the accumulation dtype: a new tensor. The residual changes in `update` only."""
        if not self.momentum and self.clip is None and type(gradient) is np.ndarray:  # the common case, without a look at each table
            held = self.residuals.get(name)
            if type(held) is np.ndarray and (held.shape, held.dtype) == (gradient.shape, gradient.dtype):
                spare, self._spares[name] = self._spare(name, held), None  # `update_` fills it again
                return HOST.add_scaled(gradient, [(held, self.decay)], spare)
        gradient = self._clipped(_floats(name, gradient))
        terms = [(held, factor) for table, factor in self._rates() if (held := self._held(table, name, gradient)) is not None]
        if isinstance(gradient, SparseTensor):
            return sums.combined([sums.scaled(gradient, 1.0), *(sums.scaled(held, factor) for held, factor in terms)])
        return arrays_of(gradient).add_scaled(gradient, terms)

    def compensate_small(self, names: Sequence[str], gradients: Sequence[Gradient]) -> Packed | None:
        """`compensate` for the small ones of many gradients, in one call; None where there are none, or each of them needs a look."""
        indices = small_ones(gradients) if not self.momentum and self.clip is None else []
        if not indices:
            return None
        own = tuple(map(names.__getitem__, indices))
        arrays: list[Any] = [gradients[index] for index in indices]
        held: list[Any] = list(map(self.residuals.get, own))
        packed = self._packs.get(own)
        if packed is None or not all(map(operator.is_, held, packed.held.parts)):
            if any(one is not None and _kind(one) != _kind(array) for one, array in zip(held, arrays, strict=True)):
                return None
            self._packs = {key: pack for key, pack in self._packs.items() if not set(key) & set(own)}  # buckets were rebuilt
            packed = self._packs[own] = Residuals.of(held, arrays)
        return packed.compensate(indices, own, arrays, self.decay)

    def update_small_(self, packed: Packed, sent: Sequence[SparseTensor]) -> None:
        """`update_` for what `compensate_small` returned."""
        packed.subtract_(sent)
        self._packs[packed.names].replace(packed.compensated)
        self.residuals.update(zip(packed.names, packed.compensated.parts, strict=True))

    def _clipped(self, gradient: Gradient) -> Gradient:
        """The gradient with a norm of at most `clip`; one with a NaN or an infinity stays as it is."""
        if self.clip is None:
            return gradient
        sparse = isinstance(gradient, SparseTensor)
        norm = HOST.norm(gradient.values) if sparse else arrays_of(gradient).norm(gradient)
        limit = self.clip * self._scale
        if not limit < norm < inf:
            return gradient
        factor = limit / norm
        return sums.scaled(gradient, factor) if sparse else arrays_of(gradient).add_scaled(gradient, [(gradient, factor - 1)])

    def update(self, name: str, compensated: Any, sent: SparseTensor) -> None:
        """Store `compensated` minus `sent` as the residual. A step with NaN or Inf in it is skipped whole: it leaves no trace."""
        compensated = _floats(name, compensated)
        if not isinstance(sent, SparseTensor):
            raise InputError(f"what was sent of {name!r} is a SparseTensor, got {type(sent).__name__}")
        if sent.shape != tuple(compensated.shape):
            raise InputError(f"{name!r} has shape {tuple(compensated.shape)}, but shape {sent.shape} was sent")
        if isinstance(compensated, SparseTensor):
            if sums.is_finite([compensated]):
                self.update_(name, compensated, sent)
            return
        arrays = arrays_of(compensated)
        if arrays.first_nonfinite(compensated) is None:
            self.update_(name, arrays.copy(arrays.to_accumulation_dtype(compensated)), sent)

    def update_(self, name: str, compensated: Gradient, sent: SparseTensor) -> None:
        """`update` without checks: takes `compensated` over and writes to it. For a step that is known to be finite."""
        if isinstance(compensated, SparseTensor):
            self._update_sparse(name, compensated, sent)
            return
        arrays = arrays_of(compensated)
        if self.momentum:
            residual = self._held(self.residuals, name, compensated)
            velocity = arrays.add_scaled(compensated, [] if residual is None else [(residual, -self.decay)])
            if not sent.support.is_all:
                arrays.clear_(velocity, sent.indices)
            self.velocities[name] = velocity
        arrays.subtract_(compensated, sent)
        if name in self._spares:
            self._spares[name] = self.residuals.get(name)
        self.residuals[name] = compensated

    def _spare(self, name: str, like: Values) -> Values | None:
        """Return an array like this one that nobody else holds, a view of it included; None if there is none."""
        held = [self._spares.pop(name, None)]
        if held[0] is None or sys.getrefcount(held[0]) > _ALONE:
            return None
        spare: Values = held.pop()
        if (spare.shape, spare.dtype) != (like.shape, like.dtype):
            return None
        return spare if spare.flags.owndata and spare.flags.c_contiguous else None

    def _update_sparse(self, name: str, compensated: SparseTensor, sent: SparseTensor) -> None:
        if self.momentum:
            residual = self._held(self.residuals, name, compensated)
            velocity = compensated if residual is None else sums.combined([compensated, sums.scaled(residual, -self.decay)])
            self.velocities[name] = velocity if sent.support.is_all else sums.without(velocity, sent.indices)
        self.residuals[name] = sums.combined([compensated, sums.scaled(sent, -1.0)])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_spares": {}, "_packs": {}}

    def _rates(self) -> list[tuple[dict[str, Gradient], float]]:
        return [(self.residuals, self.decay), *([(self.velocities, self.momentum)] if self.momentum else [])]

    def _held(self, table: dict[str, Gradient], name: str, like: Gradient) -> Any:
        held = table.get(name)
        if held is None:
            return None
        if isinstance(held, SparseTensor) != isinstance(like, SparseTensor):
            raise InputError(f"the gradient of {name!r} was sparse and now is dense, or the reverse: its residual fits one of them only")
        (shape, dtype), (held_shape, held_dtype) = _kind(like), _kind(held)
        if (held_shape, held_dtype) != (shape, dtype):
            if held_dtype != dtype or held_shape != (prod(shape),):
                raise InputError(f"{name!r} is {dtype} of shape {shape}, but its residual is {held_dtype} of shape {held_shape}")
            held = table[name] = _reshaped(held, shape)  # a range of a checkpoint
        return held if isinstance(held, SparseTensor) else arrays_of(like).moved(held, like)

    # Dense steps, loss scale, checkpoints

    def flush_into(self, name: str, gradient: Gradient) -> Any:
        """Return the gradient with all that was not sent yet, for a step that sends everything; `drop` it when that has arrived."""
        held = self._held(self.residuals, name, gradient)
        if held is None:
            return gradient
        if isinstance(gradient, SparseTensor):
            return sums.combined([sums.scaled(gradient, 1.0), held])
        return arrays_of(gradient).add_scaled(gradient, [(held, 1.0)])

    def take(self, name: str, like: Gradient) -> Any:
        """Return the residual of a parameter and forget it, for a caller that keeps it elsewhere; None if there is none."""
        held = self._held(self.residuals, name, like)
        self.drop(name)
        return held

    def add(self, name: str, part: Array) -> None:
        """Add a dense tensor of the accumulation dtype to the residual of a parameter. Takes it over."""
        held = self._held(self.residuals, name, part)
        self.residuals[name] = part if held is None else arrays_of(part).add_scaled(part, [(held, 1.0)])

    def drop(self, name: str) -> None:
        """Drop the residual and the velocity of a parameter: it was sent, or rounding is all that is left of it."""
        self._spares.pop(name, None)
        self.residuals.pop(name, None)
        self.velocities.pop(name, None)

    def rescale(self, scale: float) -> None:
        """Follow a loss scale: residuals and velocities were made under the scale before."""
        factor, self._scale = scale / self._scale, scale
        if factor == 1.0:
            return
        for table in (self.residuals, self.velocities):
            for name, held in table.items():
                if isinstance(held, SparseTensor):
                    table[name] = sums.scaled(held, factor)
                else:
                    arrays_of(held).scale_(held, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all residuals and velocities, for a checkpoint."""
        tables = {key: {name: _copied(held) for name, held in getattr(self, key).items()} for key in _TABLES}
        return {**tables, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; earlier residuals and velocities are dropped. Nothing changes if the state is not one of ours."""
        loaded, scale = loaded_tables(state)
        self.residuals, self.velocities, self._scale = loaded["residuals"], loaded["velocities"], scale


def _references_of_one_holder() -> int:
    """Return the reference count of an object that only a list holds, read as in `_spare`: what a call adds depends on the interpreter."""
    held = [object()]
    return sys.getrefcount(held[0])


_ALONE = _references_of_one_holder()


def loaded_tables(state: Mapping[str, Any]) -> tuple[dict[str, dict[str, Gradient]], float]:
    """Return copies of the tables of a state and its loss scale, checked."""
    if not isinstance(state, Mapping) or not {*_TABLES} <= set(state) <= {*_TABLES, "scale"}:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise InputError(f"a memory state is a dict of residuals, velocities and scale, got {found}")
    if not all(isinstance(state[key], Mapping) for key in _TABLES):
        raise InputError("residuals and velocities of a memory state are dicts")
    scale = float(state.get("scale", 1.0))
    if not 0 < scale < float("inf"):
        raise InputError(f"the loss scale of a memory state is above 0 and finite, got {scale}")
    return {key: {name: _loaded(name, held) for name, held in state[key].items()} for key in _TABLES}, scale


def _kind(gradient: Gradient) -> tuple[Shape, np.dtype[Any]]:
    """The shape of a gradient, and the dtype of its residual."""
    dtype = gradient.dtype if isinstance(gradient, SparseTensor) else arrays_of(gradient).dtype(gradient)
    return tuple(gradient.shape), accumulation_dtype(dtype)


def _reshaped(held: Gradient, shape: Shape) -> Gradient:
    return SparseTensor(held.indices, held.values, shape) if isinstance(held, SparseTensor) else held.reshape(shape)


def _copied(held: Gradient) -> Any:
    if isinstance(held, SparseTensor):
        return {"indices": held.indices.copy(), "values": held.values.copy(), "shape": list(held.shape)}
    return arrays_of(held).copy(held)


def _loaded(name: str, held: Any) -> Gradient:
    if isinstance(held, Mapping):
        if set(held) != {"indices", "values", "shape"}:
            raise InputError(f"the sparse residual of {name!r} has the keys indices, values and shape, got {sorted(held)}")
        return sums.scaled(SparseTensor(np.array(held["indices"]), np.array(held["values"]), tuple(held["shape"])), 1.0)
    array = _floats(name, held, "residual of")
    return arrays_of(array).copy(arrays_of(array).to_accumulation_dtype(array))


def _floats(name: str, given: Any, what: str = "gradient") -> Any:
    """A sparse tensor or a dense one of floats; lists and arrays of another byte order become native arrays."""
    if isinstance(given, SparseTensor):
        return given
    array = np.asarray(given) if isinstance(given, list | tuple | np.ndarray | np.generic) else given
    arrays = arrays_of(array)
    try:
        dtype = arrays.dtype(array)
    except InputError as error:
        raise InputError(f"{what} {name!r}: {error}") from error
    return array.astype(dtype, copy=False) if arrays is HOST else array
