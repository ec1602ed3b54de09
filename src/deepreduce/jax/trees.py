"""Trees of arrays as names and leaves, and what is kept for every leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import InputError
from ..step.arrays import accumulation_dtype
from ..tensor import float_dtype

Leaves = list[Any]


def named_leaves(tree: Any) -> tuple[list[str], Leaves, Any]:
    """Return the names of all leaves, the leaves as arrays, and the structure of the tree.

    >>> named_leaves({"layers": [jnp.ones(2)]})[0]
    ["['layers'][0]"]
    """
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in named], [jnp.asarray(leaf) for _, leaf in named], structure


def check_floats(names: Sequence[str], leaves: Leaves, what: str) -> None:
    """Raise `InputError` for a leaf whose dtype is not supported."""
    for name, leaf in zip(names, leaves, strict=True):
        float_dtype(leaf.dtype, f"{what} {name}")


def leaves_like(table: Any, structure: Any, what: str) -> Leaves:
    """Return the leaves of a table that has this structure."""
    leaves, known = jax.tree_util.tree_flatten(table)
    if known != structure:
        raise InputError(f"{what} are a tree {known}, but a tree {structure} was given")
    return list(leaves)


def check_kind(name: str, kind: tuple[Any, Any], held: Any, what: str) -> None:
    """Raise `InputError` unless an array has this shape and dtype."""
    if kind != (held.shape, held.dtype):
        raise InputError(f"{name} needs {what} as {kind[1]} of shape {kind[0]}, but it is {held.dtype} of shape {held.shape}")


def kind_kept(leaf: Any) -> tuple[Any, Any]:
    """Return the shape and the dtype of what is kept for a leaf."""
    return leaf.shape, accumulation_dtype(leaf.dtype)
