"""The state of local steps as it is saved: arrays by name, and the exchange that is under way."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..parameters import shown
from ..step.arrays import arrays_of
from ..step.residual import Gradient
from ..step.stats import StepStats
from .convert import mapped_to_numpy, mapped_to_torch

_KEYS = {"means", "values"}


@dataclass(frozen=True, eq=False)
class Pending:
    """An exchange beside local steps: its means and cost (None after a restart), the values of the parameters it began with, its steps."""

    outcome: Future[tuple[dict[str, Gradient], StepStats | None]]
    values: Mapping[str, Any]
    steps: int

    def wait(self) -> None:
        """Wait until it has ended, whether or not it went well."""
        wait([self.outcome])

    def has_failed(self) -> bool:
        """Wait until it has ended, and return whether it raised an error."""
        return self.outcome.exception() is not None

    def state_dict(self) -> dict[str, Any]:
        """Wait for the means, and return copies of them and of the values."""
        means, _ = self.outcome.result()
        return {"means": copied(means), "values": copied(self.values)}

    @classmethod
    def loaded(cls, state: Any, tensors: Mapping[str, Any]) -> Pending | None:
        """Return the exchange of a state, which has ended; None where none was under way."""
        if state is None:
            return None
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            raise InputError(f"what is pending in a state of LocalSteps has the keys {', '.join(sorted(_KEYS))}, or is None")
        outcome: Future[tuple[dict[str, Gradient], StepStats | None]] = Future()
        outcome.set_result((loaded(state["means"], tensors), None))
        return cls(outcome, loaded(state["values"], tensors), steps=0)


def copied(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of arrays by name, as tensors."""
    copies: dict[str, Any] = mapped_to_torch({name: arrays_of(array).copy(array) for name, array in table.items()})
    return copies


def loaded(held: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of a state as copies, on the devices of the tensors that it belongs to."""
    if not isinstance(held, Mapping):
        raise InputError(f"a state of LocalSteps has arrays by name, got {shown(held)}")
    table = mapped_to_numpy(held)
    for name, array in table.items():
        if name not in tensors:
            raise InputError(f"the state has {name}, which the model does not have")
        if tuple(array.shape) != tuple(tensors[name].shape):
            raise InputError(f"the state has {name} of shape {tuple(array.shape)}, in the model it is {tuple(tensors[name].shape)}")
    return {name: arrays_of(tensors[name]).copy(arrays_of(tensors[name]).moved(array, tensors[name])) for name, array in table.items()}
