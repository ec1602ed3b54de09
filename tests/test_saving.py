"""Processes that compile one kernel at the same time for different types: each finds its own code again."""

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
    its_kernel.first._cache._cache_file.save((sys.argv[2], number), (sys.argv[2], number))
"""


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_processes_save_at_once_is_found_by_its_own_key(tmp_path):
    source = tmp_path / "its_kernel.py"
    source.write_text(KERNEL)
    kernel = imported(source).first
    assert kernel(np.float32([3, 4])) == 3
    commands = [[sys.executable, "-c", SAVES, tmp_path, name] for name in NAMES]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(NAMES)
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(timeout=120) for process in processes] == [0] * len(NAMES)
    for process in processes:
        process.communicate()
    for key in [(name, number) for name in NAMES for number in range(100)]:
        assert kernel._cache._cache_file.load(key) == key
