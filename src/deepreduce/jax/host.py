"""Calls to the host and decisions that work outside `jit` and inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ..cores import usable_cores


def is_traced(tree: Any) -> bool:
    """Return whether an array of a tree belongs to a program that is being traced, such as inside `jit`."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def on_host(function: Callable[..., Any], results: Any, *arguments: Any) -> Any:
    """Return what a function of trees of numpy arrays returns, as JAX arrays like `results`.

    Inside `jit` the running program calls the function, and calls stay in order.

    >>> on_host(lambda array: array + 1, jnp.zeros(2), jnp.ones(2)).tolist()
    [2.0, 2.0]
    """

    def call(*given: Any) -> Any:
        return function(*jax.tree.map(np.asarray, given))

    if not is_traced(arguments):
        return jax.tree.map(jnp.asarray, call(*arguments))
    _warn_of_one_thread()
    return io_callback(call, results, *arguments, ordered=True)


def choose(condition: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], *arguments: Any) -> Any:
    """Return what one of two functions returns; outside `jit` the condition is read here.

    >>> choose(jnp.array(True), jnp.negative, jnp.abs, jnp.array(3))
    Array(-3, dtype=int32, weak_type=True)
    """
    if is_traced((condition, arguments)):
        return jax.lax.cond(condition, if_true, if_false, *arguments)
    return (if_true if condition else if_false)(*arguments)


def _warn_of_one_thread() -> None:
    """On a CPU, JAX runs programs on as many threads as there are cores, and a callback needs a second one to read large arguments."""
    settings: Any = jax.config
    if len(usable_cores()) == 1 and jax.default_backend() == "cpu" and settings.read("jax_cpu_enable_async_dispatch"):
        warnings.warn(
            "host callbacks of JAX may wait forever on one core: set jax_cpu_enable_async_dispatch to False before the first computation",
            RuntimeWarning,
            stacklevel=4,
        )
