"""Files and folders that appear whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import FileError


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside the target, for a file or a folder, which takes its name when all went well, and goes away when not.

    What a killed process left there is removed by the next one that writes the same target.
    """
    _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_leftovers(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.*.part"):
        process = path.name.split(".")[-2]
        if process.isdecimal() and not _alive(int(process)):
            _remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
