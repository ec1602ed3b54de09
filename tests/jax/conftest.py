"""Without JAX and optax the whole directory is left out; the core needs neither."""

import os
from importlib.util import find_spec

import pytest

INSTALLED = all(map(find_spec, ("jax", "optax")))
collect_ignore_glob = [] if INSTALLED else ["*.py"]

if INSTALLED:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # most of the time would go into compiling


@pytest.fixture(scope="session")
def pair():
    """Two processes of jax.distributed that run one task after another."""
    from .processes import Processes

    with Processes(2) as processes:
        yield processes
