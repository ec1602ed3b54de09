"""What a worker sees of a data set: endless training batches of its own share, and its share of the test set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Batch = tuple[NDArray[Any], ...]


class Data(Protocol):
    """A data set that is read. `note` says what a reader of results must know of it; empty for recorded data."""

    @property
    def note(self) -> str: ...

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        """Steps in which all workers together see every example once."""
        ...

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        """Endless; the shares of the ranks are disjoint within an epoch, and the same for every codec."""
        ...

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        """This rank's share of the test set, once."""
        ...


@dataclass(frozen=True)
class Images:
    """Images and their classes. Batches are (images, labels): float32 and int64.

    Pixels are kept as bytes and normalised by channel when a batch is made. With `augment`, training images are shifted by up to
    4 pixels and flipped at random.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]
    augment: bool = False
    note: str = ""

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return max(1, len(self.train_labels) // (workers * batch))

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        jitter = np.random.default_rng([seed, 1 + rank])
        for chosen in shares(len(self.train_labels), rank, workers, batch, seed):
            images = self.train_images[chosen]
            yield self._normal(_shifted(images, jitter) if self.augment else images), self.train_labels[chosen]

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        for start in range(0, len(self.test_labels), 250 * workers):
            chosen = slice(start + rank, start + 250 * workers, workers)
            if self.test_labels[chosen].size:
                yield self._normal(self.test_images[chosen]), self.test_labels[chosen]

    def _normal(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        centred = images.astype(np.float32) - self.mean[:, None, None]
        return np.asarray(centred / self.deviation[:, None, None])


def shares(count: int, rank: int, workers: int, batch: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Endless random batches of numbers below `count`: every epoch a new order that all ranks share, each taking its own part of it.

    >>> mine, other = (next(shares(8, rank, 2, 4, seed=0)) for rank in range(2))
    >>> sorted([*mine.tolist(), *other.tolist()])
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    order = np.random.default_rng([seed, 0])
    step = min(batch * workers, count)
    while True:
        shuffled = order.permutation(count)
        for start in range(0, count - step + 1, step):
            yield shuffled[start : start + step][rank::workers]


def _shifted(images: NDArray[np.uint8], jitter: np.random.Generator) -> NDArray[np.uint8]:
    count, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    downs, rights = jitter.integers(0, 9, (2, count))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (2, 3))
    moved: NDArray[np.uint8] = windows[np.arange(count), :, downs, rights]
    flip = jitter.random(count) < 0.5
    moved[flip] = moved[flip, :, :, ::-1]
    return moved
