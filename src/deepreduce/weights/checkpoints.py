"""Checkpoints as sources: a safetensors file, a folder of shards with their index, or an npz file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..errors import FileError
from .atomic import replacing
from .kinds import Array, Kind, Shape, kind_of, patterns
from .records import pieces
from .safetensors_files import SafetensorsFile, write_safetensors
from .sources import TensorSource

_INDEX = ".safetensors.index.json"
_BF16 = np.dtype(ml_dtypes.bfloat16)


class CheckpointFiles(TensorSource, Protocol):
    """Tensors in files, and how to write others in the same layout."""

    def write(self, target: Path, source: TensorSource) -> None:
        """Write the tensors of a source, whole or not at all."""


class OneFile(SafetensorsFile):
    """A checkpoint in one safetensors file."""

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

    def write(self, target: Path, source: TensorSource) -> None:
        if target.exists():
            raise FileError(f"{target} exists already: give the name of a new folder")
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
        whole.setdefault("metadata", {})["total_size"] = sum(kind.itemsize * prod(shape) for kind, shape in described)
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


class Npz:
    """Tensors in an npz file; one at a time is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {name.removesuffix(".npy"): _npy_header(archive, name) for name in archive.namelist()}
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise FileError(f"{path} is not a readable npz file: {error}") from error
        self._held: tuple[str, Array] | None = None

    @property
    def names(self) -> Sequence[str]:
        return list(self._entries)

    def describe(self, name: str) -> tuple[Kind, Shape]:
        return self._entries[name]

    def read(self, name: str, start: int, stop: int) -> Array:
        if self._held is None or self._held[0] != name:
            kind, _ = self._entries[name]
            with np.load(self.path, allow_pickle=False) as archive:
                self._held = name, patterns(_typed(archive[name]), kind)
        return self._held[1][start:stop]

    def write(self, target: Path, source: TensorSource) -> None:
        with replacing(target) as temporary, zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
            for name in source.names:
                kind, shape = source.describe(name)
                parts = [source.read(name, piece.start, piece.stop) for piece in pieces(prod(shape))]
                flat = np.concatenate([np.empty(0, kind.unsigned), *parts])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, flat.view(kind.dtype).reshape(shape), allow_pickle=False)


def _npy_header(archive: zipfile.ZipFile, name: str) -> tuple[Kind, Shape]:
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(member)
    return kind_of(_BF16 if dtype == np.dtype("V2") else dtype, name), tuple(shape)


def _typed(array: Array) -> Array:
    """npy files store bfloat16 as two opaque bytes."""
    return array.view(_BF16) if array.dtype == np.dtype("V2") else array


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
