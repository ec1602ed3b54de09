"""Numbers that JSON has."""

from __future__ import annotations

from math import isfinite
from typing import Any


def plain(value: Any) -> Any:
    """The same with None for NaN and Inf, which JSON does not have, at any depth.

    >>> plain({"loss": [0.5, float("nan")]})
    {'loss': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
