"""Checkpoints for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..step import checkpoint
from .convert import mapped_to_numpy, mapped_to_torch


def reshard(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the states of `ranks` ranks from the states of all ranks of a run, however many they were; no residual is lost.

    The states are those of a `DeepReduceState`, or of `LocalSteps`, saved after `sync()`.

    >>> import torch
    >>> from deepreduce.torch import DeepReduceState, allreduce_
    >>> state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    >>> allreduce_(torch.tensor([3.0, 2.0]), state)
    >>> [one["memory"]["residuals"] for one in reshard([state.state_dict()], ranks=2)]
    [{'tensor 0': tensor([0., 2.])}, {}]
    """
    if any("exchange" in state for state in states):
        return _reshard_local(states, ranks)
    return [mapped_to_torch(state) for state in checkpoint.reshard([mapped_to_numpy(state) for state in states], ranks)]


def _reshard_local(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """After `sync()`, all ranks of a run with local steps have the same parameters, anchors and outer optimizer."""
    for number, state in enumerate(states):
        if "exchange" not in state:
            raise InputError(f"state {number} is not one of LocalSteps, others are")
        if any(part["steps"] or part["pending"] is not None or part["residuals_in_parameters"] for part in state["fragments"]):
            raise InputError(f"state {number} was saved between two syncs, with changes that only its rank has: call local.sync() before")
    exchanges = reshard([state["exchange"] for state in states], ranks)
    return [{**states[0], "exchange": exchange} for exchange in exchanges]
