"""Between torch tensors and numpy arrays, without copying where both can look at the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..errors import InputError
from ..tensor import Values

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_numpy(tensor: torch.Tensor) -> Values:
    """A numpy view of a CPU tensor, of any strides and bfloat16 too; a tensor on another device is copied to the host.

    >>> tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    >>> to_numpy(tensor)
    array([1.5, -2], dtype=bfloat16)
    """
    if tensor.layout != torch.strided:
        raise InputError(f"only a strided tensor can be seen as a numpy array, got layout {tensor.layout}")
    host = tensor.detach() if tensor.requires_grad else tensor
    if not tensor.is_cpu or tensor.is_neg():  # a float is never conjugate
        host = host.cpu().resolve_neg()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(_BFLOAT16)
    try:
        return host.numpy()
    except TypeError as error:
        raise InputError(f"numpy has no dtype for {tensor.dtype}") from error


def to_torch(array: Values) -> torch.Tensor:
    """A CPU tensor on the memory of a writable array in C order; any other array is copied.

    >>> to_torch(np.array([1.5, -2.0], ml_dtypes.bfloat16))
    tensor([ 1.5000, -2.0000], dtype=torch.bfloat16)
    """
    native = array.dtype.newbyteorder("=")
    if not (array.flags.writeable and array.flags.c_contiguous and array.dtype == native) or min(array.strides, default=0) < 0:
        array = np.array(array, native, order="C").reshape(array.shape)
    if native == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def mapped_to_torch(tree: Any) -> Any:
    """Return a state with tensors in place of its arrays."""
    if isinstance(tree, Mapping):
        return {key: mapped_to_torch(value) for key, value in tree.items()}
    return to_torch(tree) if isinstance(tree, np.ndarray) else tree


def mapped_to_numpy(tree: Any) -> Any:
    """Return a state with arrays in place of its tensors."""
    if isinstance(tree, Mapping):
        return {key: mapped_to_numpy(value) for key, value in tree.items()}
    return to_numpy(tree) if isinstance(tree, torch.Tensor) else tree
