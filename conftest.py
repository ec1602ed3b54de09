"""Doctests of an adapter need its framework, those of an integration its tool; the rest of the package needs neither."""

from importlib.util import find_spec

ADAPTERS = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax"}

collect_ignore = [f"src/deepreduce/{folder}" for folder, framework in ADAPTERS.items() if find_spec(framework) is None]
collect_ignore_glob = [f"src/deepreduce/lab/train/{framework}_*.py" for framework in ADAPTERS.values() if find_spec(framework) is None]

INTEGRATIONS = {
    "fsdp.py": "torch",
    "rankfiles.py": "torch",
    "accelerate.py": "accelerate",
    "trainer.py": "transformers",
    "lightning.py": "lightning",
    "torchft.py": "torchft",
    "flower*.py": "flwr",
}
collect_ignore_glob += [f"src/deepreduce/integrations/{file}" for file, tool in INTEGRATIONS.items() if find_spec(tool) is None]
