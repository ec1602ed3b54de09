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

Given = Callable[[], Sequence[Sequence[TensorOrSlices]]]


def slot_of(name: str, gradient: TensorOrSlices, variable: Any, residual: Any, owned: Any) -> Slot:
    """Return what is known of a gradient while the graph is made.

    >>> slot_of("table", tf.IndexedSlices(tf.ones((2, 3)), tf.constant([4, 1])), tf.Variable(tf.ones((9, 3))), None, None).sliced
    True
    """
    dtype = float_dtype(gradient.dtype.as_numpy_dtype, f"gradient of {name}")
    return Slot(name, tuple(variable.shape), dtype, isinstance(gradient, tf.IndexedSlices), residual is not None, owned is not None)


def exchange(
    steps: HostSteps, slots: Sequence[Slot], given: Given, step: Any, scale: Any, since: Any = 1, due: Any = None
) -> Callable[[], list[tuple[TensorOrSlices, TensorOrSlices, TensorOrSlices]]]:
    """Exchange gradients, or the changes of the `since` latest steps, and return what ends the exchange.

    That returns the sum of each gradient over all replicas, and its residuals from now on; slices for slices, None for what is not kept.
    `given` returns a gradient and its residuals for every slot. Where `due` is false, nothing is computed and the replicas gather an empty
    word; the end is not to be called then. To be called in replica context, by all replicas. Host calls are stateful: a `tf.function`
    runs them once per step and in order.
    """
    context = tf.distribute.get_replica_context()
    rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync

    def frame(function: Callable[..., Sequence[Any]], inputs: Callable[[], list[Any]]) -> Any:
        """Return the frames of all replicas for one exchange."""
        (words,) = when(due, lambda: _on_host(function, inputs(), [tf.int32]), [tf.int32])
        return context.all_gather(tf.ensure_shape(words, [None]), axis=0) if size > 1 else words

    def first() -> list[Any]:
        return [step, since, rank, scale, *(tensor for row in given() for part in row for tensor in _tensors(part))]

    gathered = frame(partial(steps.begin, slots, size), first)
    for _ in range(steps.reducer.topology.rounds - 1):
        gathered = frame(steps.between, partial(list, (rank, gathered)))

    def end() -> list[tuple[TensorOrSlices, TensorOrSlices, TensorOrSlices]]:
        outputs = _on_host(steps.finish, [rank, gathered], [dtype for slot in slots for dtype in _dtypes(slot)])
        return [_taken(slot, outputs) for slot in slots]

    return end


def when(condition: Any, compute: Callable[[], list[Any]], dtypes: Sequence[Any]) -> list[Any]:
    """Return what `compute` returns, tensors of these dtypes; placeholders where the condition does not hold. None always holds.

    >>> when(tf.constant(False), lambda: [tf.ones((2, 3))], [tf.float32])[0].numpy()
    array([0.], dtype=float32)
    """
    if condition is None:
        return compute()
    return list(tf.cond(condition, compute, lambda: [tf.zeros([1], dtype) for dtype in dtypes]))


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
