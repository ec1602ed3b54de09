"""The adapter brings no other framework with it; what TensorFlow itself imports (its lite part looks for jax) is its own affair."""

import subprocess
import sys

SCRIPT = """
import sys, tensorflow
others = {"torch", "jax", "optax"}
before = others & set(sys.modules)
import deepreduce.tensorflow
print(sorted(others & set(sys.modules) - before), "torch" in sys.modules)
"""


def test_it_imports_neither_torch_nor_jax():
    shown = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[] False"
