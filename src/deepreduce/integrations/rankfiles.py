"""The state of every rank in a file of its own: residuals differ from rank to rank, and are as large as the model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..errors import InputError
from ..torch.state import DeepReduceState
from ..torch.transport import rank_and_size


def save(state: DeepReduceState, prefix: str | os.PathLike[str]) -> Path:
    """Write the state of this rank to ``prefix.rank<number>``, whole or not at all; returns the path."""
    path = _path(state, prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    torch.save(state.state_dict(), unfinished)
    unfinished.replace(path)
    return path


def load(state: DeepReduceState, prefix: str | os.PathLike[str]) -> None:
    """Go on from what `save` wrote for this rank.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, DeepReduceState("topr:0.01/raw/fp16") as state:
    ...     print(save(state, Path(folder) / "deepreduce").name)
    ...     load(state, Path(folder) / "deepreduce")
    deepreduce.rank0
    """
    path = _path(state, prefix)
    if not path.exists():
        raise InputError(
            f"the checkpoint has no {path}, with the residuals of this rank: it was made without deepreduce, or by fewer ranks "
            "(`deepreduce.torch.reshard` makes the states of all ranks into those of another number of ranks)"
        )
    state.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _path(state: DeepReduceState, prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.rank{rank_and_size(state.options.process_group)[0]}")
