"""Compiled kernels are saved by one process at a time."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numba


def save_in_turns(kernel: Any) -> None:
    """Let processes that compile the same kernel for different types save it one after another.

    numba 0.68 reads the index of a kernel's files, takes the next free number, and writes both files, without a lock. Two processes that do
    so at once take the same number: the code for one type is then found under the other.
    """
    try:
        files = kernel._cache._cache_file
        folder, save = files._cache_path, files.save
    except AttributeError as error:
        raise ImportError(f"numba {numba.__version__} keeps compiled kernels in another way than 0.61 to 0.68: use one of these") from error
    files.save = partial(_save_alone, os.path.join(folder, "deepreduce.lock"), save)


def _save_alone(lock: str, save: Any, key: Any, data: Any) -> None:
    from filelock import FileLock  # here, as importing it takes longer than most commands that compile nothing

    with FileLock(lock, poll_interval=0.005):
        save(key, data)
