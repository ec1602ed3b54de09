"""Bytes of real text: a file, or the sources of the running interpreter's standard library, so that nothing is downloaded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .batches import Batch
from .failures import DataError

CONTEXT = 64
_TEST_WINDOWS = 256
_HELD_OUT_EVERY = 10
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """Text as bytes. Batches are (bytes, following bytes), each of `CONTEXT` positions: int64."""

    train: Bytes
    test: Bytes
    note: str = ""

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return max(1, self.train.size // (workers * batch * CONTEXT))

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        """Windows from anywhere in the text; every rank draws its own."""
        draw = np.random.default_rng([seed, 1 + rank])
        while True:
            yield _windows(self.train, draw.integers(0, self.train.size - CONTEXT, batch))

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        """The same windows in every run."""
        starts = np.random.default_rng(0).integers(0, self.test.size - CONTEXT, _TEST_WINDOWS)[rank::workers]
        for start in range(0, starts.size, 64):
            yield _windows(self.test, starts[start : start + 64])


def read(data: Path | None, seed: int) -> Text:
    """Return the text of a file, its last tenth to validate, or that of the standard library, every tenth file to validate."""
    text = _split(data) if data is not None else _standard_library()
    if min(text.train.size, text.test.size) <= CONTEXT:
        raise DataError(f"the task 'text' needs more than {10 * CONTEXT} bytes of text, {text.train.size + text.test.size} were found")
    return text


def _split(path: Path) -> Text:
    try:
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"the task 'text' reads one file, --data FILE; {path}: {error.strerror}") from error
    cut = content.size - content.size // 10
    return Text(content[:cut], content[cut:])


def _standard_library() -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    held_out = set(files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])
    train, test = (b"\n".join(path.read_bytes() for path in files if (path in held_out) is wanted) for wanted in (False, True))
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8), note=f"{len(files)} files of Python's standard library")


def _windows(content: Bytes, starts: NDArray[np.int64]) -> Batch:
    windows = content[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]
