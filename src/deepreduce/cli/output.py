"""Where results go: a folder, and a terminal or not."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .files import FileError


def make_folder(path: Path) -> Path:
    """The folder, made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {path}: {error.strerror}") from error
    return path


def console() -> Console:
    """Tables as wide as the terminal; wide enough to keep every row on one line where the output is no terminal."""
    whole = Console(highlight=False)
    return whole if whole.is_terminal else Console(highlight=False, width=200)
