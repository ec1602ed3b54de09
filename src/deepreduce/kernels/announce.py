"""One line in the log when a process begins to compile kernels, which takes a while on a new machine."""

from __future__ import annotations

import logging
from typing import Any

from numba.core import event

_log = logging.getLogger("deepreduce")


class _FirstCompilation(event.Listener):
    """Logs the first compilation; what comes from the cache on disk is none."""

    def __init__(self) -> None:
        self.announced = False

    def on_start(self, event: Any) -> None:
        """Say that it begins."""
        if not self.announced:
            self.announced = True
            _log.warning(
                "compiling kernels, once on this machine for each codec and dtype: up to a minute or two; "
                "`deepreduce warmup` does it beforehand"
            )

    def on_end(self, event: Any) -> None:
        """Say nothing more."""


def announce_compilation() -> None:
    """Log from now on when this process compiles. By the events of numba, seen in numba 0.68."""
    event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]
