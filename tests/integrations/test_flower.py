"""Flower: the mod and the grid by themselves, in a simulation, and with a SuperLink and SuperNodes on this machine."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .launched import free_port
from .scripts import EXAMPLES, run_example

ACCURACY = re.compile(r"accuracy ([\d.]+), ([\d.]+) times fewer bytes up and ([\d.]+) down")
APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "digits"
version = "1.0.0"
description = "digits"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "deepreduce"

[tool.flwr.app.components]
serverapp = "flower_digits:server_app"
clientapp = "flower_digits:client_app"

[tool.flwr.app.config]
"""


def results(output):
    found = ACCURACY.search(output)
    assert found, output[-4000:]
    return map(float, found.groups())


@pytest.fixture(scope="module")
def local():
    """What `flower_local.py` found: the same rounds in one process, with a grid that calls the clients."""
    script = Path(__file__).with_name("flower_local.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {line.split(": ")[0]: line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("found ")}


def test_without_loss_the_weights_are_those_of_flower(local):
    assert float(local["found difference without loss"]) < 1e-6


def test_what_comes_up_and_goes_down_is_restored(local):
    assert local["found checks"] == "13"


def test_a_simulation_keeps_the_accuracy(local):
    accuracy, up, down = results(run_example("flower_digits.py"))
    assert accuracy >= float(local["found accuracy of plain Flower"]) - 0.01
    assert up >= 20
    assert down >= 5


@contextlib.contextmanager
def started(command, log, environment):
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(log, text, seconds=120):
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.2)


def test_a_superlink_with_four_supernodes_keeps_the_accuracy(local, tmp_path):
    app, tools = tmp_path / "app", Path(sys.executable).parent
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(EXAMPLES / "flower_digits.py", app)
    link = f"127.0.0.1:{free_port()}"
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{link}"\ninsecure = true\n')
    own = {
        "FLWR_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    }
    environment = os.environ | own
    with contextlib.ExitStack() as stack:
        host, port = link.split(":")
        command = [str(tools / "flower-superlink"), "--insecure", "--host", host, "--port", port]
        stack.enter_context(started(command, tmp_path / "link.log", environment))
        wait_for(tmp_path / "link.log", "Starting Flower SuperLink")
        for node in range(4):
            command = [str(tools / "flower-supernode"), "--insecure", "--superlink", link, "--port", str(free_port())]
            command += ["--node-config", f"partition-id={node}"]
            stack.enter_context(started(command, tmp_path / f"node{node}.log", environment))
        command = [str(tools / "flwr"), "run", str(app), "here", "--stream"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
        except subprocess.TimeoutExpired as late:
            logs = "\n".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))
            raise AssertionError(f"{(late.output or b'')[-2000:]}\n{logs}") from late
    accuracy, up, down = results(done.stdout + done.stderr)
    assert accuracy >= float(local["found accuracy of plain Flower"]) - 0.01
    assert up >= 20
    assert down >= 5
