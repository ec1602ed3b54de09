"""Between torch and numpy: the same bits, the same memory where that can be."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import deepreduce as dr
from deepreduce.torch.convert import to_numpy, to_torch
from deepreduce.torch.source import numpy_dtype, source_of, sparse_of

from ..tensors import gradients, same_bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(gradient=gradients())
@settings(max_examples=150, deadline=None)
def test_every_array_comes_back_with_its_bits(gradient):
    before = gradient.copy()
    tensor = to_torch(gradient)
    assert tuple(tensor.shape) == gradient.shape
    assert numpy_dtype(tensor.dtype) == gradient.dtype
    assert same_bits(to_numpy(tensor), gradient)
    assert same_bits(before, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_look_at_one_memory(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    array = to_numpy(tensor)
    array[1, 2] = 7
    assert tensor[1, 2].item() == 7
    again = to_torch(array)
    again[0, 0] = 5
    assert tensor[0, 0].item() == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[::2, 1:], lambda t: t[0, 0], lambda t: t[:0], lambda t: t[:1].expand(5, 6)])
def test_views_of_any_strides_are_not_copied(dtype, view):
    tensor = view(torch.arange(24.0).reshape(4, 6).to(dtype))
    array = to_numpy(tensor)
    assert array.astype(np.float64).tolist() == tensor.double().tolist()
    assert array.size == 0 or array.ctypes.data == tensor.data_ptr()


def test_a_tensor_with_its_sign_set_lazily():
    tensor = torch.tensor([1 + 2j]).conj().imag
    assert tensor.is_neg()
    assert to_numpy(tensor).tolist() == [-2.0]


def test_a_read_only_array_is_copied_without_a_warning():
    array = np.frombuffer(b"\x00\x00\x80\x3f", np.float32)
    to_torch(array)[0] = 2
    assert array[0] == 1


def test_foreign_byte_order():
    assert to_torch(np.array([1.5, -2], ">f4")).tolist() == [1.5, -2]


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.float8_e4m3fn), torch.eye(2).to_sparse()], ids=["float8", "sparse"])
def test_what_numpy_cannot_see_is_refused(tensor):
    with pytest.raises(dr.InputError):
        to_numpy(tensor)


# Sources of tensors


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64)], ids=["int64", "complex64"])
def test_gradients_are_floats(tensor):
    with pytest.raises(dr.InputError, match="float32"):
        source_of(tensor)


def test_other_sparse_layouts_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these layouts are in beta
        csr = torch.eye(2).to_sparse_csr()
    with pytest.raises(dr.InputError, match="sparse_csr"):
        source_of(csr)


def coo(indices, values, shape):
    return torch.sparse_coo_tensor(torch.tensor(indices), torch.tensor(values), shape, check_invariants=True)


@pytest.mark.parametrize(
    "tensor",
    [
        coo([[2, 0, 2], [1, 3, 1]], [1.0, 2.0, 3.0], (3, 4)),  # one position twice
        coo([[4, 1]], [[1.0, 2.0], [3.0, 0.0]], (5, 2)),  # rows, as an embedding gives them
        coo([[1], [0]], [[[1.0], [2.0]]], (2, 3, 2, 1)),
        torch.zeros(2, 3).to_sparse(),
        torch.tensor(3.0).to_sparse(),
    ],
    ids=["doubled", "rows", "hybrid", "zeros", "scalar"],
)
def test_a_coo_tensor_becomes_a_sparse_tensor(tensor):
    sparse = sparse_of(tensor)
    assert sparse.to_dense().tolist() == tensor.to_dense().tolist()
    assert np.array_equal(dr.decode(dr.encode(source_of(tensor), "nonzero/raw/raw")), tensor.to_dense().numpy())
