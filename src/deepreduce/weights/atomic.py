"""Files and folders that appear whole, or not at all."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from ..errors import FileError


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside the target, for a file or a folder, which takes its name when all went well, and goes away when not.

    What a killed process left there is removed by the next one that writes the same target, if both ran on the same host and, in
    containers, in the same one: nobody else can tell whether a process is alive.
    """
    if not target.name:
        raise FileError(f"cannot write {target}: this is a folder, not a name for what is written")
    machine = _machine()
    _remove_leftovers(target, machine)
    temporary = target.with_name(f".{target.name}.{machine}-{os.getpid()}-{secrets.token_hex(4)}.part")
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


def _machine() -> str:
    """Eight digits for the host and the process namespace: within these, a process id means one process."""
    namespace = Path("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{platform.node()} {namespace.stat().st_ino if namespace.exists() else 0}'.encode()):08x}"


def _remove_leftovers(target: Path, machine: str) -> None:
    for path in target.parent.glob(f"{escape(f'.{target.name}.{machine}')}-*-*.part"):
        process = path.name.split("-")[-2]
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
