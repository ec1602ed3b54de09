"""Tensors and messages in files: npy for one tensor, npz for several by name."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from ..errors import FileError as FileError
from ..tensor import Values

_LONGEST_NAME_BYTES = 65_535 - len(".npy")
_LEADS_OUT = re.compile(r"/|[A-Za-z]:/|(.*/)?\.\.(/|$)")
_BF16 = np.dtype(ml_dtypes.bfloat16)


def read_tensors(path: Path) -> Values | dict[str, Values]:
    """The tensor of an npy file, or those of an npz file by name. Pickled objects are refused."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return _from_numpy(loaded)
        with loaded as archive:
            return {name: _from_numpy(archive[name]) for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FileError(f"{path} is not a readable .npy or .npz file: {_reason(error)}") from error


def write_tensors(path: Path, tensors: Values | Mapping[str, Values]) -> None:
    """Write an npy file for one tensor, npz for several; the suffix must agree. Names come from a peer: unsafe ones are refused."""
    wanted = ".npy" if isinstance(tensors, np.ndarray) else ".npz"
    if path.suffix != wanted:
        raise FileError(
            f"the message holds {'one tensor' if wanted == '.npy' else 'named tensors'}: write it to a {wanted} file, not {path}"
        )
    if not isinstance(tensors, np.ndarray):
        for name in tensors:
            _check_member(path, name)
    with _replacing(path) as temporary:
        if isinstance(tensors, np.ndarray):
            np.save(temporary, tensors)
        else:
            with zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
                for name, tensor in tensors.items():  # np.savez takes names as keywords, and 'file' clashes
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(tensor), allow_pickle=False)


def _check_member(path: Path, name: str) -> None:
    """Raise `FileError` for a name that leads out of the folder an archive is unpacked to, or that zip files cannot hold."""
    if "\\" in name or _LEADS_OUT.match(name) or not name.isprintable():
        problem = "is not a safe name in a zip file"
    elif len(name.encode()) > _LONGEST_NAME_BYTES:
        problem = f"has {len(name.encode()):,} bytes, and a zip file allows {_LONGEST_NAME_BYTES:,}"
    else:
        return
    shown = name if len(name) <= 60 else f"{name[:60]}..."
    raise FileError(f"nothing is written to {path}: the tensor name {shown!r} {problem}; read it in Python by deepreduce.decode_many")


def read_blob(path: Path) -> bytes:
    """The bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {_reason(error)}") from error


def write_blob(path: Path, blob: bytes) -> None:
    """Write a message: whole, or not at all."""
    with _replacing(path) as temporary:
        temporary.write_bytes(blob)


class _replacing:
    """A temporary path beside the target that takes its place when all went well, so that no half-written file is left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self._temporary.replace(self._path)
            else:
                self._temporary.unlink(missing_ok=True)
        except OSError as failed:
            kind, error = OSError, failed
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise FileError(f"cannot write {self._path}: {_reason(error)}") from error


def _from_numpy(array: Values) -> Values:
    """npy files store bfloat16 as two opaque bytes; nothing else looks like that."""
    return array.view(_BF16) if array.dtype == np.dtype("V2") else array


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
