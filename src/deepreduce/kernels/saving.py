"""Compiled kernels are saved in files named by the types they were compiled for."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numba


def name_files_by_types(kernel: Any) -> None:
    """Let processes compile the same kernel for different types at the same time.

    numba numbers a kernel's files: it reads the index, takes the next free number and writes both, without a lock. Of two processes that
    do so at once, one then finds the other's code under its own types. Named by their types, files are never another's; an entry of the
    index can still get lost, and is compiled and saved again.
    """
    try:
        files = kernel._cache._cache_file
        files._index_name, files._load_index, files._save_data, files._save_index  # noqa: B018
    except AttributeError as error:
        raise ImportError(f"numba {numba.__version__} keeps compiled kernels in another way than 0.61 to 0.68: use one of these") from error
    files.save = partial(_save, files)


def _save(files: Any, key: Any, data: Any) -> None:
    types, target, _ = key
    digest = hashlib.sha256(repr((types, target)).encode()).hexdigest()[:16]
    name = f"{files._index_name.removesuffix('.nbi')}.{digest}.nbc"
    files._save_data(name, data)  # first, as the index tells others that it is there
    files._save_index({**files._load_index(), key: name})
