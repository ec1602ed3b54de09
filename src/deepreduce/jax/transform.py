"""The gradient transformation: a state that is a pytree, and an update that works eagerly and inside `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..errors import ConfigError
from ..parameters import natural, shown
from ..step.arrays import accumulation_dtype
from ..step.policy import Spec, policy_of
from ..step.reducer import Bucket, ErrorFeedback, Reducer
from ..step.residual import ResidualMemory
from ..step.stats import Stats
from ..step.threads import Threads
from ..step.topology import Topology, topology_of
from ..step.transport import Transport
from ..tensor import float_dtype
from .host import is_traced, on_host
from .transport import connect
from .trees import Leaves, check_floats, check_kind, kind_kept, leaves_like, named_leaves


class CompressedMeanState(NamedTuple):
    """The state of one process, each its own: the number of the step, the residual of every gradient, and those of the sums it owns.

    Without error feedback both are None; `owned` also where the topology has no owners. Of a sum, a process keeps its range, flat.
    """

    step: jax.Array
    residuals: Any
    owned: Any = None


class CompressedMean(optax.GradientTransformation):  # type: ignore[misc]
    """A `GradientTransformation` that knows what it cost."""

    _stats: Stats
    _transport_of: Callable[[bool], Transport]
    _mean_of_steps: Callable[[Any, CompressedMeanState, jax.Array], tuple[Any, CompressedMeanState]]
    """As `update`, for updates that stand for several steps."""

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest steps. Inside `jit`, call `jax.effects_barrier()` before: JAX runs ahead."""
        return self._stats


def compressed_mean(
    spec: Spec,
    memory: Literal["residual", "none"] = "residual",
    small_tensor_numel: int = 1024,
    *,
    topology: str | Topology = "allgather",
    threads: int = 1,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=5),
    history: int = 100,
) -> CompressedMean:
    """Return a transformation that replaces every update by its mean over all processes, sent as `spec` says: before SGD
    in an `optax.chain`, after Adam.

    - `spec`: a spec string, a `DeepReduce`, a `Schedule`, or an object with `codec_for(name, source)` such as `BySize`.
    - `memory`: ``"residual"`` for error feedback, or ``"none"``.
    - `small_tensor_numel`: smaller tensors travel as they are.
    - `topology`: ``"allgather"``, ``"server"``, ``"sharded"`` or a `Sharded(budget=...)`.
    - `threads`: number of threads that encode and decode, at most as many as this process may use cores; results do not depend on it.
    - `seed`: of all that is drawn at random. `timeout`: of an exchange inside `jit`. `history`: steps of which `stats()` keeps the details.

    A NaN or an infinity of one process reaches all, and leaves no trace in any residual.

    >>> mean = compressed_mean("topr:1/raw/raw", small_tensor_numel=0)
    >>> state = mean.init({"w": jnp.zeros(2)})
    >>> for step in range(2):
    ...     updates, state = mean.update({"w": jnp.array([3.0, 2.0])}, state)
    ...     print(updates["w"], "residual", state.residuals["w"])
    [3. 0.] residual [0. 2.]
    [0. 4.] residual [3. 0.]
    """
    if memory not in ("residual", "none"):
        raise ConfigError(f"memory is 'residual' or 'none', got {memory!r}")
    if not isinstance(timeout, timedelta) or timeout <= timedelta():
        raise ConfigError(f"timeout is a timedelta above 0, got {shown(timeout)}")
    chosen, stats = topology_of(topology), Stats(history)
    reducer = Reducer(policy_of(spec, small_tensor_numel), chosen, natural(seed, "a seed"), threads=Threads(threads))
    transport_of = cache(partial(connect, timeout=timeout))  # opened at first use: jax.distributed may not be there yet

    def init(params: optax.Params) -> CompressedMeanState:
        residuals = jax.tree_util.tree_map_with_path(_zeros, params) if memory == "residual" else None
        owned = jax.tree_util.tree_map_with_path(partial(_owned_zeros, chosen), residuals) if chosen.has_owners else None
        return CompressedMeanState(jnp.zeros((), jnp.int32), residuals, owned)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[Any, Any]:
        return mean_of_steps(updates, state, jnp.ones((), jnp.int32))

    def mean_of_steps(updates: optax.Updates, state: CompressedMeanState, steps: jax.Array) -> tuple[Any, CompressedMeanState]:
        names, gradients, structure = named_leaves(updates)
        given = gradients, *_residuals(names, gradients, structure, state, chosen)
        traced = is_traced((state.step, given))

        def exchange(before: Any, steps: Any, *arrays: Any) -> Any:
            return _reduced(reducer, transport_of(traced), stats, names, int(before), int(steps), *arrays)

        taken = on_host(exchange, given, state.step, steps, *given) if names else given
        means, residuals, owned = (None if leaves is None else jax.tree.unflatten(structure, leaves) for leaves in taken)
        return means, CompressedMeanState(state.step + steps, residuals, owned)

    transformation = CompressedMean(init, update)
    transformation._stats, transformation._transport_of, transformation._mean_of_steps = stats, transport_of, mean_of_steps
    return transformation


def _reduced(
    reducer: Reducer,
    transport: Transport,
    stats: Stats,
    names: Sequence[str],
    before: int,
    steps: int,
    gradients: Leaves,
    residuals: Leaves | None,
    owned: Leaves | None,
) -> tuple[Leaves, Leaves | None, Leaves | None]:
    """Return the means, and the residuals from now on, of updates that stand for so many steps; there were some `before`."""
    memory = ErrorFeedback(_memory(names, residuals), _memory(names, owned))
    means, cost = reducer.reduce(Bucket(names, gradients, before + steps - 1), memory, transport)
    cost.count_dense_steps(steps, names)
    stats.add(cost)
    return means, _table(memory.own, names), _table(memory.owned, names, flat=True)


def _memory(names: Sequence[str], held: Leaves | None) -> ResidualMemory | None:
    return None if held is None else ResidualMemory.of(dict(zip(names, held, strict=True)))


def _table(memory: ResidualMemory | None, names: Sequence[str], flat: bool = False) -> Leaves | None:
    held: Leaves | None = None if memory is None else [memory.residuals[name] for name in names]
    return held if held is None or not flat else [array.reshape(-1) for array in held]


def _zeros(path: tuple[Any, ...], parameter: Any) -> jax.Array:
    dtype = float_dtype(jnp.asarray(parameter).dtype, f"gradient of {jax.tree_util.keystr(path)}")
    return jnp.zeros(jnp.shape(parameter), accumulation_dtype(dtype))


def _owned_zeros(topology: Topology, path: tuple[Any, ...], residual: jax.Array) -> jax.Array:
    return jnp.zeros(_owned_numel(topology, jax.tree_util.keystr(path), residual.size), residual.dtype)


def _owned_numel(topology: Topology, name: str, numel: int) -> int:
    """How many elements of a tensor this process owns."""
    low, high = topology.owned_range(name, numel, jax.process_index(), jax.process_count())
    return high - low


def _residuals(
    names: Sequence[str], gradients: Leaves, structure: Any, state: CompressedMeanState, topology: Topology
) -> tuple[Leaves | None, Leaves | None]:
    """Return the residuals of these gradients and of the owned sums, in their order; what does not fit is refused."""
    check_floats(names, gradients, "gradient of")
    if state.residuals is None:
        return None, None
    residuals = leaves_like(state.residuals, structure, "residuals")
    for name, gradient, held in zip(names, gradients, residuals, strict=True):
        check_kind(name, kind_kept(gradient), held, "its residual")
    if not topology.has_owners:
        return residuals, None
    owned = leaves_like(state.owned, structure, "owned residuals")
    for name, residual, held in zip(names, residuals, owned, strict=True):
        kind = (_owned_numel(topology, name, residual.size),), residual.dtype
        check_kind(name, kind, held, "the residual that this process owns of it")
    return residuals, owned
