"""Doctests of an adapter need its framework, doctests and tests of an integration its tool; the rest of the package needs neither."""

from importlib.util import find_spec

ADAPTERS = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax"}

collect_ignore = [f"src/deepreduce/{folder}" for folder, framework in ADAPTERS.items() if find_spec(framework) is None]
collect_ignore_glob = [f"src/deepreduce/lab/train/{framework}_*.py" for framework in ADAPTERS.values() if find_spec(framework) is None]

INTEGRATIONS = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning", "torchft": "torchft", "flower*": "flwr"}
MISSING = [file for file, tool in INTEGRATIONS.items() if find_spec(tool) is None]
MISSING += [file for file in ("fsdp", "rankfiles") if find_spec("torch") is None]
collect_ignore_glob += [f"src/deepreduce/integrations/{file}.py" for file in MISSING]
collect_ignore_glob += [f"tests/integrations/test_{file}.py" for file in MISSING]
collect_ignore += [f"tests/integrations/{script}.py" for script in ("flower_local", "torchft_resume")]  # run by tests, beside the examples
