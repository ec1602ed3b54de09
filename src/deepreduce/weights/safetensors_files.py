"""Tensors in safetensors files, read and written a part at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import ConfigError, FileError
from .kinds import KINDS, Array, Kind, Shape
from .records import pieces
from .sources import TensorSource

_NAMES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "BOOL": "bool",
}
_BY_NAME = {kind.name: kind for kind in KINDS}
_TO_KIND = {name: _BY_NAME[ours] for name, ours in _NAMES.items()}
_FROM_KIND = {kind.code: name for name, kind in _TO_KIND.items()}
_LENGTH_BYTES = 8


class SafetensorsFile:
    """One safetensors file. The safetensors package checks its header; the tensors are read from where it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._start = _LENGTH_BYTES + size
        self._entries = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
        for name, entry in self._entries.items():
            if entry["dtype"] not in _TO_KIND:
                raise FileError(f"{path}: tensor {name!r} is {entry['dtype']}, known are {', '.join(_TO_KIND)}")

    @property
    def names(self) -> Sequence[str]:
        return list(self._entries)

    def describe(self, name: str) -> tuple[Kind, Shape]:
        entry = self._entries[name]
        return _TO_KIND[entry["dtype"]], tuple(entry["shape"])

    def read(self, name: str, start: int, stop: int) -> Array:
        entry = self._entries[name]
        kind = _TO_KIND[entry["dtype"]]
        out = np.empty(stop - start, kind.unsigned)
        with self.path.open("rb") as file:
            file.seek(self._start + entry["data_offsets"][0] + start * kind.itemsize)
            if file.readinto(out.view("u1").data) != out.nbytes:
                raise FileError(f"{self.path} ends within tensor {name!r}")
        return out


def _check_header(path: Path) -> None:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError("safetensors files need the safetensors package: pip install 'deepreduce[weights]'") from error
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, ValueError, SafetensorError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from error


def write_header(file: IO[bytes], tensors: Mapping[str, tuple[Kind, Shape]], metadata: Mapping[str, str]) -> None:
    """The front of a safetensors file; the data of the tensors follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    if "__metadata__" in tensors:
        raise FileError("a safetensors file cannot hold a tensor of the name '__metadata__'; nothing is written")
    at = 0
    for name, (kind, shape) in tensors.items():
        end = at + prod(shape) * kind.itemsize
        header[name] = {"dtype": _FROM_KIND[kind.code], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)


def write_safetensors(path: Path, source: TensorSource, names: Sequence[str], metadata: Mapping[str, str]) -> None:
    """Some tensors of a source as a safetensors file."""
    with path.open("wb") as file:
        write_header(file, {name: source.describe(name) for name in names}, metadata)
        for name in names:
            for piece in pieces(prod(source.describe(name)[1])):
                file.write(np.ascontiguousarray(source.read(name, piece.start, piece.stop)).view("u1").data)
