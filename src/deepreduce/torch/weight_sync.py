"""New weights for a group of processes, step by step: only what changed travels, and everyone ends with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from .. import weights
from ..errors import ConfigError, InputError, PeerError, WrongBaseError
from ..weights.api import Mode

Array = NDArray[Any]

_MESSAGE, _FAILURE = 0, 1
_NO_VERSION = -1
_MAX_FAILURE_BYTES = 2000
_DTYPES = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class SyncStats:
    """What one exchange did: the version that all have now, and the bytes that went to the receivers.

    `patch_bytes` is the size of the patch, which all current receivers get, `full_bytes` that of a whole copy, which went to `full_ranks`.
    """

    version: int
    dense_bytes: int
    patch_bytes: int
    full_bytes: int
    full_ranks: tuple[int, ...]


class WeightSync:
    """Keeps the weights of a group equal to those of one rank, bit for bit.

    `model` is a module or a mapping of names to tensors, of any dtype that `deepreduce.weights` takes; tensors on a device go over host
    memory. The rank `source` calls `push`, all others call `pull`, once per sync. A receiver that is new or behind gets a whole copy.

    >>> model = torch.nn.Linear(2, 2)
    >>> sync = WeightSync(model)  # no process group: there is nobody to send to
    >>> sync.push().version
    1
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        source: int = 0,
        *,
        mode: Mode = "conditional",
        timeout: timedelta | None = None,
    ) -> None:
        self._model, self._source, self._mode, self._timeout = model, source, mode, timeout
        self._version = 0
        self._published: dict[str, Array] | None = None
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self.rejoin(group)

    @property
    def version(self) -> int:
        """How many times the source has pushed; 0 before the first sync of a receiver."""
        return max(self._version, 0)

    def rejoin(self, group: dist.ProcessGroup | None) -> None:
        """Use another process group from now on, after members came or went. All its members call it, or build a `WeightSync` on it."""
        self.close()
        if not dist.is_initialized():
            self.rank, self.size = 0, 1
            return
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        own = dist.new_group(members, self._timeout, backend="gloo", use_local_synchronization=True)
        if not isinstance(own, dist.ProcessGroup):
            raise PeerError(f"rank {dist.get_rank()} is not in the process group of ranks {members}")
        self._group, self.rank, self.size = own, dist.get_rank(own), len(members)
        if not 0 <= self._source < self.size:
            raise ConfigError(f"source is a rank of the group, 0 to {self.size - 1}, got {self._source}")

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def push(self) -> SyncStats:
        """Send what changed since the last push to all receivers. For the source only."""
        if self.rank != self._source:
            raise InputError(f"rank {self.rank} is a receiver: it pulls, rank {self._source} pushes")
        patch, failure = b"", b""
        behind = self._behind()
        try:
            current = {name: array for name, (_, array) in self._views().items()}
            if self._published is not None and len(behind) < self.size - 1:
                patch = weights.diff(self._published, current, mode=self._mode)
            full = weights.diff({}, current) if behind else b""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".encode()[:_MAX_FAILURE_BYTES]
            self._announce(_FAILURE, len(failure), 0)
            self._broadcast(np.frombuffer(failure, np.uint8).copy())
            raise
        self._announce(_MESSAGE, len(patch), len(full))
        if patch:
            self._broadcast(np.frombuffer(patch, np.uint8).copy())
        for rank in behind:
            self._run(dist.send, torch.from_numpy(np.frombuffer(full, np.uint8).copy()), group_dst=rank)
        self._keep(current)
        self._version += 1
        return SyncStats(self._version, sum(array.nbytes for array in current.values()), len(patch), len(full), tuple(behind))

    def pull(self) -> SyncStats:
        """Receive what the source pushes and apply it, verified. For receivers only.

        Where the weights here are not those of the last sync, `WrongBaseError` is raised, nothing is changed, and the next sync brings a
        whole copy.
        """
        if self.rank == self._source:
            raise InputError(f"rank {self.rank} is the source: it pushes")
        behind = self._behind()
        status, version, patch_bytes, full_bytes = self._announce(0, 0, 0)
        patch = self._broadcast(np.empty(patch_bytes, np.uint8)) if patch_bytes else None
        if status == _FAILURE:
            raise PeerError(f"rank {self._source} failed: {bytes(patch if patch is not None else b'').decode(errors='replace')}")
        full = None
        if self.rank in behind:
            full = np.empty(full_bytes, np.uint8)
            self._run(dist.recv, torch.from_numpy(full), group_src=self._source)
        views = self._views()
        try:
            self._apply(views, patch, full)
        except WrongBaseError:
            self._version = _NO_VERSION
            raise
        self._version = version + 1
        return SyncStats(self._version, sum(array.nbytes for _, array in views.values()), patch_bytes, full_bytes, tuple(behind))

    def _apply(self, views: Mapping[str, tuple[torch.Tensor, Array]], patch: Array | None, full: Array | None) -> None:
        arrays = {name: array for name, (_, array) in views.items()}
        if full is None:
            weights.apply_(arrays, patch.data if patch is not None else b"")
        else:
            whole = weights.apply({}, full.data, max_numel=sum(array.size for array in arrays.values()))
            _check_same(arrays, whole)
            for name, array in whole.items():
                arrays[name][...] = array
        for tensor, array in views.values():
            if not _shares(tensor, array):
                with torch.no_grad():
                    tensor.copy_(_to_tensor(array, tensor.dtype))

    def _keep(self, current: Mapping[str, Array]) -> None:
        """Remember what was published; the same memory is used again."""
        if self._published is None or self._published.keys() != current.keys():
            self._published = {name: array.copy() for name, array in current.items()}
            return
        for name, array in current.items():
            np.copyto(self._published[name], array)

    def _views(self) -> dict[str, tuple[torch.Tensor, Array]]:
        """Every tensor with an array on its memory, or with a copy where that cannot be; tied tensors once."""
        tensors = self._model.state_dict() if isinstance(self._model, nn.Module) else self._model
        seen: dict[object, str] = {}
        found = {}
        for name, tensor in tensors.items():
            memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            if tensor.numel() == 0 or seen.setdefault(memory, name) == name:
                found[name] = (tensor, to_array(tensor))
        return found

    # The collectives

    def _behind(self) -> list[int]:
        """The receivers that do not have the version of the source."""
        if self._group is None:
            return []
        mine = self._version if self.rank == self._source or self._version > 0 else _NO_VERSION
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(dist.all_gather, found, torch.tensor([mine]))
        return [rank for rank, version in enumerate(found) if rank != self._source and version != found[self._source]]

    def _announce(self, status: int, patch_bytes: int, full_bytes: int) -> tuple[int, int, int, int]:
        """What the source says before it sends."""
        head = self._broadcast(np.array([status, self._version, patch_bytes, full_bytes], np.int64).view(np.uint8))
        status, version, patch_bytes, full_bytes = (int(number) for number in head.view(np.int64))
        if patch_bytes < 0 or full_bytes < 0 or max(patch_bytes, full_bytes) > self._limit_bytes():
            raise PeerError(f"rank {self._source} announces {patch_bytes} and {full_bytes} bytes, more than its weights can take")
        return status, version, patch_bytes, full_bytes

    def _limit_bytes(self) -> int:
        tensors = self._model.state_dict() if isinstance(self._model, nn.Module) else self._model
        return 2**20 + sum(2 * tensor.numel() * tensor.element_size() + 1024 for tensor in tensors.values())

    def _broadcast(self, buffer: Array) -> Array:
        if self._group is not None:
            self._run(dist.broadcast, torch.from_numpy(buffer), group_src=self._source)
        return buffer

    def _run(self, collective: Any, *arguments: Any, **options: Any) -> None:
        problem = None
        try:
            collective(*arguments, group=self._group, **options)
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        if problem is not None:  # raised here, as the traceback of the error would hold the group
            raise PeerError(f"rank {self.rank} could not exchange weights: a peer failed, is gone or is too slow ({problem})")


def to_array(tensor: torch.Tensor) -> Array:
    """A numpy array on the memory of a contiguous CPU tensor, bfloat16 and float8 too; of any other tensor, a copy.

    >>> to_array(torch.tensor([1.5], dtype=torch.bfloat16))
    array([1.5], dtype=bfloat16)
    """
    host = tensor.detach().cpu().contiguous()
    if host.dtype in _DTYPES:
        plain, dtype = _DTYPES[host.dtype]
        return host.view(plain).numpy().view(dtype)
    try:
        return host.numpy()
    except TypeError as error:
        raise InputError(f"there are no differences of {tensor.dtype} tensors") from error


def _to_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    if dtype in _DTYPES:
        return torch.from_numpy(array.view(f"{'i' if array.itemsize == 2 else 'u'}{array.itemsize}")).view(dtype)
    return torch.from_numpy(array)


def _shares(tensor: torch.Tensor, array: Array) -> bool:
    return tensor.device.type == "cpu" and tensor.data_ptr() == array.ctypes.data


def _check_same(here: Mapping[str, Array], there: Mapping[str, Array]) -> None:
    for name in here.keys() | there.keys():
        if name not in here or name not in there or (here[name].shape, here[name].dtype) != (there[name].shape, there[name].dtype):
            raise InputError(f"tensor {name!r} is not the same at the source and here: the models differ")
