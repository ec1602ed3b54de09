"""Weights of a group stay equal, bit for bit, whoever comes and goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepreduce as dr
from deepreduce.torch import WeightSync
from deepreduce.torch.weight_sync import to_array

from .ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "weight_sync.py"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that share memory with numpy, that do not, and that share memory with each other."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(40, 30, generator=generator) * 0.02).bfloat16()
    return {
        "weight": weight,
        "tied": weight,
        "transposed": (torch.randn(8, 6, generator=generator)).t(),
        "fp8": torch.randn(16, generator=generator).to(torch.float8_e4m3fn),
        "count": torch.tensor(seed),
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(to_array(left[name]).tobytes() == to_array(right[name]).tobytes() for name in right)


def step(model: dict[str, torch.Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model["weight"].add_(torch.randn(40, 30, generator=generator) * 1e-4)
    model["transposed"][number % 6] += 1
    model["count"] += 1


def group_member(rank: int) -> None:
    model, expected = tensors(0 if rank == 1 else 1 + rank), tensors(0)
    sync = WeightSync(model, source=1)
    for number in range(5):
        if rank == 1:
            step(model, number)
        step(expected, number)
        if rank == 2 and number == 3:
            model["weight"][0, 0] = 7
            with pytest.raises(dr.WrongBaseError):
                sync.pull()
            continue
        stats = sync.push() if rank == 1 else sync.pull()
        assert same(model, expected)
        assert stats.version == number + 1
        assert stats.full_ranks == {0: (0, 2), 4: (2,)}.get(number, ())
        assert bool(stats.patch_bytes) == (number > 0)
    sync.close()


def test_all_ranks_have_the_weights_of_the_source():
    run_ranks(group_member, 3)


def failing_member(rank: int) -> None:
    for dtype in (torch.complex64, torch.complex32):  # numpy has no such dtype as the second
        model = {"w": torch.zeros(4).to(dtype if rank == 0 else torch.float32)}
        sync = WeightSync(model)
        with pytest.raises(dr.InputError if rank == 0 else dr.PeerError, match=str(dtype).removeprefix("torch.")):
            sync.push() if rank == 0 else sync.pull()


def test_receivers_learn_why_the_source_failed():
    run_ranks(failing_member, 2)


def test_roles_are_checked():
    sync = WeightSync({"w": torch.zeros(2)})
    with pytest.raises(dr.InputError, match="it pushes"):
        sync.pull()
    assert (sync.push().version, sync.push().version) == (1, 2)


def test_example_runs():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(EXAMPLE), "--syncs", "10"], capture_output=True, text=True, timeout=600, env=environment)
    assert found.returncode == 0, found.stderr
    assert "a receiver is gone" in found.stdout
    assert "10 syncs, all bit-identical" in found.stdout
