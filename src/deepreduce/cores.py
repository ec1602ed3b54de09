"""The cores of this machine that are for this process."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Return the numbers of the cores this process may use: all of them, unless it was bound to some.

    >>> len(usable_cores()) >= 1
    True
    """
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
