"""Whole programs: the example, the command line, and a fresh interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepreduce.cli.main import main
from deepreduce.errors import ConfigError
from deepreduce.lab.train import jax_models

from .processes import _free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_optax.py"


@pytest.mark.parametrize("options", [[], ["--recipe", "adam"]], ids=["gradients", "local steps"])
def test_the_example_runs(options):
    command = [
        sys.executable,
        str(EXAMPLE),
        *options,
        "--steps",
        "21",
        "--coordinator",
        f"127.0.0.1:{_free_port()}",
        "--processes",
        "2",
        "--process",
    ]
    children = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [child.communicate(timeout=100) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for rank, (child, (printed, errors)) in enumerate(zip(children, outputs, strict=True)):
        assert child.returncode == 0, errors
        assert f"process {rank}: " in printed
    assert "step  20: loss" in outputs[0][0]


def test_the_adapter_imports_no_other_framework():
    code = "import sys, deepreduce.jax; print(sorted({'torch', 'tensorflow', 'keras', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_trains_with_jax(tmp_path):
    spec, path = "topr:0.01/bitmap/fp16", tmp_path / "all.json"
    options = ["--framework", "jax", "--model", "cnn", "--steps", "40", "--learning-rate", "0.1", "--codec", spec, "--json", str(path)]
    assert main(["train", *options]) == 0
    dense, sparse = json.loads(path.read_text())["runs"]
    assert (dense["spec"], sparse["spec"]) == ("dense", spec)
    for run in (dense, sparse):
        assert run["replicas_identical"]
        assert run["losses"][-1][1] < run["losses"][0][1]
        assert run["bytes_dense"] == 40 * 4 * run["parameters"]
        assert run["curve"][-1]["step"] == 40
    assert dense["message_bytes"] == dense["bytes_sent"] == dense["bytes_dense"]
    assert dense["losses"][0] == pytest.approx(sparse["losses"][0], rel=1e-5)  # same weights, same data
    assert dense["quality"] > 0.5
    assert 20 < sparse["ratio"] < 60


def test_what_jax_does_not_train_is_said():
    with pytest.raises(ConfigError, match="mlp, cnn"):
        jax_models.build("resnet20", seed=0)
