"""The gradient transformation: a state that is a pytree, and an update that works eagerly and inside `jit`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from ..accounting import Stats
from ..errors import ConfigError, InputError
from ..parameters import natural, shown
from ..pipeline import DeepReduce
from ..policy import Policy, policy_of
from ..steps import wide_dtype
from ..tensor import float_dtype
from .link import Collective, Coordinator
from .reducer import Reducer


class CompressedMeanState(NamedTuple):
    """What a process must remember, each its own: the number of the step, and what every gradient is still owed (None without memory)."""

    step: jax.Array
    residuals: Any


class CompressedMean(optax.GradientTransformation):  # type: ignore[misc]
    """A `GradientTransformation` that knows what it cost."""

    _stats: Stats

    def stats(self) -> Stats:
        """Bytes and seconds of the latest steps; inside `jit`, of those that have run (`jax.effects_barrier()` waits for them)."""
        return self._stats


def compressed_mean(
    spec: str | DeepReduce | Policy,
    memory: Literal["residual", "none"] = "residual",
    small_tensor_numel: int = 1024,
    *,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    history: int = 100,
) -> CompressedMean:
    """Replace every gradient by its mean over all processes of `jax.distributed`, sent as `spec` says. First link of an `optax.chain`.

    - `spec`: a spec string, a `DeepReduce`, or an object with `choose(name, source)` such as `BySize`.
    - `memory`: ``"residual"`` for error feedback, or ``"none"``.
    - `small_tensor_numel`: smaller tensors travel as they are.
    - `seed`: of all that is drawn at random. `timeout`: of an exchange inside `jit`. `history`: steps of which `stats()` keeps the details.

    A NaN or an Inf of one process reaches all, and leaves no trace in any residual.

    >>> mean = compressed_mean("topr:1/raw/raw", small_tensor_numel=0)
    >>> state = mean.init({"w": jnp.zeros(2)})
    >>> for step in range(2):
    ...     updates, state = mean.update({"w": jnp.array([3.0, 2.0])}, state)
    ...     print(updates["w"], "owed", state.residuals["w"])
    [3. 0.] owed [0. 2.]
    [0. 4.] owed [3. 0.]
    """
    if memory not in ("residual", "none"):
        raise ConfigError(f"memory is 'residual' or 'none', got {memory!r}")
    if not isinstance(timeout, timedelta) or timeout <= timedelta():
        raise ConfigError(f"timeout is a timedelta above 0, got {shown(timeout)}")
    reducer = Reducer(policy_of(spec, small_tensor_numel), natural(seed, "a seed"), Stats(history))
    collective, coordinator = Collective(), Coordinator(timeout)

    def init(params: optax.Params) -> CompressedMeanState:
        residuals = jax.tree_util.tree_map_with_path(_zeros, params) if memory == "residual" else None
        return CompressedMeanState(jnp.zeros((), jnp.int32), residuals)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[Any, Any]:
        named, tree = jax.tree_util.tree_flatten_with_path(updates)
        names = [jax.tree_util.keystr(path) for path, _ in named]
        gradients = [jnp.asarray(leaf) for _, leaf in named]
        owed = _matching(names, gradients, tree, state.residuals)
        likes = [*gradients, *owed]
        traced = any(isinstance(like, jax.core.Tracer) for like in (state.step, *likes))

        def reduced(step: Any, *arrays: Any) -> tuple[Any, ...]:
            hosted = [np.asarray(array) for array in arrays]
            link = coordinator if traced else collective
            return reducer.reduce(int(step), names, hosted[: len(names)], hosted[len(names) :], link)

        if traced:
            _warn_of_one_thread()
            results = io_callback(reduced, tuple(likes), state.step, *likes, ordered=True)
        else:
            results = tuple(map(jnp.asarray, reduced(state.step, *likes)))
        means, rests = results[: len(names)], results[len(names) :]
        residuals = None if state.residuals is None else jax.tree.unflatten(tree, rests)
        return jax.tree.unflatten(tree, means), CompressedMeanState(state.step + 1, residuals)

    transformation = CompressedMean(init, update)
    transformation._stats = reducer.stats
    return transformation


def _zeros(path: tuple[Any, ...], parameter: Any) -> jax.Array:
    dtype = float_dtype(jnp.asarray(parameter).dtype, f"gradient of {jax.tree_util.keystr(path)}")
    return jnp.zeros(jnp.shape(parameter), wide_dtype(dtype))


def _matching(names: Sequence[str], gradients: Sequence[jax.Array], tree: Any, residuals: Any) -> list[Any]:
    """The residuals of these gradients, in their order."""
    for name, gradient in zip(names, gradients, strict=True):
        float_dtype(gradient.dtype, f"gradient of {name}")
    if residuals is None:
        return []
    owed, known = jax.tree_util.tree_flatten(residuals)
    if known != tree:
        raise InputError(f"gradients are a tree {tree}, but what is owed is a tree {known}")
    for name, gradient, rest in zip(names, gradients, owed, strict=True):
        if (gradient.shape, wide_dtype(gradient.dtype)) != (rest.shape, rest.dtype):
            raise InputError(
                f"{name} is {gradient.dtype} of shape {gradient.shape}, but what it is owed is {rest.dtype} of shape {rest.shape}"
            )
    return list(owed)


def _warn_of_one_thread() -> None:
    """On a CPU, JAX runs programs on as many threads as there are cores, and a callback needs a second one to read large arguments."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings: Any = jax.config
    if cores == 1 and jax.default_backend() == "cpu" and settings.read("jax_cpu_enable_async_dispatch"):
        warnings.warn(
            "host callbacks of JAX may wait forever on one core: set jax_cpu_enable_async_dispatch to False before the first computation",
            RuntimeWarning,
            stacklevel=3,
        )
