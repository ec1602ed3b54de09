"""1,797 handwritten digits of 8x8 pixels, which come with the package.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,
CC BY 4.0), in the order in which scikit-learn has them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..data import DIGITS
from .batches import Images

_TEST_IMAGES = 450


def read(data: Path | None, seed: int) -> Images:
    """Three quarters to train, one quarter to test, always the same ones."""
    with np.load(DIGITS) as file:
        images, labels = file["images"][:, None], file["labels"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Images(
        images[train], labels[train], images[test], labels[test], mean=np.zeros(1, np.float32), deviation=np.full(1, 16, np.float32)
    )
