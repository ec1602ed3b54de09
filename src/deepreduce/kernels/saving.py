"""Compiled kernels on disk, in files named by all that their code depends on."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numba

_PARTS = ("_source_stamp", "_index_name", "_load_data", "_save_data", "save", "load")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


_SOURCES = _digest(*(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).encode()
"""Of all kernels: the code of one has others inside, also those of other files."""


def name_files_by_content(kernel: Any) -> None:
    """Save and load the compiled code of a kernel in files named by its source, its types, the processor and the compiler.

    numba itself numbers the files of a kernel and lists them in an index, without a lock: of two processes that compile at the same time,
    as ranks on a new machine do, one then finds the other's code under its own types. And it does not notice that a function changed which
    was compiled into a kernel from another file. Named like this, a file has the right code or is not there; files of older sources stay.
    """
    files: Any = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if not all(hasattr(files, part) for part in _PARTS):
        raise ImportError(f"numba {numba.__version__} keeps compiled kernels in another way than 0.61 to 0.68: use one of these")
    files.save, files.load = partial(_save, files), partial(_load, files)


def _name(files: Any, key: Any) -> str:
    compiler = numba.__version__, numba.config.BOUNDSCHECK  # type: ignore[attr-defined]
    content = _digest(_SOURCES, repr((compiler, files._source_stamp, key)).encode())
    return f"{files._index_name.removesuffix('.nbi')}.{content}.nbc"


def _save(files: Any, key: Any, data: Any) -> None:
    files._save_data(_name(files, key), data)  # under another name first, then moved: a file is never half there


def _load(files: Any, key: Any) -> Any:
    try:
        return files._load_data(_name(files, key))
    except OSError:
        return None
