"""Who saw what, as implicit feedback: every rating is a positive, the latest of each user is the test (leave one out)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batches import Batch, shares
from .failures import DataError

NEGATIVES_PER_POSITIVE = 4

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Interactions:
    """Recorded interactions. Training batches are (users, items, labels), one positive to four negatives; test batches are (users, items)
    with one row of candidates per user, the true item first. The batch size counts positives."""

    users: Ids
    items: Ids
    seen: Ids
    test_candidates: Ids
    user_count: int
    item_count: int
    note: str = ""

    def steps_per_epoch(self, workers: int, batch: int) -> int:
        return max(1, self.users.size // (workers * batch))

    def train_batches(self, rank: int, workers: int, batch: int, seed: int) -> Iterator[Batch]:
        draw = np.random.default_rng([seed, 1 + rank])
        for chosen in shares(self.users.size, rank, workers, batch, seed):
            negative_users = np.repeat(self.users[chosen], NEGATIVES_PER_POSITIVE)
            yield labelled(self.users[chosen], self.items[chosen], self.unseen(negative_users, draw))

    def test_batches(self, rank: int, workers: int) -> Iterator[Batch]:
        mine = np.arange(rank, self.user_count, workers)
        for start in range(0, mine.size, 256):
            users = mine[start : start + 256]
            yield users, self.test_candidates[users]

    def unseen(self, users: Ids, draw: np.random.Generator) -> Ids:
        """Return for each of these users a random item that they have not seen."""
        items = draw.integers(0, self.item_count, users.size)
        while (clash := _contains(self.seen, users * self.item_count + items)).any():
            items[clash] = draw.integers(0, self.item_count, int(clash.sum()))
        return items


def labelled(users: Ids, items: Ids, negative_items: Ids) -> Batch:
    """Return the batch of these positives and of four negatives for each, positives first."""
    everyone = np.concatenate([users, np.repeat(users, NEGATIVES_PER_POSITIVE)])
    everything = np.concatenate([items, negative_items])
    return everyone, everything, (np.arange(everyone.size) < users.size).astype(np.float32)


def split(users: Ids, items: Ids, times: NDArray[np.int64], negatives: int) -> Interactions:
    """Hold the latest item of each user out, with `negatives` unseen items to rank it among. Ids may be any numbers."""
    users, items = (np.unique(ids, return_inverse=True)[1].astype(np.int64) for ids in (users, items))
    user_count, item_count = int(users.max()) + 1, int(items.max()) + 1
    order = np.lexsort((times, users))
    users, items = users[order], items[order]
    last = np.append(users[1:] != users[:-1], True)
    seen = np.sort(users * item_count + items)
    most = int(np.bincount(users).max())
    if item_count - most < negatives:
        raise DataError(f"{negatives} negatives are asked for, but one user has seen {most} of {item_count} items")
    candidates = _candidates(users[last], items[last], users, items, item_count, negatives)
    return Interactions(users[~last], items[~last], seen, candidates, user_count, item_count)


def _candidates(test_users: Ids, test_items: Ids, users: Ids, items: Ids, item_count: int, negatives: int) -> Ids:
    draw = np.random.default_rng(0)  # the same test for every seed, so that runs can be compared
    starts = np.searchsorted(users, np.arange(test_users.size + 1))
    table = np.empty((test_users.size, 1 + negatives), np.int64)
    table[:, 0] = test_items
    for user in test_users:
        unseen = np.ones(item_count, bool)
        unseen[items[starts[user] : starts[user + 1]]] = False
        table[user, 1:] = draw.choice(np.flatnonzero(unseen), negatives, replace=False)
    return table


def _contains(sorted_keys: Ids, keys: Ids) -> NDArray[np.bool_]:
    found = np.searchsorted(sorted_keys, keys)
    found[found == sorted_keys.size] = 0
    return np.asarray(sorted_keys[found] == keys)
