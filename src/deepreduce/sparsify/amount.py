"""How many elements to select: a ratio (float) or a count (int)."""

from typing import Any

from ..errors import ConfigError


def check_amount(amount: float, who: str) -> None:
    """Refuse what is neither a ratio in (0, 1] nor a count of at least 1."""
    if isinstance(amount, int) and amount < 1:
        raise ConfigError(f"{who} selects a count of at least 1, got {amount}")
    if isinstance(amount, float) and not 0 < amount <= 1:
        raise ConfigError(f"{who} selects a ratio above 0 and at most 1.0, got {amount} (a count is an int)")


def same_amount(one: Any, other: Any) -> bool:
    """Whether two sparsifiers are equal: the count 1 and the ratio 1.0 are not."""
    return type(one) is type(other) and (type(one.amount), one.amount) == (type(other.amount), other.amount)


def count_of(amount: float, numel: int) -> int:
    """The number of elements selected of `numel`: at least one, if there is one.

    >>> count_of(0.01, 36864), count_of(0.01, 5), count_of(100, 20), count_of(1.0, 20)
    (369, 1, 20, 20)
    """
    wanted = amount if isinstance(amount, int) else max(1, round(amount * numel))
    return min(wanted, numel)
