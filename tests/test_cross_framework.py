"""The same gradients, spec, seed and names make the same bytes in every framework, and each decodes what the others wrote."""

from functools import cache
from importlib.util import find_spec
from itertools import combinations

import ml_dtypes
import numpy as np
import pytest

import deepreduce as dr
from deepreduce.step import items
from deepreduce.step.reducer import Bucket, ErrorFeedback, Reducer
from deepreduce.step.topology import AllGather, Sharded
from deepreduce.step.transport import SingleRank

FRAMEWORKS = ["numpy", "torch", "tensorflow", "jax"]
SPECS = ["topr:0.01/rice/qsgd", "topr:0.05/bloom:p2/fitpoly", "randomr:0.1/seeded/fp16", "none/all/raw"]
STEP, RANK, SIZE, SMALL = 7, 1, 2, 32


def gradients():
    draw = np.random.default_rng(0).standard_normal
    return {
        "kernel": draw((40, 50)).astype(np.float32),
        "bias": draw(20).astype(np.float32),
        "half": draw(300).astype(np.float16),
        "brain": draw((30, 4)).astype(ml_dtypes.bfloat16),
        "unused": np.zeros(100, np.float32),
        "overflowed": np.where(np.arange(200) == 150, np.inf, draw(200)).astype(np.float32),
    }


VALUES, ROWS, TABLE = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32), np.array([4, 17, 50]), (60, 8)
"""The touched rows of an embedding."""


def as_numpy(arrays):
    positions = (8 * ROWS[:, None] + np.arange(8)).reshape(-1)
    return [*arrays, dr.SparseTensor(positions, VALUES.reshape(-1), TABLE)]


def as_torch(arrays):
    """As the hook gives them."""
    import torch

    from deepreduce.torch.convert import to_torch
    from deepreduce.torch.views import view

    table = torch.sparse_coo_tensor(torch.from_numpy(ROWS)[None], torch.from_numpy(VALUES), TABLE, check_invariants=True)
    return [view("", tensor) for tensor in (*map(to_torch, arrays), table)]


def as_tensorflow(arrays):
    """As the optimizer gives them, through a graph."""
    import tensorflow as tf

    from deepreduce.tensorflow import exchange

    tensors = [*map(tf.constant, arrays), tf.IndexedSlices(tf.constant(VALUES), tf.constant(ROWS))]
    variables = [tf.Variable(tf.zeros(shape)) for shape in (*(array.shape for array in arrays), TABLE)]
    slots = [exchange.slot_of("", tensor, variable, None, None) for tensor, variable in zip(tensors, variables, strict=True)]
    views = []

    def take(*given):
        left = list(given)
        views.extend(slot.take(left).gradient for slot in slots)
        return [np.int32(0)]

    tf.function(lambda: exchange._on_host(take, [part for tensor in tensors for part in exchange._tensors(tensor)], [tf.int32]))()
    return views


def as_jax(arrays):
    """As the transformation gives them, through a program; JAX has no sparse gradients."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    views = []
    jax.jit(lambda given: io_callback(lambda given: views.extend(map(np.asarray, given)), None, given, ordered=True))(
        list(map(jnp.asarray, arrays))
    )
    jax.effects_barrier()
    return [*views, as_numpy([])[0]]


@cache
def views_of(framework):
    makers = {"numpy": as_numpy, "torch": as_torch, "tensorflow": as_tensorflow, "jax": as_jax}
    return makers[framework](list(gradients().values()))


class Second(SingleRank):
    """One rank of several, before any exchange."""

    rank, size = RANK, SIZE


def prepared(framework, spec, topology):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    views = views_of(framework)
    reducer = Reducer(dr.BySize(SMALL, small=dr.parse("dense"), large=dr.parse(spec)), topology, seed=3)
    bucket, memory = Bucket([*gradients(), "table"], views, STEP), ErrorFeedback(None, None)
    return reducer.prepare(bucket, memory, reducer.context(bucket, memory, Second()))


@pytest.mark.parametrize("topology", [AllGather(), Sharded()], ids=["allgather", "sharded"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("one", "other"), list(combinations(FRAMEWORKS, 2)))
def test_same_bytes_and_each_decodes_the_other(one, other, spec, topology):
    first, second = prepared(one, spec, topology), prepared(other, spec, topology)
    for mine, theirs in zip(first.messages, second.messages, strict=True):
        assert mine.blob == theirs.blob
        expected = dr.decode_many_sparse(mine.blob).values()
        for reader in (mine, theirs):
            for tensor, reference in zip(items.decode([items.read(memoryview(mine.blob), reader.tensors, RANK)])[0], expected, strict=True):
                np.testing.assert_array_equal(tensor.indices, reference.indices)
                assert tensor.values.tobytes() == reference.values.tobytes()
                assert tensor.shape == reference.shape
