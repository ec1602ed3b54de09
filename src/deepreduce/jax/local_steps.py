"""Local steps: every process takes its own optimizer steps, and sends what they changed after some of them.

::

    parameters ─ steps of this process      ─ change since the last sync ─┐
                                                                          ├ compressed_mean
    anchors    ─ the same in all processes  ─ minus the mean change      ─┘

The change is written as a gradient is, ``anchor - parameter``, as in `deepreduce.step.local`; residuals have that sign too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..errors import ConfigError, InputError
from ..parameters import shown
from ..step.arrays import accumulation_dtype, largest_of
from ..step.local import check_equal, digest, interval, not_finite
from ..step.policy import Spec
from ..step.recipes import LocalMemory, local_settings
from ..step.stats import Stats
from ..step.topology import Topology
from ..step.transport import Transport
from .host import choose, is_traced, on_host
from .transform import CompressedMean, CompressedMeanState, compressed_mean
from .trees import check_floats, check_kind, kind_kept, leaves_like, named_leaves


class LocalStepsState(NamedTuple):
    """The state of one process, each its own.

    `inner` is the state of the wrapped optimizer, `steps` counts the steps since the last sync, `anchors` are the common parameters of the
    last sync in the accumulation dtype, and `mean` has the number of steps before that sync and the residuals.
    """

    inner: Any
    steps: jax.Array
    anchors: Any
    mean: CompressedMeanState


class _Progress(NamedTuple):
    """What a sync changes."""

    params: Any
    steps: jax.Array
    anchors: Any
    mean: CompressedMeanState


class LocalSteps(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A `GradientTransformation` whose parameters can be made equal in all processes, and that knows what it cost."""

    _sync: Callable[[Any, LocalStepsState], tuple[Any, LocalStepsState]]
    _stats: Stats

    def sync(self, params: optax.Params, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
        """Return parameters that are the same in all processes, bit for bit, and the state that goes on from them: all processes call it.

        Exchanges what was done since the last sync. Right after one it sends nothing and returns the parameters of that sync.
        """
        return self._sync(params, state)

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest syncs. Inside `jit`, call `jax.effects_barrier()` before: JAX runs ahead."""
        return self._stats


def local_steps(
    inner: optax.GradientTransformation,
    spec: Spec | None = None,
    every: int | None = None,
    memory: LocalMemory | None = None,
    small_tensor_numel: int | None = None,
    *,
    recipe: str | None = None,
    topology: str | Topology = "allgather",
    threads: int = 1,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    history: int = 100,
) -> LocalSteps:
    """Return an optimizer with which every process takes its own steps, and after every `every` of them applies the compressed mean
    of what they changed.

    `update` takes the parameters; `sync` makes them equal in all processes, before an evaluation and at the end.

    - `inner`: the optimizer with all that belongs to it, such as clipping. All processes start with equal parameters.
    - `spec`: a spec string, a `DeepReduce`, a `Schedule`, or an object with `codec_for(name, source)`; or leave it to a `recipe`.
    - `every`: steps between two syncs; default 1.
    - `memory`: ``"residual"``, the default without a recipe, keeps what was not sent in the state, and all processes go on from the same
      parameters. ``"parameters"`` keeps it in the parameters of its process; where a spec leaves out much of a change, this trains
      better. ``"none"`` drops it.
    - `recipe`: ``"adam"`` for adaptive optimizers, ``"sgd"`` for SGD: sets `spec`, `every`, `memory` and `small_tensor_numel` to what was
      measured to be best; what is given replaces its part.
    - `small_tensor_numel`: smaller tensors travel as they are; default 1024.
    - `topology`, `threads`, `seed`, `timeout`, `history`: as for `compressed_mean`.

    Parameters that are not finite in some process raise `InputError` in all of them at the next sync.

    >>> optimizer = local_steps(optax.sgd(1.0), "topr:1/raw/raw", every=2, memory="parameters", small_tensor_numel=0)
    >>> params = {"w": jnp.zeros(2)}
    >>> state = optimizer.init(params)
    >>> for step in range(2):
    ...     updates, state = optimizer.update({"w": jnp.array([3.0, 2.0])}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print("parameters", params["w"], "anchor", state.anchors["w"])
    parameters [-6. -4.] anchor [-6.  0.]
    >>> params, state = optimizer.sync(params, state)
    >>> print("parameters", params["w"], "residual", state.mean.residuals["w"])
    parameters [-6.  0.] residual [0. 4.]
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise ConfigError(f"local_steps takes an optimizer of optax first, got {shown(inner)}")
    chosen = local_settings(recipe, spec, every=every, memory=memory, small_tensor_numel=small_tensor_numel)
    if chosen.memory not in ("residual", "parameters", "none"):
        raise ConfigError(f"memory is 'residual', 'parameters' or 'none', got {shown(chosen.memory)}")
    between, inner = interval(chosen.every), optax.with_extra_args_support(inner)
    mean = compressed_mean(
        chosen.spec,
        "none" if chosen.memory == "none" else "residual",
        chosen.small_tensor_numel,
        topology=topology,
        threads=threads,
        seed=seed,
        timeout=timeout,
        history=history,
    )

    def init(params: optax.Params) -> LocalStepsState:
        names, leaves, structure = named_leaves(params)
        check_floats(names, leaves, "parameter")
        anchors = jax.tree.unflatten(structure, [jnp.array(leaf, accumulation_dtype(leaf.dtype)) for leaf in leaves])
        return LocalStepsState(inner.init(params), jnp.zeros((), jnp.int32), anchors, mean.init(params))

    def update(updates: optax.Updates, state: LocalStepsState, params: optax.Params | None = None, **extra: Any) -> tuple[Any, Any]:
        params = _checked(params, state)
        own, inner_state = inner.update(updates, state.inner, params, **extra)
        stepped = _Progress(optax.apply_updates(params, own), state.steps + 1, state.anchors, state.mean)
        now: _Progress = choose(stepped.steps >= between, partial(_synchronized, mean), lambda now: now, stepped)
        if chosen.memory == "parameters":
            now = _with_residuals_in_parameters(now)
        return jax.tree.map(_difference, now.params, params), LocalStepsState(inner_state, *now[1:])

    def sync(params: optax.Params, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
        params = _checked(params, state)
        now = choose(state.steps > 0, partial(_synchronized, mean), _reset, _Progress(params, *state[1:]))
        return now.params, LocalStepsState(state.inner, *now[1:])

    transformation = LocalSteps(init, update)
    transformation._sync, transformation._stats = sync, mean.stats()
    return transformation


def _synchronized(mean: CompressedMean, now: _Progress) -> _Progress:
    """Subtract the mean change of all processes from the anchors, and go on from them."""
    names, anchors, _ = named_leaves(now.anchors)
    check = partial(on_host, partial(_check_initial, names, mean._transport_of(is_traced(now))), None)
    choose(now.mean.step == 0, check, lambda _: None, anchors)
    means, state = mean._mean_of_steps(jax.tree.map(_change, now.anchors, now.params), now.mean, now.steps)
    on_host(partial(_check_finite, names), None, now.steps, [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(means)])
    return _at_anchors(now._replace(anchors=jax.tree.map(jnp.subtract, now.anchors, means), mean=state))


def _check_initial(names: Sequence[str], transport: Transport, anchors: Sequence[Any]) -> None:
    check_equal(names, map(digest, anchors), transport, step=0)


def _check_finite(names: Sequence[str], steps: Any, finite: Sequence[Any]) -> None:
    for name, is_finite in zip(names, finite, strict=True):
        if not is_finite:
            raise not_finite(name, int(steps))


def _reset(now: _Progress) -> _Progress:
    """Go on from the anchors; what the parameters have beside them goes to the residuals."""
    residuals = now.mean.residuals
    if residuals is not None:
        changes = jax.tree.map(_change, now.anchors, now.params)
        residuals = jax.tree.map(jnp.add, residuals, changes)
    return _at_anchors(now._replace(mean=now.mean._replace(residuals=residuals)))


def _at_anchors(now: _Progress) -> _Progress:
    """Set the parameters to the anchors: copies, so that a jitted step can be donated both."""
    params = jax.tree.map(lambda anchor, param: jnp.array(_as_held(anchor, param.dtype), param.dtype), now.anchors, now.params)
    return now._replace(params=params, steps=jnp.zeros_like(now.steps))


def _with_residuals_in_parameters(now: _Progress) -> _Progress:
    """Move the residuals into the parameters; what a half precision cannot hold of its residual stays one."""
    params, structure = jax.tree.flatten(now.params)
    residuals = leaves_like(now.mean.residuals, structure, "residuals")
    moved = [_minus_residual(param, residual) for param, residual in zip(params, residuals, strict=True)]
    params, residuals = (jax.tree.unflatten(structure, [pair[index] for pair in moved]) for index in range(2))
    return now._replace(params=params, mean=now.mean._replace(residuals=residuals))


def _minus_residual(param: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a parameter minus its residual, and the residual that is left by its rounding."""
    exact = param.astype(residual.dtype) - residual
    held = _as_held(exact, param.dtype)
    return held.astype(param.dtype), jnp.zeros_like(residual) if held is exact else held - exact


def _change(anchor: jax.Array, param: jax.Array) -> jax.Array:
    return _as_held(anchor, param.dtype) - param.astype(anchor.dtype)


def _difference(wanted: jax.Array, param: jax.Array) -> jax.Array:
    """Return the update that makes one parameter the other, in the accumulation dtype."""
    dtype = accumulation_dtype(param.dtype)
    return wanted.astype(dtype) - param.astype(dtype)


def _as_held(array: jax.Array, dtype: Any) -> jax.Array:
    """Return the values that an array has in another dtype, in its own dtype; finite ones stay finite."""
    if array.dtype == dtype:
        return array
    largest = largest_of(dtype)
    bounded = jnp.where(jnp.isfinite(array), jnp.clip(array, -largest, largest), array)
    keep: Callable[[jax.Array], jax.Array] = jax.lax.optimization_barrier  # without it, XLA may leave out a cast and the cast back
    return keep(bounded.astype(dtype)).astype(array.dtype)


def _checked(params: Any, state: LocalStepsState) -> Any:
    """Return the parameters as JAX arrays; refuse those that are not of the state."""
    if params is None:
        raise InputError("local steps take the parameters: optimizer.update(gradients, state, params)")
    names, leaves, structure = named_leaves(params)
    for name, leaf, anchor in zip(names, leaves, leaves_like(state.anchors, structure, "anchors"), strict=True):
        check_kind(name, kind_kept(leaf), anchor, "its anchor")
    return jax.tree.unflatten(structure, leaves)
