"""The table of all experiments."""

from __future__ import annotations

from ...errors import ConfigError
from . import figure6, figure7, figure8, figure9, figure10, figure11, figure15, table1, table2, table3
from .experiment import Experiment

EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (table3, figure10, figure7, figure6, figure8, table1, table2, figure9, figure15, figure11)
}
"""By name, in the order in which `all` runs them: the quick ones first, and those that share runs together."""


def experiments_of(names: list[str]) -> list[Experiment]:
    """Return the experiments of these names; ``all`` is every one.

    >>> [experiment.name for experiment in experiments_of(["figure10", "table3"])]
    ['table3', 'figure10']
    """
    unknown = [name for name in names if name not in EXPERIMENTS and name != "all"]
    if unknown:
        raise ConfigError(f"no experiment {unknown[0]!r}; there are {', '.join(sorted(EXPERIMENTS))} and all")
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names or "all" in names]
