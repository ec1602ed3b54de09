"""Back to the sparse tensors of torch."""

from __future__ import annotations

from math import prod

import torch

from ..tensor import SparseTensor
from .convert import to_torch


def coo_like(gradient: torch.Tensor, mean: SparseTensor) -> torch.Tensor:
    """A COO tensor with the elements of `mean`, and the dtype, device and dense dimensions of `gradient`.

    >>> import numpy as np
    >>> embedding = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2), check_invariants=True)
    >>> coo_like(embedding, SparseTensor([4], np.float32([7]), (3, 2))).coalesce().values()
    tensor([[7., 0.]])
    """
    sparse_shape, row_shape = gradient.shape[: gradient.sparse_dim()], gradient.shape[gradient.sparse_dim() :]
    row = prod(row_shape)
    flat = to_torch(mean.indices)
    rows, row_index = torch.unique(flat // row, return_inverse=True)
    values = torch.zeros(rows.numel() * row, dtype=gradient.dtype)
    values[row_index * row + flat % row] = to_torch(mean.values).to(gradient.dtype)
    indices = torch.stack(torch.unravel_index(rows, sparse_shape))
    return torch.sparse_coo_tensor(indices, values.view(-1, *row_shape), gradient.shape, check_invariants=True).to(gradient.device)
