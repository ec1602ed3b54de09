"""Ranges of sparse tensors, put together again."""

from itertools import pairwise

import numpy as np
import pytest

from deepreduce.step import sums
from deepreduce.tensor import SparseTensor, Support

SHAPES = [(40,), (5, 8), (3, 7, 2)]


def sparse(shape, density, dtype=np.float32, seed=0):
    draw = np.random.default_rng([seed, *shape])
    positions = np.flatnonzero(draw.random(int(np.prod(shape))) < density)
    return SparseTensor(positions, draw.standard_normal(positions.size).astype(dtype), shape)


def pieces(tensor, count):
    return [sums.between(tensor, low, high, (high - low,)) for low, high in pairwise(sums.bounds(tensor.numel, count))]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtypes", [3 * [np.float32], [np.float32, np.float16, np.float64]], ids=["one dtype", "three dtypes"])
@pytest.mark.parametrize("densities", [(0.3, 0.1, 0.5), (0, 0, 0.2), (0.2, 1, 0.2), (1, 1, 1)], ids=str)
def test_joined_is_the_inverse_of_between(densities, dtypes, count):
    tensors = [sparse(*given) for given in zip(SHAPES, densities, dtypes, strict=True)]
    joined = sums.joined([pieces(tensor, count) for tensor in tensors], SHAPES)
    for tensor, again in zip(tensors, joined, strict=True):
        assert (again.shape, again.dtype, again.support.is_all) == (tensor.shape, tensor.dtype, tensor.support.is_all)
        np.testing.assert_array_equal(again.indices, tensor.indices)
        assert again.values.tobytes() == tensor.values.tobytes()


def test_joined_takes_ranges_of_which_some_are_whole():
    parts = [SparseTensor(Support.all(2), np.float32([1, 2]), (2,)), SparseTensor([1], np.float32([3]), (3,))]
    (joined,) = sums.joined([parts], [(5,)])
    assert joined.to_dense().tolist() == [1, 2, 0, 3, 0]
