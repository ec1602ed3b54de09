"""Recorded gradients of real training, for demos, benchmarks and tests.

========== ============================================================================== ========
name       what                                                                           elements
========== ============================================================================== ========
resnet20   ResNet-20 on CIFAR-10, step 300: every parameter                               269,722
gpt        a 4-layer transformer, 192 wide, on Tiny Shakespeare, step 300: 4 parameters   160,896
ncf        NeuMF on MovieLens-1M, step 5: 2,400 user and 1,200 item rows, last layers (42% zeros) 238,784
========== ============================================================================== ========
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError

NAMES = ("resnet20", "gpt", "ncf")
DIGITS = Path(__file__).with_name("digits.npz")
"""The images of the task `digits`; see `train.digits`."""


@cache
def _arrays(name: str) -> dict[str, NDArray[np.float32]]:
    with np.load(Path(__file__).with_name(f"{name}.npz")) as file:
        arrays = dict(file)
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def load(name: str) -> dict[str, NDArray[np.float32]]:
    """The parameters of a recorded gradient by name, read-only.

    >>> load("resnet20")["l.8.c2.weight"].shape
    (64, 64, 3, 3)
    """
    if name not in NAMES:
        raise InputError(f"no recorded gradient {name!r}; there are {', '.join(NAMES)}")
    return dict(_arrays(name))
