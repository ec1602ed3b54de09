"""Arrows go one way: adapters import the core, the core imports no framework; and it starts without compiling anything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deepreduce

ROOT = Path(deepreduce.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "optax"}
TOOLS = {"accelerate", "transformers", "lightning", "torchft", "flwr"}

# From the lowest to the highest: a package imports its own level's modules and those of the levels named with it, never upwards.
CODECS = {"indices", "values", "sparsify"}
CORE = {
    "kernels": set(),
    "errors": set(),
    "parameters": {"errors"},
    "reader": {"errors", "kernels"},
    "tensor": {"errors", "parameters"},
    "message": {"errors", "parameters", "reader", "tensor"},
}
OUTER = ["step", "weights", "torch", "tensorflow", "jax", "integrations", "lab", "cli", "__main__"]
ALLOWED_OUTER = {
    "step": set(),
    "weights": set(),
    "torch": {"step", "weights", "integrations"},  # compress_fsdp is a public name of deepreduce.torch
    "tensorflow": {"step"},
    "jax": {"step"},
    "integrations": {"step", "torch"},
    "lab": {"step", "weights", "torch", "tensorflow", "jax", "integrations"},
    "cli": {"step", "weights", "torch", "tensorflow", "jax", "integrations", "lab"},
    "__main__": {"cli"},
}
ALLOWED_FRAMEWORKS = {
    "tensorflow": {"tensorflow", "keras"},
    "jax": {"jax", "optax"},
    "torch": {"torch"},
    "integrations": {"torch", *TOOLS},
    "lab": FRAMEWORKS,
}


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


def package_of(path: Path) -> str:
    """The part of the house that a file belongs to."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def wrong_arrows(package: str, names: set[str]) -> set[str]:
    """What a file of this package imports and must not."""
    targets = {name.split(".")[1] for name in names if name.startswith("deepreduce.") and (ROOT / name.split(".")[1]).exists()}
    targets |= {name.split(".")[1] for name in names if name.startswith("deepreduce.") and (ROOT / f"{name.split('.')[1]}.py").exists()}
    if package in OUTER:
        wrong = (targets & set(OUTER)) - ALLOWED_OUTER[package]
    elif package == "__init__":
        wrong = targets & set(OUTER) - {"step"}  # the public face of error feedback
    elif package in CORE:
        wrong = targets - CORE[package]
    elif package in CODECS:
        wrong = targets & {*OUTER, "pipeline", "message", "registry", "specs", "layouts", "inspection"}
    else:
        wrong = targets & set(OUTER)
    frameworks = {name.split(".")[0] for name in names} & (FRAMEWORKS | TOOLS)
    return wrong - {package} | frameworks - ALLOWED_FRAMEWORKS.get(package, set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path):
    assert not wrong_arrows(package_of(path), imported(path))


@pytest.mark.parametrize(
    ("package", "name", "found"),
    [
        ("step", "deepreduce.torch.state", "torch"),
        ("step", "torch", "torch"),
        ("kernels", "deepreduce.errors", "errors"),
        ("message", "deepreduce.codec", "codec"),
        ("indices", "deepreduce.pipeline", "pipeline"),
        ("pipeline", "deepreduce.step.reducer", "step"),
        ("torch", "deepreduce.lab.train", "lab"),
        ("jax", "deepreduce.torch.views", "torch"),
        ("lab", "deepreduce.cli.main", "cli"),
    ],
)
def test_an_arrow_that_points_up_is_found(package, name, found):
    assert wrong_arrows(package, {name}) == {found}


def test_no_file_takes_the_name_of_a_standard_module():
    assert not [path for path in SOURCES if path.stem in sys.stdlib_module_names]


def test_import_loads_no_framework_and_no_compiler():
    heavy = ["torch", "tensorflow", "jax", "numba", "pcodec", "scipy", "matplotlib", "rich"]
    script = f"import sys, deepreduce; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
