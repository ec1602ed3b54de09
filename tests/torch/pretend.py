"""A device that is not there: tensors that say they live on it, keep their data on the host, and count what crosses.

Inside the mode, a tensor of the device (torch calls it "meta") computes with other tensors of the device only; an operation that mixes it
with a tensor of the host is refused, as CUDA refuses it.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")


class DeviceTensor(torch.Tensor):
    """Shape, strides, dtype and device for torch; `held` is the data."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=DEVICE
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} on a device tensor while the device is off")


class PretendDevice(TorchDispatchMode):
    """While it is on: `tensor.to(DEVICE)` and back work, `to_host` and `to_device` are the elements that went each way."""

    def __init__(self):
        super().__init__()
        self.to_host = self.to_device = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch imports its compiler for the first operation, which takes seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        from_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        onto_device = from_device
        if "device" in kwargs:
            onto_device = torch.device(kwargs["device"]) == DEVICE if kwargs["device"] else from_device
            kwargs["device"] = torch.device("cpu")
        if function is torch.ops.aten._local_scalar_dense.default:
            onto_device = False
        if tensors and from_device != onto_device:
            self._count(function, tensors[0], onto_device)
        elif from_device and not all(isinstance(tensor, DeviceTensor) for tensor in tensors):
            raise AssertionError(f"{function} mixes the device and the host")
        args, kwargs = tree_map(lambda leaf: getattr(leaf, "held", leaf), (args, kwargs))
        result = function(*args, **kwargs)
        if not onto_device:
            return result
        given = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
        return tree_map(lambda leaf: given[id(leaf)] if id(leaf) in given else _placed(leaf), result)  # in-place: the tensor itself

    def _count(self, function, tensor, onto_device):
        if function not in (torch.ops.aten._to_copy.default, torch.ops.aten._local_scalar_dense.default):
            raise AssertionError(f"{function} is no explicit transfer")
        if onto_device:
            self.to_device += tensor.numel()
        else:
            self.to_host += tensor.numel()


def _placed(leaf):
    return DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
