"""Messages written earlier decode to the same tensors, and are still written byte for byte."""

from pathlib import Path

import numpy as np
import pytest

from deepreduce import weights

from .golden.cases import cases, encode_case
from .golden.patches import encode_patch, patch_cases
from .golden.write import decoded
from .weights_data import same_bits

FOLDER = Path(__file__).parent / "golden"
FOREIGN = ("deflate", "pco", "auto", "many")  # compressed by other libraries, whose next version may find a shorter form
CASES, PATCHES = cases(), patch_cases()


@pytest.mark.parametrize("name", CASES)
def test_golden_message(name):
    path = FOLDER / f"{name}.dr"
    assert path.exists(), "run `make golden` once for a new codec, and look at what it writes"
    blob = path.read_bytes()
    tensors = np.concatenate([tensor.reshape(-1).astype(np.float64) for tensor in decoded(blob)])
    assert np.array_equal(tensors, np.load(FOLDER / f"{name}.npy"))
    if not any(word in name for word in FOREIGN):
        assert encode_case(CASES[name]) == blob


def test_no_golden_message_is_forgotten():
    for path in FOLDER.glob("*.dr"):
        assert np.load(path.with_suffix(".npy")).shape == (sum(tensor.size for tensor in decoded(path.read_bytes())),)


@pytest.mark.parametrize("name", PATCHES)
def test_golden_patch(name):
    blob, case = (FOLDER / f"{name}.dr-patch").read_bytes(), PATCHES[name]
    assert same_bits(weights.apply(case.old, blob), case.new)
    assert encode_patch(case) == blob
