"""Where results go: a folder, and a terminal or not."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .files import FileError


def make_folder(path: Path) -> Path:
    """The folder, made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {path}: {error.strerror}") from error
    return path


def check_writable(path: Path) -> None:
    """Raise `FileError` where a file cannot be written: to be called before long work."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise FileError(f"cannot write {path}: give a file in a folder that exists and is writable")


def verbatim(text: str) -> Text:
    """Return a peer's text for a table: without markup, and with non-printable characters escaped.

    >>> verbatim("[bold]w" + chr(27)).plain
    '[bold]w\\\\x1b'
    """
    return Text("".join(character if character.isprintable() else repr(character)[1:-1] for character in text))


def console() -> Console:
    """Tables as wide as the terminal; wide enough to keep every row on one line where the output is no terminal."""
    whole = Console(highlight=False)
    return whole if whole.is_terminal else Console(highlight=False, width=200)
