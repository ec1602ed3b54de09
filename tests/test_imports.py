"""Arrows go one way: adapters import the core, the core imports no framework; and it starts without compiling anything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deepreduce

ROOT = Path(deepreduce.__file__).parent
OUTER = {"torch", "tensorflow", "jax", "lab", "cli"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "optax"}


def imported(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever it does."""
    package = ["deepreduce", *path.relative_to(ROOT).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


SOURCES = sorted(ROOT.rglob("*.py"))
CORE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in OUTER]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_imports_neither_frameworks_nor_outer_packages(path):
    names = imported(path)
    assert not {name for name in names if name.split(".")[0] in FRAMEWORKS}
    assert not {name for name in names if name.startswith("deepreduce.") and name.split(".")[1] in OUTER}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.name)
def test_kernels_import_nothing_of_deepreduce_but_kernels(path):
    ours = {name for name in imported(path) if name.split(".")[0] == "deepreduce"}
    assert not {name for name in ours if name.split(".")[1:2] != ["kernels"]}


def test_the_message_knows_no_codec():
    core = {name.split(".")[1] for name in imported(ROOT / "message.py") if name.startswith("deepreduce.")}
    assert core <= {"errors", "parameters", "reader", "tensor"}


def test_only_an_adapter_imports_its_framework():
    for path in SOURCES:
        place = path.relative_to(ROOT).parts[0]
        frameworks = {name.split(".")[0] for name in imported(path)} & FRAMEWORKS
        allowed = {
            "tensorflow": {"tensorflow", "keras"},
            "jax": {"jax", "optax"},
            "torch": {"torch"},
            "lab": FRAMEWORKS,
        }
        assert frameworks <= allowed.get(place, set()), path


def test_no_file_takes_the_name_of_a_standard_module():
    assert not [path for path in SOURCES if path.stem in sys.stdlib_module_names]


def test_import_loads_no_framework_and_no_compiler():
    heavy = ["torch", "tensorflow", "jax", "numba", "pcodec", "scipy", "matplotlib", "rich"]
    script = f"import sys, deepreduce; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
