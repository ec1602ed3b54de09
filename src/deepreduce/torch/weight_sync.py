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
from ..weights.opened import Patch
from ..weights.records import Action
from .transport import checked_timeout, gloo_between, members_of

Array = NDArray[Any]
Described = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

_MESSAGE, _FAILURE = 0, 1
_NO_VERSION = -1
_MAX_FAILURE_BYTES = 2000
_EXTRA_STATE = "_extra_state"  # the last part of its names in a `state_dict`
_DTYPES = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
if hasattr(torch, "float8_e8m0fnu"):  # since PyTorch 2.7
    _DTYPES[torch.float8_e8m0fnu] = (torch.uint8, ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True)
class SyncStats:
    """What one exchange did: the version that all have now, and the bytes that went to the receivers.

    `patch_bytes` is the size of the patch, which is broadcast to all receivers, `full_bytes` that of a whole copy, which went to
    `full_ranks` as well. Either is 0 where nobody needs it.
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
    Names, shapes and dtypes are the same on all ranks and stay the same. What `get_extra_state` of a module returns is not sent.

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
        self._model, self._source, self._mode, self._timeout = model, source, mode, checked_timeout(timeout)
        self._tensors()  # what is not a tensor is refused here, before any exchange
        self._version = 0
        self._published: dict[str, Array] | None = None
        self._gloo: Any = None
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
        members = members_of(group)
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        if not 0 <= self._source < self.size:
            raise ConfigError(f"source is a rank of the group, 0 to {self.size - 1}, got {self._source}")
        if self.size > 1:
            self._gloo = gloo_between(members, self._timeout)

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._gloo = None

    def push(self) -> SyncStats:
        """Send what changed since the last push to all receivers. For the source only.

        `InputError` where a tensor was added or removed since then, or has another shape or dtype.
        """
        if self.rank != self._source:
            raise InputError(f"rank {self.rank} is a receiver: it pulls, rank {self._source} pushes")
        patch, behind = b"", self._behind()
        try:
            current = {name: array for name, (_, array) in self._views().items()}
            if self._published is not None:
                _check_same(_described(self._published), _described(current), "is not what it was at the last push: build a new WeightSync")
                if len(behind) < self.size - 1:
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
            self._run("send", [torch.from_numpy(np.frombuffer(full, np.uint8).copy())], rank, 0)
        self._keep(current)
        self._version += 1
        return SyncStats(self._version, sum(array.nbytes for array in current.values()), len(patch), len(full), tuple(behind))

    def pull(self) -> SyncStats:
        """Receive what the source pushes and apply it, verified. For receivers only.

        Where the weights here are not those of the last sync, `WrongBaseError` is raised, nothing is changed, and the next sync brings a
        whole copy. `InputError` where the source has other tensors: other names, shapes or dtypes. `PeerError` where it announces more
        bytes than its weights can take: the connections are closed then, and the source fails too.
        """
        if self.rank == self._source:
            raise InputError(f"rank {self.rank} is the source: it pushes")
        behind = self._behind()
        status, version, patch_bytes, full_bytes = self._announced()
        blob = self._broadcast(np.empty(patch_bytes, np.uint8)) if patch_bytes else np.empty(0, np.uint8)
        if status == _FAILURE:
            raise PeerError(f"rank {self._source} failed: {bytes(blob).decode(errors='replace')}")
        if self.rank in behind:
            blob = np.empty(full_bytes, np.uint8)
            self._run("recv", [torch.from_numpy(blob)], self._source, 0)
        views = self._views()
        try:
            _apply(views, blob, whole=self.rank in behind)
        except WrongBaseError:
            self._version = _NO_VERSION
            raise
        self._version = version + 1
        return SyncStats(self._version, sum(array.nbytes for _, array in views.values()), patch_bytes, full_bytes, tuple(behind))

    def _keep(self, current: Mapping[str, Array]) -> None:
        """Keep what was published; the same memory is used again."""
        if self._published is None:
            self._published = {name: array.copy() for name, array in current.items()}
            return
        for name, array in current.items():
            np.copyto(self._published[name], array)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors by name; `InputError` for anything else."""
        tensors = self._model
        if isinstance(tensors, nn.Module):
            tensors = {name: tensor for name, tensor in tensors.state_dict().items() if name.rpartition(".")[2] != _EXTRA_STATE}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise InputError(f"{name!r} is no tensor but a {type(tensor).__name__}: give a mapping of the tensors alone")
        return tensors

    def _views(self) -> dict[str, tuple[torch.Tensor, Array]]:
        """Every tensor with an array on its memory, or with a copy where that cannot be; tied tensors once."""
        seen: dict[object, str] = {}
        found = {}
        for name, tensor in self._tensors().items():
            memory = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            if tensor.numel() == 0 or seen.setdefault(memory, name) == name:
                found[name] = (tensor, to_array(tensor))
        return found

    # The collectives

    def _behind(self) -> list[int]:
        """The receivers that do not have the version of the source."""
        mine = self._version if self.rank == self._source or self._version > 0 else _NO_VERSION
        found = [torch.tensor([mine]) for _ in range(self.size)]
        self._run("allgather", found, torch.tensor([mine]))
        return [rank for rank, version in enumerate(found) if rank != self._source and version != found[self._source]]

    def _announce(self, status: int, patch_bytes: int, full_bytes: int) -> None:
        """Tell the receivers what is sent next."""
        self._broadcast(np.array([status, self._version, patch_bytes, full_bytes], np.int64).view(np.uint8))

    def _announced(self) -> tuple[int, int, int, int]:
        """Return what the source announces: a status, its version, and the bytes of the patch and of a whole copy."""
        header = self._broadcast(np.empty(4 * 8, np.uint8)).view(np.int64)
        status, version, patch_bytes, full_bytes = (int(number) for number in header)
        if patch_bytes < 0 or full_bytes < 0 or max(patch_bytes, full_bytes) > self._limit_bytes():
            self.close()  # else the source would wait for this rank to receive them
            raise PeerError(f"rank {self._source} announces {patch_bytes} and {full_bytes} bytes, more than its weights can take")
        return status, version, patch_bytes, full_bytes

    def _limit_bytes(self) -> int:
        return 2**20 + sum(2 * tensor.numel() * tensor.element_size() + 1024 for tensor in self._tensors().values())

    def _broadcast(self, buffer: Array) -> Array:
        self._run("broadcast", torch.from_numpy(buffer), self._source)
        return buffer

    def _run(self, collective: str, *arguments: Any) -> None:
        """Run a collective between the ranks; one rank alone needs none."""
        if self.size == 1:
            return
        if self._gloo is None:
            raise PeerError(f"rank {self.rank} could not exchange weights: its connections are closed")
        problem = None
        try:
            getattr(self._gloo, collective)(*arguments).wait()
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        if problem is not None:  # raised here, as the traceback of the error would hold the connections
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


def _apply(views: Mapping[str, tuple[torch.Tensor, Array]], blob: Array, whole: bool) -> None:
    """Give the tensors their values after a patch, which is made from nothing if it is a `whole` copy."""
    arrays = {name: array for name, (_, array) in views.items()}
    records = Patch.of_bytes(blob.data).header.tensors
    result = {record.name: (record.shape, record.kind.dtype) for record in records if record.action != Action.REMOVED}
    _check_same(_described(arrays), result, "is not the same at the source and here: the models differ")
    after = {} if whole else dict(arrays)
    weights.apply_(after, blob.data, max_numel=sum(array.size for array in arrays.values()))
    for name, (tensor, array) in views.items():
        if after[name] is not array:
            array[...] = after[name]
        if not _shares(tensor, array):
            with torch.no_grad():
                tensor.copy_(_to_tensor(array, tensor.dtype))


def _described(arrays: Mapping[str, Array]) -> Described:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _check_same(here: Described, there: Described, problem: str) -> None:
    """Raise `InputError` for a tensor that is missing on one side, or has another shape or dtype."""
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise InputError(f"tensor {name!r} {problem}")
