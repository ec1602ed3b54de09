"""Variables of Keras and of TensorFlow, and how a replica assigns its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .exchange import when


def native(variable: Any) -> Any:
    """Return the variable of TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def value_of(variable: Any) -> Any:
    """Return what a variable holds; None for None."""
    return None if variable is None else tf.convert_to_tensor(variable)


def assign(changed: Sequence[tuple[Any, Any]], condition: Any = None) -> None:
    """Let this replica assign each variable its new value where the condition holds; None always holds. In replica context.

    >>> weight = keras.Variable([1.0, 2.0])
    >>> assign([(weight, tf.constant([3.0, 4.0]))], tf.constant(False))
    >>> weight.numpy()
    array([1., 2.], dtype=float32)
    """
    tensors = [(native(variable), after if isinstance(after, tf.IndexedSlices) else value_of(after)) for variable, after in changed]
    tf.distribute.get_replica_context().merge_call(_update, args=(tensors, condition))


def _update(strategy: Any, changed: Sequence[tuple[Any, Any]], condition: Any) -> None:
    for variable, after in changed:
        strategy.extended.update(variable, _assign, args=(after, condition), group=False)


def _assign(variable: Any, after: Any, condition: Any) -> None:
    def write() -> list[Any]:
        if isinstance(after, tf.IndexedSlices):
            variable.scatter_update(after)
        else:
            variable.assign(after)
        return []

    when(condition, write, [])
