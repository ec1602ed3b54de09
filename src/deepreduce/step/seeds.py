"""Seeds of all random draws of a step, mixed by a hash: tensors, steps and runs never share draws, ranks only those that they must."""

from __future__ import annotations

from dataclasses import dataclass

from ..seeds import mix


@dataclass(frozen=True)
class StepSeed:
    """The seed of one step of one rank of a run."""

    run: int
    step: int
    rank: int

    def of(self, name: str, shared: bool = False) -> int:
        """Return the seed of a tensor; a `shared` one is the same on all ranks, for codecs whose positions follow from it.

        >>> StepSeed(run=0, step=1, rank=0).of("w") == StepSeed(run=1, step=0, rank=0).of("w")
        False
        """
        return mix(self.run, self.step, -1 if shared else self.rank, name)
