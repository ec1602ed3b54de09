"""Checkpoints for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..step import checkpoint
from .convert import mapped_to_numpy, mapped_to_torch


def reshard(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the states of `ranks` ranks from the states of all ranks of a run, however many they were; no residual is lost.

    >>> import torch
    >>> from deepreduce.torch import DeepReduceState, allreduce_
    >>> state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    >>> allreduce_(torch.tensor([3.0, 2.0]), state)
    >>> [one["memory"]["residuals"] for one in reshard([state.state_dict()], ranks=2)]
    [{'tensor 0': tensor([0., 2.])}, {}]
    """
    return [mapped_to_torch(state) for state in checkpoint.reshard([mapped_to_numpy(state) for state in states], ranks)]
