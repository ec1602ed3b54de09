"""MovieLens-1M from its official file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from .failures import DataError
from .interactions import Interactions, split

_EXPECTED = (
    "ratings.dat of https://grouplens.org/datasets/movielens/1m/ (in ml-1m or directly in the folder), "
    "lines of UserID::MovieID::Rating::Timestamp"
)


def read(data: Path | None, seed: int, negatives: int = 99) -> Interactions:
    """Return the split and, for each user, `negatives` unseen items to rank the held-out one among."""
    if data is None:
        raise DataError(f"the task 'ml1m' needs --data DIR with {_EXPECTED}")
    path = _find(data)
    try:
        table = np.loadtxt(io.BytesIO(path.read_bytes().replace(b"::", b" ")), np.int64, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}; expected is {_EXPECTED}") from error
    if table.shape[0] == 0 or table.shape[1] != 4:
        raise DataError(f"{path} has {table.shape[1]} columns and {table.shape[0]} rows; expected is {_EXPECTED}")
    return split(table[:, 0], table[:, 1], table[:, 3], negatives)


def _find(data: Path) -> Path:
    for path in (data / "ml-1m" / "ratings.dat", data / "ratings.dat"):
        if path.is_file():
            return path
    raise DataError(f"no MovieLens-1M in {data}: expected is {_EXPECTED}")
