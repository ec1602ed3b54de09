"""Where numbers come from: commit, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("deepreduce", "numpy", "numba", "ml_dtypes", "pcodec", "torch", "tensorflow", "tensorflow-cpu", "jax", "optax")


def provenance() -> dict[str, Any]:
    """Commit (None outside a git tree), machine, versions and time, as plain JSON.

    >>> sorted(provenance())
    ['commit', 'machine', 'time', 'versions']
    """
    return {"commit": commit(), "machine": machine(), "versions": versions(), "time": datetime.now(UTC).isoformat(timespec="seconds")}


def commit() -> str | None:
    """The commit of the tree this package is part of, with a plus sign where files were changed; None for an installed package."""
    folder = Path(__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie inside a repository of the user
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def machine() -> str:
    """Processor, number of cores and system, in one line."""
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor")


def versions() -> dict[str, str]:
    """Python and the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
