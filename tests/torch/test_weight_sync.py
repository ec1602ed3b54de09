"""Weights of a group stay equal, bit for bit, whoever comes and goes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import deepreduce as dr
from deepreduce import weights
from deepreduce.torch import WeightSync
from deepreduce.torch.weight_sync import to_array
from deepreduce.weights.kinds import KINDS

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


def changing_member(rank: int) -> None:
    for change in ({"new": torch.ones(3)}, {"b": torch.ones(5)}, {"b": torch.ones(4, dtype=torch.float64)}):
        model = {"w": torch.zeros(6), "b": torch.zeros(4)}
        sync, before = WeightSync(model), dict(model)
        exchange = sync.push if rank == 0 else sync.pull
        exchange()
        model |= change if rank == 0 else {}
        for _ in range(2):
            with pytest.raises(dr.InputError if rank == 0 else dr.PeerError, match=f"tensor '{next(iter(change))}' is not what it was"):
                exchange()
        if rank == 0:
            model.clear()
            model |= before
            model["w"] += 1
        assert exchange().version == 2
        assert torch.equal(model["w"], torch.ones(6))


def test_source_refuses_other_tensors_than_it_pushed_before():
    run_ranks(changing_member, 2)


def deceived_member(rank: int) -> None:
    model = {"w": torch.zeros(6), "b": torch.zeros(4)}
    sync = WeightSync(model)
    exchange = sync.push if rank == 0 else sync.pull
    exchange()
    if rank == 0:  # a source that does not check what it sends
        diff = weights.diff
        weights.diff = lambda old, new, **options: diff(old, new | {"new": np.ones(3)}, **options)
        model["w"] += 1
    for _ in range(2):  # a patch, then a whole copy
        if rank == 0:
            exchange()
            continue
        with pytest.raises(dr.InputError, match="tensor 'new' is not the same at the source and here"):
            exchange()
        assert torch.equal(model["w"], torch.zeros(6))


def test_receivers_refuse_other_tensors_than_they_have():
    run_ranks(deceived_member, 2)


def oversized_member(rank: int) -> None:
    model = {"w": torch.zeros(6)}
    sync = WeightSync(model)
    exchange = sync.push if rank == 0 else sync.pull
    exchange()
    if rank == 0:
        weights.diff = lambda old, new, **options: b"x" * 2**24
    with pytest.raises(dr.PeerError, match="could not exchange weights" if rank == 0 else "more than its weights can take"):
        exchange()
    dist.barrier()  # the receiver is there until the source has learned it


def test_the_source_learns_that_a_receiver_refuses_an_oversized_patch():
    run_ranks(oversized_member, 2, timeout=30)


def rejoining_member(rank: int, folder: str) -> None:
    model = {"w": torch.full((4,), float(rank))}
    sync = WeightSync(model)
    exchange = sync.push if rank == 0 else sync.pull
    exchange()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=2)
    sync.rejoin(None)
    model["w"][0] += 1 - rank
    stats = exchange()
    assert (stats.version, stats.full_ranks) == (2, ())
    assert model["w"].tolist() == [1, 0, 0, 0]
    dist.destroy_process_group()
    sync.close()


def test_group_is_left_where_all_process_groups_are_gone(tmp_path):
    run_ranks(rejoining_member, 2, str(tmp_path))


def reconnecting_member(rank: int) -> None:
    model = {"w": torch.full((4,), float(rank))}
    for _ in range(5):
        sync = WeightSync(model)
        assert (sync.push() if rank == 0 else sync.pull()).version == 1
        sync.close()
        with pytest.raises(dr.PeerError, match="its connections are closed"):
            sync.push() if rank == 0 else sync.pull()


def test_ranks_that_left_meet_again():
    run_ranks(reconnecting_member, 2)


@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_every_dtype_of_weights_is_taken(name):
    tensor = torch.zeros(3, dtype=torch.uint8).view(torch.bool).to(getattr(torch, name))
    assert to_array(tensor).dtype.name == name
    assert WeightSync({"w": tensor}).push().version == 1


class Counting(torch.nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> object:
        return {"calls": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def test_extra_state_of_modules_is_left_out():
    assert WeightSync(torch.nn.Sequential(Counting(2, 2))).push().dense_bytes == 4 * 6


def test_what_is_no_tensor_is_refused():
    with pytest.raises(dr.InputError, match="'step' is no tensor but a int"):
        WeightSync({"w": torch.zeros(2), "step": 3})


def test_roles_are_checked():
    sync = WeightSync({"w": torch.zeros(2)})
    with pytest.raises(dr.InputError, match="it pushes"):
        sync.pull()
    assert (sync.push().version, sync.push().version) == (1, 2)


def test_example_runs():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(EXAMPLE), "--syncs", "3"], capture_output=True, text=True, timeout=600, env=environment)
    assert found.returncode == 0, found.stderr
    assert "sync 1: a receiver is gone" in found.stdout
    assert "sync 2: rank 2 comes back" in found.stdout
    assert "3 syncs, all bit-identical" in found.stdout
