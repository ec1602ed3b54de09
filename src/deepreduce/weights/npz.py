"""Tensors in npz files: zip archives with an npy file per tensor."""

from __future__ import annotations

import re
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from ..errors import FileError
from .atomic import replacing
from .kinds import Array, Kind, Shape, kind_of, patterns
from .records import pieces
from .sources import TensorSource

_LONGEST_NAME_BYTES = 65_535 - len(".npy")
_LEADS_OUT = re.compile(r"/|[A-Za-z]:/|(.*/)?\.\.(/|$)")
_BF16 = np.dtype(ml_dtypes.bfloat16)
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile, tokenize.TokenError, SyntaxError)
"""What numpy and zipfile raise for files that are damaged, encrypted or forged."""


class Npz:
    """A checkpoint in an npz file; one tensor at a time is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {info.filename.removesuffix(".npy"): _npy_header(archive, info) for info in archive.infolist()}
        except _UNREADABLE as error:
            raise FileError(f"{path} is not a readable npz file: {error}") from error
        self._held: tuple[str, Array] | None = None

    @property
    def names(self) -> Sequence[str]:
        return list(self._entries)

    def describe(self, name: str) -> tuple[Kind, Shape]:
        return self._entries[name]

    def read(self, name: str, start: int, stop: int) -> Array:
        held = self._held  # one look at it: other threads may read other tensors meanwhile
        if held is None or held[0] != name:
            held = self._held = name, self._load(name)
        return held[1][start:stop]

    def _load(self, name: str) -> Array:
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return patterns(from_npy(archive[name]), self._entries[name][0])
        except _UNREADABLE as error:
            raise FileError(f"{self.path}: tensor {name!r} cannot be read: {str(error) or type(error).__name__}") from error

    def check_target(self, target: Path) -> None:
        if target.suffix != ".npz":
            raise FileError(f"the result is an npz file, as {self.path} is: write it to a .npz file, not {target}")

    def write(self, target: Path, source: TensorSource) -> None:
        for name in source.names:
            check_member(target, name)
            if source.describe(name)[0].name.startswith("float8"):
                raise FileError(
                    f"nothing is written to {target}: tensor {name!r} is {source.describe(name)[0].name}, which npz files cannot hold"
                )
        with replacing(target) as temporary, zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
            for name in source.names:
                kind, shape = source.describe(name)
                parts = [source.read(name, piece.start, piece.stop) for piece in pieces(prod(shape))]
                flat = np.concatenate([np.empty(0, kind.unsigned), *parts])
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, flat.view(kind.dtype).reshape(shape), allow_pickle=False)


def _npy_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[Kind, Shape]:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(member)
        size_bytes = info.file_size - member.tell()
    if prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"{info.filename} has shape {shape} and {size_bytes} bytes, which is not what {dtype} takes")
    return kind_of(from_npy(np.empty(0, dtype)).dtype, info.filename), tuple(shape)


def from_npy(array: Array) -> Array:
    """The array of an npy file, which stores bfloat16 as two opaque bytes; nothing else looks like that."""
    return array.view(_BF16) if array.dtype == np.dtype("V2") else array


def check_member(path: Path, name: str) -> None:
    """Raise `FileError` for a name that leads out of the folder an archive is unpacked to, or that zip files cannot hold."""
    if "\\" in name or _LEADS_OUT.match(name) or not name.isprintable():
        problem = "is not a safe name in a zip file"
    elif len(name.encode()) > _LONGEST_NAME_BYTES:
        problem = f"has {len(name.encode()):,} bytes, and a zip file allows {_LONGEST_NAME_BYTES:,}"
    else:
        return
    shown = name if len(name) <= 60 else f"{name[:60]}..."
    raise FileError(f"nothing is written to {path}: the tensor name {shown!r} {problem}; it can be decoded in Python only")
