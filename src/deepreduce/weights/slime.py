"""Differences in the directory layout of slime (and of miles and SGLang's ``/pull_weights``): one folder per version.

A folder ``weight_v000007`` holds safetensors files with one U8 tensor per changed tensor, the checksums of the new tensors as their
metadata, and an index whose metadata say which version this is, what it follows, and how the tensors are coded. Ours have
``compression_format`` ``deepreduce``; those of slime itself are read and written too: XOR or overwritten bytes, compressed by zstd. This
follows slime's source (``update_weight_from_disk_delta.py`` and ``disk_delta.py``, 2026-07); it was not run against it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..errors import ConfigError, CorruptError, FileError, InputError, TruncatedError, WrongBaseError
from .api import apply, diff
from .atomic import replacing
from .digests import digest
from .kinds import Array, kind_of, patterns
from .safetensors_files import SafetensorsFile, write_safetensors
from .sources import NamedArrays, writable

Compression = Literal["deepreduce", "zstd"]

_INDEX = "model.safetensors.index.json"
_FILE = "model-00000-of-00001.safetensors"
_CHECKSUM = "xxh3-128"


def write_version(
    folder: Path, old: Mapping[str, Array], new: Mapping[str, Array], version: int, *, compression: Compression = "deepreduce"
) -> Path:
    """Write the folder of a version, whole or not at all, into `folder`; returns its path. `old` and `new` have the same tensors.

    ``deepreduce`` codes every changed tensor as a conditional patch of its own, ``zstd`` as slime does: XOR, then zstd.
    """
    if compression not in get_args(Compression):
        raise ConfigError(f"compression is deepreduce or zstd, got {compression!r}")
    if old.keys() != new.keys():
        raise InputError("slime's layout has no way to add or remove a tensor: both versions need the same names")
    coded: dict[str, Array] = {}
    checksums: dict[str, str] = {}
    for name in new:
        before, after = _bytes(old[name], name), _bytes(new[name], name)
        if old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            raise InputError(f"slime's layout has no way to change the shape or dtype of tensor {name!r}")
        if not np.array_equal(before, after):
            part = (
                diff({name: old[name]}, {name: new[name]})
                if compression == "deepreduce"
                else _zstd().ZstdCompressor(1).compress(before ^ after)
            )
            coded[name] = np.frombuffer(part, np.uint8)
            checksums[name] = digest(after).hex()
    target = folder / f"weight_v{version:06d}"
    if target.exists():
        raise FileError(f"{target} exists already")
    with replacing(target) as temporary:
        temporary.mkdir(parents=True)
        if coded:
            write_safetensors(temporary / _FILE, NamedArrays(coded), list(coded), checksums)
        (temporary / _INDEX).write_text(json.dumps(_index(version, compression, list(coded))))
    return target


def _index(version: int, compression: Compression, names: list[str]) -> dict[str, Any]:
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "steps" if compression == "deepreduce" else "xor",
        "compression_format": compression,
        "checksum_format": _CHECKSUM,
    }
    return {"metadata": metadata, "weight_map": dict.fromkeys(names, _FILE)}


def read_version(folder: Path, tensors: MutableMapping[str, Array], base_version: int) -> int:
    """Apply the folder of a version to these tensors, in place; returns the version they have then.

    `base_version` is what they have now. Everything is decoded and its checksums compared before anything is written.
    """
    metadata, weight_map = _read_index(folder)
    expected, version = int(metadata["base_version"]), int(metadata["version"])
    if expected != base_version:
        reason = "already applied" if base_version == version else "out of order"
        raise WrongBaseError(reason, f"{folder.name} follows version {expected}, the weights have version {base_version}")
    files = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    flat = writable({name: tensors[name] for name in weight_map if name in tensors})
    found = {name: _decoded(name, files[file], flat, tensors, metadata) for name, file in weight_map.items()}
    for name, after in found.items():
        flat[name].view("u1")[:] = after
    return version


def _read_index(folder: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    try:
        whole = json.loads((folder / _INDEX).read_text())
        metadata, weight_map = dict(whole["metadata"]), dict(whole["weight_map"])
        int(metadata["base_version"]), int(metadata["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{folder} is not a version in slime's layout: {error!r}") from error
    if any(Path(str(file)).name != file for file in weight_map.values()):
        raise FileError(f"{folder}: its weight_map does not name files of its folder")
    return metadata, weight_map


def _decoded(
    name: str, file: SafetensorsFile, flat: Mapping[str, Array], tensors: Mapping[str, Array], metadata: Mapping[str, str]
) -> Array:
    if name not in flat or name not in file.names:
        raise WrongBaseError("wrong base", f"there is no tensor {name!r}, which the version changes")
    coded, before = file.read(name, 0, int(np.prod(file.describe(name)[1]))), flat[name].view("u1")
    form = metadata.get("compression_format"), metadata.get("delta_encoding")
    if form[0] == "deepreduce":
        result = apply({name: tensors[name]}, coded.data)
        after = _bytes(result[name], name) if name in result else np.empty(0, np.uint8)
    elif form == ("zstd", "xor"):
        after = before ^ _inflated(coded, before.size, before.size)
    elif form == ("zstd", "overwrite"):
        after = _overwritten(before, _inflated(coded, 4, 4 + 5 * before.size))
    else:
        raise ConfigError(f"{form[0]} with {form[1]}: known are deepreduce, and zstd with xor or overwrite")
    if after.size != before.size:
        raise CorruptError(f"tensor {name!r} of {before.size} bytes would have {after.size}; nothing is written")
    if _checksum(after, metadata.get("checksum_format", "")) != file.metadata.get(name):
        raise CorruptError(f"tensor {name!r}: the checksum of the new weights does not match; nothing is written")
    return after


def _overwritten(before: Array, delta: Array) -> Array:
    """The bytes after slime's ``overwrite``: a count, positions, then new bytes."""
    count = int(delta[:4].view("<u4")[0])
    if delta.size != 4 + 5 * count:
        raise CorruptError(f"{count} overwritten bytes in {delta.size} bytes")
    positions, after = delta[4 : 4 + 4 * count].view("<u4"), before.copy()
    if count and int(positions.max()) >= after.size:
        raise CorruptError(f"position {positions.max()} of {after.size}")
    after[positions] = delta[4 + 4 * count :]
    return after


def _inflated(coded: Array, least: int, most: int) -> Array:
    zstandard = _zstd()
    try:
        raw = zstandard.ZstdDecompressor().stream_reader(coded.tobytes()).read(most + 1)
    except zstandard.ZstdError as error:
        raise CorruptError(f"zstd refuses the bytes: {error}") from error
    if len(raw) > most:
        raise CorruptError(f"more than {most} bytes from zstd, where {least} to {most} are expected")
    if len(raw) < least:
        raise TruncatedError(f"{len(raw)} bytes from zstd, where {least} to {most} are expected")
    return np.frombuffer(raw, np.uint8)


def _checksum(after: Array, form: str) -> str:
    if form == _CHECKSUM:
        return digest(after).hex()
    if form == "adler32":
        return f"{zlib.adler32(after.data):08x}"
    raise ConfigError(f"checksums by {form!r}: known are {_CHECKSUM} and adler32")


def _bytes(array: Array, name: str) -> Array:
    return patterns(array, kind_of(array.dtype, name)).view("u1")


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("slime's own patches need the zstandard package: pip install zstandard") from error
    return zstandard
