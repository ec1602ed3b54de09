"""CIFAR-10 from its official files: the binary version or the Python version."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batches import Images
from .failures import DataError

_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_PIXELS = 3 * 32 * 32
_MEAN = 255 * np.array([0.4914, 0.4822, 0.4465], np.float32)
_DEVIATION = 255 * np.array([0.2470, 0.2435, 0.2616], np.float32)
_EXPECTED = (
    "the files of https://www.cs.toronto.edu/~kriz/cifar.html: data_batch_1.bin ... data_batch_5.bin and test_batch.bin "
    "(in cifar-10-batches-bin or directly in the folder), or data_batch_1 ... test_batch of the Python version (cifar-10-batches-py)"
)

Pair = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read(data: Path | None, seed: int) -> Images:
    """The five training batches and the test batch, normalised by channel."""
    if data is None:
        raise DataError(f"the task 'cifar10' needs --data DIR with {_EXPECTED}")
    folder, suffix = _find(data)
    batches = [_batch(folder / f"{name}{suffix}") for name in (*_TRAIN, _TEST)]
    train_pixels, train_labels = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    test_pixels, test_labels = batches[-1]
    return Images(_images(train_pixels), train_labels, _images(test_pixels), test_labels, _MEAN, _DEVIATION, augment=True)


def _find(data: Path) -> tuple[Path, str]:
    for folder, suffix in ((data / "cifar-10-batches-bin", ".bin"), (data, ".bin"), (data / "cifar-10-batches-py", ""), (data, "")):
        if (folder / f"{_TEST}{suffix}").is_file():
            missing = [f"{name}{suffix}" for name in _TRAIN if not (folder / f"{name}{suffix}").is_file()]
            if missing:
                raise DataError(f"{folder} lacks {', '.join(missing)}; expected are {_EXPECTED}")
            return folder, suffix
    raise DataError(f"no CIFAR-10 in {data}: expected are {_EXPECTED}")


def _batch(path: Path) -> Pair:
    pixels, labels = _binary(path) if path.suffix == ".bin" else _python(path)
    if labels.size == 0 or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path} has labels outside 0..9: it is no batch of CIFAR-10")
    return pixels, labels


def _binary(path: Path) -> Pair:
    raw = np.fromfile(path, np.uint8)
    if raw.size == 0 or raw.size % (1 + _PIXELS):
        raise DataError(f"{path} has {raw.size:,} bytes: expected are 10,000 records of 1 label byte and {_PIXELS:,} pixel bytes")
    records = raw.reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _python(path: Path) -> Pair:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no batch of the Python version of CIFAR-10: {error}") from error
    if pixels.dtype != np.uint8 or pixels.shape != (labels.size, _PIXELS):
        raise DataError(f"{path} holds {pixels.dtype} of shape {pixels.shape}: expected are uint8 of shape ({labels.size}, {_PIXELS})")
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """Reads the arrays of a batch; a pickle that names anything else is refused, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _empty_array if name == "_reconstruct" else getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _empty_array(*ignored: Any) -> NDArray[Any]:
    """What a pickled array begins with, before its state is set."""
    return np.empty(0, np.uint8)


def _images(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels.reshape(-1, 3, 32, 32)
