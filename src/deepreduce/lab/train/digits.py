"""The 8x8 digits that scikit-learn carries: 1,797 images, so nothing is downloaded."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np

from .batches import Images
from .failures import DataError

_TEST_IMAGES = 450


def read(data: Path | None, seed: int) -> Images:
    """Three quarters to train, one quarter to test, always the same ones."""
    try:
        bunch = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise DataError("the task 'digits' takes its images from scikit-learn, which is not installed: pip install scikit-learn") from error
    images = bunch.images[:, None].astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Images(
        images[train], labels[train], images[test], labels[test], mean=np.zeros(1, np.float32), deviation=np.full(1, 16, np.float32)
    )
