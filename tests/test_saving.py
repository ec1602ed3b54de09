"""Compiled kernels on disk: found again by what they were compiled from, and never in place of another."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from deepreduce.kernels import saving

NAMES = ["float16", "float32", "float64"]
KERNEL = """
from deepreduce.kernels.jit import kernel

@kernel
def first(values):
    return values[0]
"""
FACTORY = """
from deepreduce.kernels.jit import kernel

def adding(number):
    @kernel
    def add(value):
        return value + number
    return add
"""
SAVES = """
import sys
sys.path.insert(0, sys.argv[1])
import its_kernel
print("ready", flush=True)
sys.stdin.readline()
for number in range(100):
    key = (sys.argv[2], number), "target", "code"
    its_kernel.first._cache._cache_file.save(key, key)
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The path of a module that can be imported, also by what is loaded from the cache."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "its_kernel.py"
    sys.modules.pop("its_kernel", None)


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_processes_save_at_once_is_found_by_its_own_key(source):
    source.write_text(KERNEL)
    commands = [[sys.executable, "-c", SAVES, source.parent, name] for name in NAMES]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(NAMES)
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(timeout=120) for process in processes] == [0] * len(NAMES)
    for process in processes:
        process.communicate()
    files = imported(source).first._cache._cache_file
    keys = [((name, number), "target", "code") for name in NAMES for number in range(100)]
    assert [files.load(key) for key in keys] == keys


def test_a_kernel_is_loaded_where_it_was_compiled_before_for_the_same_types(source):
    source.write_text(KERNEL)
    compiled = imported(source).first
    assert compiled(np.float32([3, 4])) == 3
    assert compiled(np.int8([5, 6])) == 5
    loaded = imported(source).first
    assert loaded(np.float32([7, 8])) == 7
    assert loaded(np.int8([9, 10])) == 9
    assert sum(loaded.stats.cache_hits.values()) == 2
    assert not loaded.stats.cache_misses


def test_kernels_of_one_name_and_types_are_told_apart(source):
    source.write_text(FACTORY)
    for _ in range(2):
        module = imported(source)
        assert (module.adding(1)(1), module.adding(100)(1)) == (2, 101)


def test_a_kernel_is_compiled_again_where_a_kernel_in_another_file_has_changed(source, monkeypatch):
    source.write_text(KERNEL)
    assert imported(source).first(np.float32([3, 4])) == 3
    monkeypatch.setattr(saving, "_SOURCES", b"of other kernels")
    again = imported(source).first
    assert again(np.float32([3, 4])) == 3
    assert not again.stats.cache_hits
