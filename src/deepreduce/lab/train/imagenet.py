"""ImageNet from the usual folders, one per class, or images that are made as they are needed: for volume and time, not for quality."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...cores import usable_cores
from .batches import Batch, shares
from .failures import DataError
from .pictures import SIZE, centred, cropped, end_with_parent

CLASSES = 1000
_SUFFIXES = {".jpeg", ".jpg", ".png"}
_EXPECTED = "folders train and val, each with one folder per class that holds its .JPEG files (https://image-net.org, ILSVRC2012)"
_MEAN = 255 * np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = 255 * np.array([0.229, 0.224, 0.225], np.float32)
_TEST_BATCH = 64


@dataclass(frozen=True)
class Folders:
    """Files and their classes; images are decoded by Pillow in processes of their own, one batch ahead."""

    train_files: Sequence[str]
    train_labels: NDArray[np.int64]
    test_files: Sequence[str]
    test_labels: NDArray[np.int64]
    note: str = ""

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return max(1, len(self.train_files) // (workers * batch))

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        draw = np.random.default_rng([seed, 1 + rank])
        with _decoders() as pool:
            ahead: list[Future[NDArray[np.uint8]]] = []
            waiting: NDArray[np.int64] | None = None
            for chosen in shares(len(self.train_files), rank, workers, batch, seed):
                seeds = draw.integers(0, 2**31, chosen.size).tolist()
                next_ones = [pool.submit(cropped, self.train_files[number], seed) for number, seed in zip(chosen, seeds, strict=True)]
                if waiting is not None:
                    yield _normal(np.stack([future.result() for future in ahead])), self.train_labels[waiting]
                ahead, waiting = next_ones, chosen

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        mine = np.arange(rank, len(self.test_files), workers)
        with _decoders() as pool:
            for start in range(0, mine.size, _TEST_BATCH):
                chosen = mine[start : start + _TEST_BATCH]
                images = pool.map(centred, [self.test_files[number] for number in chosen])
                yield _normal(np.stack(list(images))), self.test_labels[chosen]


@dataclass(frozen=True)
class MadeImages:
    """Noise in the size of ImageNet's images, drawn as it is needed. There is nothing to learn from it."""

    count: int = 1_281_167
    test_count: int = 64
    note: str = "images made at the size of ImageNet's: quality means nothing"

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return max(1, self.count // (workers * batch))

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        draw = np.random.default_rng([seed, 1 + rank])
        while True:
            yield _made(batch, draw)

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        yield _made(len(range(rank, self.test_count, workers)), np.random.default_rng([0, rank]))


def _made(count: int, draw: np.random.Generator) -> Batch:
    return draw.standard_normal((count, 3, SIZE, SIZE), np.float32), draw.integers(0, CLASSES, count)


def _decoders() -> Executor:
    """Return processes that decode, as many as this worker has cores. They are not forked: the worker has threads."""
    return ProcessPoolExecutor(_decoder_count(), mp_context=get_context("spawn"), initializer=end_with_parent)


def _decoder_count() -> int:
    """Return this worker's share of the cores: the launcher has bound it to them, workers of torchrun share those of their machine."""
    return max(1, len(usable_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _normal(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.asarray((images.transpose(0, 3, 1, 2).astype(np.float32) - _MEAN[:, None, None]) / _DEVIATION[:, None, None])


def read(data: Path | None, seed: int) -> Folders | MadeImages:
    """Return the files of both folders; without `data`, made images."""
    if data is None:
        return MadeImages()
    if find_spec("PIL") is None:
        raise DataError("images are decoded by Pillow, which is not installed: pip install pillow")
    train = _classes(data, "train")
    test = _classes(data, "val")
    if list(train) != list(test):
        raise DataError(f"{data / 'train'} and {data / 'val'} have different classes; expected are {_EXPECTED}")
    return Folders(*_flat(train), *_flat(test))


def _classes(data: Path, part: str) -> dict[str, list[str]]:
    folder = data / part
    if not folder.is_dir():
        raise DataError(f"no folder {folder}: expected are {_EXPECTED}")
    found = {each.name: _images(each) for each in sorted(folder.iterdir()) if each.is_dir()}
    if not found or not all(found.values()) or len(found) > CLASSES:
        raise DataError(f"{folder} has {len(found)} class folders, {sum(map(bool, found.values()))} with images; expected are {_EXPECTED}")
    return found


def _images(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)


def _flat(classes: dict[str, list[str]]) -> tuple[list[str], NDArray[np.int64]]:
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()])
    return [file for files in classes.values() for file in files], labels
