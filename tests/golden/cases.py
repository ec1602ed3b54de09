"""What the golden messages hold: integers scaled by powers of two, so that no machine's arithmetic matters to the input."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

import deepreduce as dr
from tests.messages import specs


class Case(NamedTuple):
    """A spec, and what it is given."""

    spec: str
    gradients: dict[str, np.ndarray]


def pattern(shape: tuple[int, ...], dtype: object = np.float32) -> np.ndarray:
    """A fixed tensor: both signs, zeros, a wide range."""
    k = np.arange(np.prod(shape, dtype=int), dtype=np.int64)
    mixed = (k * 2654435761) % 4096 - 2048
    kept = np.where((k * 40503) % 7 < 5, mixed, 0)
    return (kept * 2.0**-12 * np.where(k % 5 == 0, 4.0, 0.5)).astype(dtype).reshape(shape)


def file_name(spec: str) -> str:
    """A spec as a file name."""
    return spec.translate(str.maketrans("/:,=", "_-++"))


def cases() -> dict[str, Case]:
    """One case a sample codec, and one for every other feature of the format."""
    found = {file_name(spec): Case(spec, {"": pattern((6, 5, 4))}) for spec in specs()}
    found["many"] = Case("topr:0.2/bitmap/fp16", {f"layer{i}.weight": pattern((i + 1, 9)) for i in range(6)})
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        found[f"dtype-{np.dtype(dtype)}"] = Case("topr:0.2/raw/raw", {"": pattern((5, 7), dtype)})
    found["scalar"] = Case("dense", {"": pattern(())})
    found["empty"] = Case("dense", {"": pattern((0, 3))})
    return found


def encode_case(case: Case) -> bytes:
    """The message of a case."""
    codec = dr.parse(case.spec)
    if list(case.gradients) == [""]:
        return codec.encode(case.gradients[""], seed=7)
    return codec.encode_many(case.gradients, seed=7)
