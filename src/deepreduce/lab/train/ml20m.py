"""MovieLens-20M from its official file or, without it, interactions that are made at its size: for volume and time, not for quality."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .batches import Batch
from .failures import DataError
from .interactions import NEGATIVES_PER_POSITIVE, Ids, Interactions, labelled, split

USERS, ITEMS, RATINGS = 138_493, 26_744, 20_000_263
_EXPECTED = (
    "ratings.csv of https://grouplens.org/datasets/movielens/20m/ (in ml-20m or directly in the folder), "
    "with the header userId,movieId,rating,timestamp"
)
_HEADER = "userId,movieId,rating,timestamp"

# The share of all ratings that the busiest users and the most popular items of MovieLens-1M have between them.
_BUSIEST = (0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_BY_USERS = (0, 0.0106, 0.0259, 0.0693, 0.1202, 0.2393, 0.3809, 0.5719, 0.6983, 0.7879, 0.8544, 0.9036, 0.9398, 0.9665, 0.986, 1)
_OF_ITEMS = (0, 0.0114, 0.0308, 0.0874, 0.1472, 0.2831, 0.4442, 0.6517, 0.7811, 0.8665, 0.9237, 0.9599, 0.9814, 0.9936, 0.9989, 1)


@dataclass(frozen=True)
class MadeInteractions:
    """Random interactions with the popularity curves of MovieLens-1M, drawn as they are needed. There is nothing to learn from them."""

    user_count: int = USERS
    item_count: int = ITEMS
    count: int = RATINGS
    test_users: int = 256
    note: str = "interactions made at the size of MovieLens-20M with the popularity curves of MovieLens-1M: quality means nothing"

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return max(1, self.count // (workers * batch))

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        draw = np.random.default_rng([seed, 1 + rank])
        while True:
            users = _popular(self.user_count, _BY_USERS, batch, draw)
            items = _popular(self.item_count, _OF_ITEMS, batch, draw)
            yield labelled(users, items, draw.integers(0, self.item_count, NEGATIVES_PER_POSITIVE * batch))

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        draw = np.random.default_rng([0, rank])
        users = np.arange(rank, self.test_users, workers)
        yield users, draw.integers(0, self.item_count, (users.size, 100))


def _popular(count: int, shares: tuple[float, ...], size: int, draw: np.random.Generator) -> Ids:
    """Return `size` numbers below `count`, the first ones as often as popular ones are."""
    ranks = np.interp(draw.random(size), shares, _BUSIEST)
    return np.minimum((ranks * count).astype(np.int64), count - 1)


def read(data: Path | None, seed: int, negatives: int = 99) -> Interactions | MadeInteractions:
    """Return the ratings, split as those of MovieLens-1M; without `data`, made interactions."""
    if data is None:
        return MadeInteractions()
    path = _find(data)
    with path.open() as file:
        header = file.readline().strip()
    if header != _HEADER:
        raise DataError(f"{path} begins with {header[:60]!r}; expected is {_EXPECTED}")
    try:
        table = np.loadtxt(path, np.int64, delimiter=",", skiprows=1, usecols=(0, 1, 3), ndmin=2)
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {error}; expected is {_EXPECTED}") from error
    if table.shape[0] == 0:
        raise DataError(f"{path} has no ratings; expected is {_EXPECTED}")
    return split(table[:, 0], table[:, 1], table[:, 2], negatives)


def _find(data: Path) -> Path:
    for path in (data / "ml-20m" / "ratings.csv", data / "ratings.csv"):
        if path.is_file():
            return path
    raise DataError(f"no MovieLens-20M in {data}: expected is {_EXPECTED}")
