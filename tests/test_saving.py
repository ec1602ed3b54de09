"""Processes that compile one kernel at the same time for different types: none is ever given the code of another."""

import importlib.util
import subprocess
import sys

import numpy as np

NAMES = ["float16", "float32", "float64"]
KERNEL = """
from deepreduce.kernels.jit import kernel

@kernel
def first(values):
    return values[0]
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


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_processes_save_at_once_is_never_found_by_the_key_of_another(tmp_path):
    source = tmp_path / "its_kernel.py"
    source.write_text(KERNEL)
    commands = [[sys.executable, "-c", SAVES, tmp_path, name] for name in NAMES]
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
    found = [files.load(key) for key in keys]
    assert all(data in (key, None) for key, data in zip(keys, found, strict=True))
    assert found.count(None) < len(keys)  # an entry may get lost, and is then compiled and saved again


def test_a_kernel_is_loaded_where_it_was_compiled_before_for_the_same_types(tmp_path):
    source = tmp_path / "its_kernel.py"
    source.write_text(KERNEL)
    compiled = imported(source).first
    assert compiled(np.float32([3, 4])) == 3
    assert compiled(np.int8([5, 6])) == 5
    loaded = imported(source).first
    assert loaded(np.float32([7, 8])) == 7
    assert loaded(np.int8([9, 10])) == 9
    assert sum(loaded.stats.cache_hits.values()) == 2
    assert not loaded.stats.cache_misses
