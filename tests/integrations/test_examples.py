"""Every tool has a short example, which its own tests run."""

import pytest

from .scripts import EXAMPLES

NAMES = "accelerate_loop", "flower_digits", "fsdp", "lightning_fit", "torchft_diloco", "trainer_gpt2"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
