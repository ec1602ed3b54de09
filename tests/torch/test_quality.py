"""The benchmark that trains all workers in one process does what processes do."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

from deepreduce.cli.main import main
from deepreduce.lab.train.contract import Plan

WAY = "local:2 none/all/lloyd:2"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield import_module("quality")
    dist.destroy_process_group()


def test_workers_of_one_process_train_as_processes_do(quality, tmp_path):
    command = ["train", "--task", "text", "--steps", "5", "--batch", "2", "--evaluations", "2", "--json", str(tmp_path / "all.json")]
    assert main([*command, "--method", "local:2", "--codec", "none/all/lloyd:2"]) == 0
    dense, local = json.loads((tmp_path / "all.json").read_text())["runs"]
    plan = Plan("text", "gpt", (), workers=2, batch=2, steps=5, evaluations=2, learning_rate=2e-3)
    assert quality.trained(plan, "dense").quality == pytest.approx(dense["quality"], rel=1e-3)
    record = quality.trained(plan, WAY)
    assert record.quality == pytest.approx(local["quality"], rel=1e-3)
    assert record.bytes_sent == local["bytes_sent"]
    assert quality.ratio(record) == local["ratio"]
    assert record.replicas_identical


def test_a_worker_that_fails_ends_the_others(quality):
    def fail():
        raise ZeroDivisionError

    turns = quality.Turns(2)
    with pytest.raises(ZeroDivisionError):
        turns.run([fail, lambda: turns.gather(1, None)])


def test_runs_that_the_file_has_are_not_repeated(quality, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    losses = {("dense", "0.002"): "2.0", ("dense", "0.004"): "1.5", (WAY, "0.002"): "1.8", (WAY, "0.004"): "1.9"}
    for (way, rate), loss in losses.items():
        for seed in range(2):
            row = (way, rate, seed, 800, 2, 8, "residual", 1024, float(loss) + seed / 10, 31.0)
            quality.append(path, dict(zip(quality.COLUMNS, map(str, row), strict=True)))
    dist.destroy_process_group()
    monkeypatch.setattr(sys, "argv", ["quality.py", "dense", WAY, "--rates", "0.002", "0.004", "--seeds", "2", "--out", str(path)])
    monkeypatch.setattr(quality, "trained", None)
    quality.main()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    *_, dense, local = capsys.readouterr().out.splitlines()
    assert dense == "| `dense` | 0.004 | 31x | 1.550 ± 0.071 (1.500, 1.600) | 0.000 |"
    assert local == f"| `{WAY}` | 0.002 | 31x | 1.850 ± 0.071 (1.800, 1.900) | 0.300 |"
