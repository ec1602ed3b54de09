"""Tensors and messages in files: npy for one tensor, npz for several by name."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import FileError as FileError
from ..tensor import Values
from ..weights.atomic import replacing
from ..weights.npz import check_member, from_npy


def read_tensors(path: Path) -> Values | dict[str, Values]:
    """The tensor of an npy file, or those of an npz file by name. Pickled objects are refused."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return from_npy(loaded)
        with loaded as archive:
            return {name: from_npy(archive[name]) for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise many kinds for a damaged file
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
            check_member(path, name)
    with replacing(path) as temporary, temporary.open("wb") as file:
        if isinstance(tensors, np.ndarray):
            np.save(file, tensors)
        else:
            with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                for name, tensor in tensors.items():  # np.savez takes names as keywords, and 'file' clashes
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(tensor), allow_pickle=False)


def read_blob(path: Path) -> bytes:
    """The bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {_reason(error)}") from error


def write_blob(path: Path, blob: bytes) -> None:
    """Write a message: whole, or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(blob)


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
