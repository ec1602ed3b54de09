"""Specs and topologies as the configuration of a saved model holds them: plain values of JSON."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..pipeline import DeepReduce
from ..step.policy import BySize, Spec
from ..step.schedule import Schedule
from ..step.topology import Sharded, Topology, topology_of


def plain_spec(spec: Spec) -> str | dict[str, Any]:
    """Return a spec for `saved_spec`.

    >>> print(saved_spec(plain_spec(Schedule("topr:0.01/rice/qsgd", steps=500))))
    topr:0.01/rice/qsgd from 0.25 over 500 steps
    """
    if isinstance(spec, str | DeepReduce):
        return str(spec)
    if isinstance(spec, BySize):
        return {"numel": spec.numel, "small": str(spec.small), "large": str(spec.large)}
    if isinstance(spec, Schedule):
        return {"spec": str(spec.spec), "steps": spec.steps, "start": spec.start}
    raise ConfigError(f"a model is saved with a spec, a DeepReduce, a Schedule or a BySize in its optimizer, got {spec!r}")


def saved_spec(plain: str | dict[str, Any]) -> Spec:
    """Return the spec of `plain_spec`."""
    if isinstance(plain, str):
        return plain
    return Schedule(**plain) if "steps" in plain else BySize(**plain)


def plain_topology(topology: Topology) -> str | dict[str, Any]:
    """Return a topology for `saved_topology`."""
    return {"budget": topology.budget} if isinstance(topology, Sharded) else topology.name


def saved_topology(plain: str | dict[str, Any]) -> Topology:
    """Return the topology of `plain_topology`."""
    return Sharded(**plain) if isinstance(plain, dict) else topology_of(plain)
