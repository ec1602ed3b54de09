"""Density warm-up: much is sent in the first steps, when gradients change fast, and less and less until the density of the spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from ..errors import ConfigError
from ..indices.all import All
from ..parameters import natural
from ..pipeline import DeepReduce, parse
from ..sparsify.none import Keep


@dataclass(frozen=True)
class Schedule:
    """A spec whose density falls from `start` to its own over the first `steps` steps, halving in stages of equal length.

    Goes wherever a spec goes. With ``start=1.0`` the first stage sends all values. The spec has a sparsifier with a density: `topr` or
    `randomr` with a ratio, or `chunktopr`. (The warm-up of Deep Gradient Compression, Lin et al. 2018.)

    >>> schedule = Schedule("topr:0.01/rice/qsgd", steps=500, start=0.25)
    >>> [str(schedule.codec_at(step)) for step in (0, 100, 499, 500)]
    ['topr:0.25/rice/qsgd', 'topr:0.125/rice/qsgd', 'topr:0.015625/rice/qsgd', 'topr:0.01/rice/qsgd']
    >>> str(Schedule("topr:0.01/rice/qsgd", steps=700, start=1.0).codec_at(0))
    'none/all/qsgd'
    """

    spec: DeepReduce
    steps: int
    start: float = 0.25

    def __init__(self, spec: str | DeepReduce, steps: int, start: float = 0.25) -> None:
        object.__setattr__(self, "spec", spec if isinstance(spec, DeepReduce) else parse(spec))
        object.__setattr__(self, "steps", natural(steps, "the steps of a Schedule"))
        object.__setattr__(self, "start", float(start))
        if not 0 < self.start <= 1:
            raise ConfigError(f"the start of a Schedule is a density above 0 and at most 1, got {start}")
        if _density(self.spec) > self.start:
            raise ConfigError(f"the start of a Schedule is at least the density of its spec {self.spec}, got {start}")

    def __str__(self) -> str:
        return f"{self.spec} from {self.start:g} over {self.steps} steps"

    def codec_at(self, step: int) -> DeepReduce:
        """Return the codec of a step."""
        if step >= self.steps:
            return self.spec
        stages = max(1, ceil(log2(self.start / _density(self.spec))))
        return _with_density(self.spec, self.start / 2 ** (stages * step // self.steps))


def _density(codec: DeepReduce) -> float:
    density = codec.sparsifier.density
    if density is None:
        raise ConfigError(f"a Schedule changes the density of topr:RATIO, randomr:RATIO or chunktopr; {codec} has none")
    return density


def _with_density(codec: DeepReduce, density: float) -> DeepReduce:
    if density == 1.0:
        return replace(codec, sparsifier=Keep(), index=All())
    return replace(codec, sparsifier=codec.sparsifier.with_density(density))
