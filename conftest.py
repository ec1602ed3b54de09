"""Doctests of an adapter need its framework; the rest of the package does not."""

from importlib.util import find_spec

ADAPTERS = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax"}

collect_ignore = [f"src/deepreduce/{folder}" for folder, framework in ADAPTERS.items() if find_spec(framework) is None]
collect_ignore_glob = [f"src/deepreduce/lab/train/{framework}_*.py" for framework in ADAPTERS.values() if find_spec(framework) is None]
