"""A step in the graph: host calls around the all-gathers of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ..step.arrays import accumulation_dtype
from ..tensor import float_dtype
from .host import HostSteps
from .views import Slot

TensorOrSlices = Any
"""A `tf.Tensor` or a `tf.IndexedSlices`."""


def slot_of(name: str, gradient: TensorOrSlices, variable: Any, residual: Any, owned: Any) -> Slot:
    """Return what is known of a gradient while the graph is made.

    >>> slot_of("table", tf.IndexedSlices(tf.ones((2, 3)), tf.constant([4, 1])), tf.Variable(tf.ones((9, 3))), None, None).sliced
    True
    """
    dtype = float_dtype(gradient.dtype.as_numpy_dtype, f"gradient of {name}")
    return Slot(name, tuple(variable.shape), dtype, isinstance(gradient, tf.IndexedSlices), residual is not None, owned is not None)


def exchange(
    steps: HostSteps, slots: Sequence[Slot], given: Sequence[Sequence[Any]], step: Any, scale: Any
) -> list[tuple[TensorOrSlices, TensorOrSlices, TensorOrSlices]]:
    """Return the sum of each gradient over all replicas, and its residuals from now on; slices for slices, None for what is not kept.

    `given` are a gradient and its residuals for every slot. To be called in replica context, by all replicas. Host calls are stateful: a
    `tf.function` runs them once per step and in order.
    """
    context = tf.distribute.get_replica_context()
    rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync

    def gathered(words: Any) -> Any:
        return context.all_gather(tf.ensure_shape(words, [None]), axis=0) if size > 1 else words

    inputs = [tensor for row in given for part in row for tensor in _tensors(part)]
    (words,) = _on_host(partial(steps.begin, slots, size), [step, rank, scale, *inputs], [tf.int32])
    for _ in range(steps.reducer.topology.rounds - 1):
        (words,) = _on_host(steps.between, [rank, gathered(words)], [tf.int32])
    dtypes = [dtype for slot in slots for dtype in _dtypes(slot)]
    outputs = _on_host(steps.finish, [rank, gathered(words)], dtypes)
    return [_taken(slot, outputs) for slot in slots]


def _on_host(function: Callable[..., Sequence[Any]], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """What a function of numpy arrays returns; in a graph, at every step."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in function(*[tensor.numpy() for tensor in tensors])]
    return list(tf.numpy_function(function, tensors, dtypes))


def _tensors(part: Any) -> list[Any]:
    if part is None:
        return []
    return [part.values, part.indices] if isinstance(part, tf.IndexedSlices) else [part]


def _dtypes(slot: Slot) -> list[Any]:
    """What `HostSteps.finish` returns for this gradient."""
    rows, accumulation = [tf.int64] if slot.sliced else [], tf.as_dtype(accumulation_dtype(slot.dtype))
    residual = [*rows, accumulation] if slot.has_residual else []
    return [*rows, tf.as_dtype(slot.dtype), *residual, *([accumulation] if slot.has_owned else [])]


def _taken(slot: Slot, tensors: list[Any]) -> tuple[TensorOrSlices, TensorOrSlices, TensorOrSlices]:
    total = _next(slot, tensors)
    residual = _next(slot, tensors) if slot.has_residual else None
    return total, residual, tf.ensure_shape(tensors.pop(0), [None]) if slot.has_owned else None


def _next(slot: Slot, tensors: list[Any]) -> TensorOrSlices:
    """The next tensor, or the next slices, from the front of the list."""
    if not slot.sliced:
        return tf.ensure_shape(tensors.pop(0), slot.shape)
    rows, values = tensors.pop(0), tensors.pop(0)
    return tf.IndexedSlices(tf.ensure_shape(values, (None, *slot.shape[1:])), tf.ensure_shape(rows, [None]), tf.constant(slot.shape))
