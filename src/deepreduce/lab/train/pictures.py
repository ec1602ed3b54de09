"""One image file to pixels, by Pillow. Imported by the processes that decode: it must stay light."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process

import numpy as np
from numpy.typing import NDArray

SIZE = 224
_SHORTER_SIDE = 256

Pixels = NDArray[np.uint8]


def end_with_parent() -> None:
    """Let this process end when the one that started it does: a pool does not notice when its owner is killed."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def cropped(path: str, seed: int) -> Pixels:
    """Return a random part of 8 to 100% of the image, scaled to 224x224 and flipped half of the time, as training has it."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    area = image.width * image.height * draw.uniform(0.08, 1.0)
    aspect = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
    width = min(image.width, max(1, round((area * aspect) ** 0.5)))
    height = min(image.height, max(1, round((area / aspect) ** 0.5)))
    left, top = draw.integers(0, image.width - width + 1), draw.integers(0, image.height - height + 1)
    part = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    pixels = np.asarray(part, np.uint8)
    return pixels[:, ::-1] if draw.random() < 0.5 else pixels


def centred(path: str) -> Pixels:
    """Return the middle 224x224 of the image at 256 pixels of its shorter side, as tests have it."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    scale = _SHORTER_SIDE / min(image.size)
    half_x, half_y, half = image.width / 2, image.height / 2, SIZE / 2 / scale
    part = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (half_x - half, half_y - half, half_x + half, half_y + half))
    return np.asarray(part, np.uint8)
