"""A step in the graph: two host calls around the all-gather of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..steps import wide_dtype
from .messages import Messenger, Slot

Gradient = Any
"""A `tf.Tensor` or a `tf.IndexedSlices`."""


def slot_of(gradient: Gradient, variable: Any, number: int, owing: bool) -> Slot:
    """What is known of a gradient while the graph is made.

    >>> slot_of(tf.IndexedSlices(tf.ones((2, 3)), tf.constant([4, 1])), tf.Variable(tf.ones((9, 3))), 0, owing=True).sliced
    True
    """
    dtype = np.dtype(gradient.dtype.as_numpy_dtype)
    return Slot(label_of(variable), number, tuple(variable.shape), dtype, isinstance(gradient, tf.IndexedSlices), owing)


def label_of(variable: Any) -> str:
    """The name of a parameter, of Keras or of TensorFlow itself."""
    return str(getattr(variable, "path", variable.name))


def exchange(
    messenger: Messenger, slots: Sequence[Slot], gradients: Sequence[Gradient], owed: Sequence[Any], step: Any
) -> tuple[list[Gradient], list[Gradient]]:
    """The sum of each gradient over all replicas, and what is owed then where something was; slices for slices.

    To be called in replica context, by all replicas. Host calls are stateful: a `tf.function` runs them once a step and in order.
    """
    context = tf.distribute.get_replica_context()
    rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync
    inputs = [tensor for gradient, debt in zip(gradients, owed, strict=True) for tensor in (*_tensors(gradient), *_tensors(debt))]
    (words,) = _on_host(partial(messenger.pack, slots, size), [step, rank, *inputs], [tf.int32])
    gathered = context.all_gather(tf.ensure_shape(words, [None]), axis=0) if size > 1 else words
    dtypes = [dtype for slot in slots for dtype in _dtypes(slot)]
    outputs = _on_host(partial(messenger.unpack, slots, size), [gathered, rank, *inputs], dtypes)
    sums, rests = [], []
    for slot in slots:
        sums.append(_taken(slot, outputs))
        rests.append(_taken(slot, outputs) if slot.owing else None)
    return sums, rests


def _on_host(function: Callable[..., Sequence[Any]], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """What a function of numpy arrays returns; in a graph, at every step."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in function(*[tensor.numpy() for tensor in tensors])]
    return list(tf.numpy_function(function, tensors, dtypes))


def _tensors(gradient: Gradient) -> list[Any]:
    if gradient is None:
        return []
    return [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def _dtypes(slot: Slot) -> list[Any]:
    """What `Messenger.unpack` returns for this gradient."""
    rows = [tf.int64] if slot.sliced else []
    debt = [*rows, tf.as_dtype(wide_dtype(slot.dtype))] if slot.owing else []
    return [*rows, tf.as_dtype(slot.dtype), *debt]


def _taken(slot: Slot, tensors: list[Any]) -> Gradient:
    """The next tensor, or the next slices, from the front of the list."""
    if not slot.sliced:
        return tf.ensure_shape(tensors.pop(0), slot.shape)
    rows, values = tensors.pop(0), tensors.pop(0)
    return tf.IndexedSlices(tf.ensure_shape(values, (None, *slot.shape[1:])), tf.ensure_shape(rows, [None]), tf.constant(slot.shape))
