"""How many elements to select: a ratio (float) or a count (int)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ..codec import Sparsifier
from ..errors import ConfigError


@dataclass(frozen=True)
class ByAmount(Sparsifier):
    """A sparsifier that selects an amount of elements, whatever their values are."""

    amount: int | float

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if isinstance(self.amount, int) and self.amount < 1:
            raise ConfigError(f"{name} selects a count of at least 1, got {self.amount}")
        if isinstance(self.amount, float) and not 0 < self.amount <= 1:
            raise ConfigError(f"{name} selects a ratio above 0 and at most 1.0, got {self.amount} (a count is an int)")

    def __eq__(self, other: object) -> bool:
        """Whether type and amount are the same: the count 1 and the ratio 1.0 are not."""
        return type(self) is type(other) and (type(self.amount), self.amount) == (type(other.amount), other.amount)

    def expected_nnz(self, numel: int) -> int:
        return count_of(self.amount, numel)

    @property
    def density(self) -> float | None:
        return self.amount if isinstance(self.amount, float) else None

    def with_density(self, density: float) -> Self:
        return replace(self, amount=float(density))


def count_of(amount: float, numel: int) -> int:
    """The number of elements selected of `numel`: at least one, if there is one.

    >>> count_of(0.01, 36864), count_of(0.01, 5), count_of(100, 20), count_of(1.0, 20)
    (369, 1, 20, 20)
    """
    wanted = amount if isinstance(amount, int) else max(1, round(amount * numel))
    return min(wanted, numel)
