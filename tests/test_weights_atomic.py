"""Temporary files beside a target: only those of dead processes of this machine are removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepreduce.errors import FileError
from deepreduce.weights import atomic
from deepreduce.weights.atomic import replacing


@pytest.fixture(scope="module")
def dead_process() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leftover(target: Path, machine: str, process: int) -> Path:
    path = target.with_name(f".{target.name}.{machine}-{process}-0badcafe.part")
    path.write_bytes(b"half")
    return path


@pytest.mark.parametrize("name", ["out.patch", "out[1].patch", "out-1.patch"])
def test_what_a_dead_process_left_is_removed(tmp_path, name, dead_process):
    left = leftover(tmp_path / name, atomic._machine(), dead_process)
    with replacing(tmp_path / name) as temporary:
        temporary.write_bytes(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert not left.exists()


def test_what_others_write_is_kept(tmp_path, dead_process):
    target = tmp_path / "out.patch"
    kept = {leftover(target, atomic._machine(), os.getpid()), leftover(target, "another1", dead_process)}
    with replacing(target) as temporary:
        temporary.write_bytes(b"whole")
    assert set(tmp_path.iterdir()) == {target, *kept}


def test_another_host_is_another_machine(monkeypatch):
    here = atomic._machine()
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert atomic._machine() != here


def test_two_writers_of_one_process_do_not_meet(tmp_path):
    with replacing(tmp_path / "out") as first, replacing(tmp_path / "out") as second:
        assert first != second
        first.write_bytes(b"1")
        second.write_bytes(b"2")
    assert (tmp_path / "out").read_bytes() == b"1"  # the last one that was done


@pytest.mark.parametrize("target", [".", "/"])
def test_a_folder_is_no_name_for_a_file(target):
    with pytest.raises(FileError, match="this is a folder"), replacing(Path(target)):
        pass
