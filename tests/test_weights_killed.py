"""`diff`, `patch` and `fold` killed while they write: nothing half-written is left, and the next run is right."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepreduce.cli.main import main

from .test_weights_files import read_sharded, write_sharded
from .weights_data import same_bits, trained

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits of file sizes")

LIMIT_BYTES = 1 << 20
"""Less than any file that is written here, more than a compiled kernel in the cache."""

CHILD = f"""
import os, resource, signal, sys
from deepreduce.cli.main import main

def killed_at_rename(event, details):
    if event == "os.rename" and ".part" in str(details[0]):
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "half":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills a process that writes more
    resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT_BYTES}, {LIMIT_BYTES}))
else:
    sys.addaudithook(killed_at_rename)
sys.exit(main(sys.argv[2:]))
"""
SIGNALS = {"half": "SIGXFSZ", "before it has its name": "SIGKILL"}


@pytest.fixture(scope="module")
def versions() -> list[dict[str, np.ndarray]]:
    """Three versions of two tensors; most weights change."""
    first, second = trained((1600, 1600), 1e-3, seed=0)
    third, _ = trained((1600, 1600), 1e-3, seed=1)
    return [{"a": array, "b": array[::-1].copy()} for array in (first, second, third)]


@pytest.fixture
def folder(tmp_path: Path, versions, monkeypatch) -> Path:
    """The versions as sharded checkpoints, the patches between them, and an older file where the commands write."""
    monkeypatch.chdir(tmp_path)
    for number, tensors in enumerate(versions):
        write_sharded(tmp_path / f"v{number}", tensors)
    run("diff", "v0", "v1", "01.patch")
    run("diff", "v1", "v2", "12.patch")
    Path("target.patch").write_bytes(b"older")
    return tmp_path


def run(*arguments: str) -> None:
    assert main(list(arguments)) == 0


def run_killed(moment: str, *arguments: str) -> None:
    found = subprocess.run([sys.executable, "-c", CHILD, moment, *arguments], stdout=subprocess.DEVNULL, check=False)
    assert found.returncode == -getattr(signal, SIGNALS[moment])


@pytest.mark.parametrize("moment", SIGNALS)
@pytest.mark.parametrize(
    "arguments",
    [("diff", "v0", "v2", "target.patch"), ("fold", "01.patch", "12.patch", "target.patch", "--base", "v0")],
    ids=["diff", "fold"],
)
def test_a_killed_run_keeps_the_older_patch(folder, versions, arguments, moment):
    before = set(os.listdir())
    run_killed(moment, *arguments)
    assert Path("target.patch").read_bytes() == b"older"
    run(*arguments)
    assert set(os.listdir()) == before
    assert Path("target.patch").stat().st_size > LIMIT_BYTES
    run("patch", "v0", "target.patch", "result")
    assert same_bits(read_sharded(Path("result")), versions[2])


@pytest.mark.parametrize("moment", SIGNALS)
def test_a_killed_patch_leaves_no_checkpoint(folder, versions, moment):
    before = set(os.listdir())
    run_killed(moment, "patch", "v0", "01.patch", "12.patch", "result")
    assert not Path("result").exists()
    run("patch", "v0", "01.patch", "12.patch", "result")
    assert set(os.listdir()) == before | {"result"}
    assert same_bits(read_sharded(Path("result")), versions[2])
