"""Checkpoints as sources: a safetensors file, a folder of shards with their index, or an npz file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

from ..errors import FileError
from .atomic import replacing
from .kinds import Array, Kind, Shape
from .npz import Npz
from .safetensors_files import SafetensorsFile, write_safetensors
from .sources import TensorSource

_INDEX = ".safetensors.index.json"


class CheckpointFiles(TensorSource, Protocol):
    """Tensors in files, and how to write others in the same layout."""

    def check_target(self, target: Path) -> None:
        """Raise `FileError` for a target that would not be opened as this layout, or that is in the way."""

    def write(self, target: Path, source: TensorSource) -> None:
        """Write the tensors of a source, whole or not at all."""


class OneFile(SafetensorsFile):
    """A checkpoint in one safetensors file."""

    def check_target(self, target: Path) -> None:
        if target.suffix != self.path.suffix:
            raise FileError(f"the result is a safetensors file, as {self.path} is: give it the same suffix, not {target}")

    def write(self, target: Path, source: TensorSource) -> None:
        with replacing(target) as temporary:
            write_safetensors(temporary, source, source.names, self.metadata)


class Shards:
    """A checkpoint in several safetensors files of a folder, with or without an index."""

    def __init__(self, folder: Path, index: Path | None) -> None:
        self._folder, self._index = folder, index
        files = sorted(set(_weight_map(index).values())) if index else sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise FileError(f"{folder} has no safetensors files")
        self._shards = {name: SafetensorsFile(folder / name) for name in files}
        self._where = {name: shard for shard, file in self._shards.items() for name in file.names}
        if len(self._where) != sum(len(file.names) for file in self._shards.values()):
            raise FileError(f"{folder}: two files have a tensor of one name")
        missing = sorted(_weight_map(index).keys() - self._where.keys()) if index else []
        if missing:
            raise FileError(f"{index}: there is no tensor {missing[0]!r}")

    @property
    def names(self) -> Sequence[str]:
        return list(self._where)

    def describe(self, name: str) -> tuple[Kind, Shape]:
        return self._shards[self._where[name]].describe(name)

    def read(self, name: str, start: int, stop: int) -> Array:
        return self._shards[self._where[name]].read(name, start, stop)

    def check_target(self, target: Path) -> None:
        if target.exists():
            raise FileError(f"{target} exists already: give the name of a new folder")

    def write(self, target: Path, source: TensorSource) -> None:
        last = list(self._shards)[-1]
        where = {name: self._where.get(name, last) for name in source.names}
        with replacing(target) as temporary:
            temporary.mkdir(parents=True)
            for shard, file in self._shards.items():
                write_safetensors(temporary / shard, source, [name for name in source.names if where[name] == shard], file.metadata)
            if self._index:
                self._write_index(temporary / self._index.name, source, where)

    def _write_index(self, path: Path, source: TensorSource, where: Mapping[str, str]) -> None:
        assert self._index is not None
        whole = json.loads(self._index.read_text())
        described = (source.describe(name) for name in source.names)
        total_size = sum(kind.itemsize * prod(shape) for kind, shape in described)
        metadata = whole.get("metadata")
        whole["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total_size}
        whole["weight_map"] = where
        path.write_text(json.dumps(whole, indent=2) + "\n")


def _weight_map(index: Path | None) -> Mapping[str, str]:
    try:
        found: Any = json.loads(index.read_text())["weight_map"] if index else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{index} is not the index of a checkpoint: {error}") from error
    if not isinstance(found, dict) or any(Path(str(file)).name != file for file in found.values()):
        raise FileError(f"{index}: its weight_map does not name files of its folder")
    return found


def open_checkpoint(path: Path) -> CheckpointFiles:
    """The checkpoint at a path: a folder, an index, a safetensors file or an npz file."""
    if not path.exists():
        raise FileError(f"there is no checkpoint {path}")
    if path.is_dir():
        indices = sorted(path.glob(f"*{_INDEX}"))
        if len(indices) > 1:
            raise FileError(f"{path} has {len(indices)} indices: give one of them")
        return Shards(path, indices[0] if indices else None)
    if path.name.endswith(_INDEX):
        return Shards(path.parent, path)
    if path.suffix == ".npz":
        return Npz(path)
    return OneFile(path)
