"""Every sparsifier x index x value triple of the registry, over tensors of all kinds."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.registry import INDEX_STAGE, SPARSIFIER_STAGE, VALUE_STAGE
from deepreduce.source import as_source

from .samples import default_pieces
from .tensors import fixed_gradients, same_bits

GRADIENTS = fixed_gradients()


@pytest.mark.parametrize("value", default_pieces(VALUE_STAGE))
@pytest.mark.parametrize("index", default_pieces(INDEX_STAGE))
@pytest.mark.parametrize("sparsifier", default_pieces(SPARSIFIER_STAGE))
def test_triple(sparsifier, index, value):
    codec = dr.parse(f"{sparsifier}/{index}/{value}")
    for seed, gradient in enumerate(GRADIENTS):
        blob = codec.encode(gradient, seed=seed)
        assert blob == codec.encode(gradient, seed=seed)
        info, tensor, dense = dr.inspect(blob), dr.decode_sparse(blob), dr.decode(blob)
        assert (dense.shape, dense.dtype) == (gradient.shape, gradient.dtype)
        assert info.nnz == tensor.nnz
        assert info.nbytes == len(blob)
        assert same_bits(tensor.to_dense(), dense)
        kept = codec.sparsifier.select(as_source(gradient), seed).positions
        if codec.index.lossless:
            assert np.array_equal(tensor.indices, kept)
        used = dr.parse(info.spec)
        if used.value.lossless and not codec.index.slips:
            assert same_bits(tensor.values, gradient.reshape(-1)[tensor.indices])
