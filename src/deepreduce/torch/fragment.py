"""Tensors that all ranks synchronize together: everything that is trained, or a fragment of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any
from warnings import warn

import torch

from ..errors import InputError
from ..parameters import natural, shown
from ..step.local import Capture, LocalTraining, are_equal, check_equal, digest
from ..step.residual import Gradient
from ..step.stats import Stats, StepStats
from ..step.transport import Transport
from ..step.worker import Worker
from .convert import to_numpy
from .local_state import Pending
from .outer import Outer
from .trained import Trained
from .views import view, wait_for

_KEYS = {"names", "steps", "due_after", "syncs", "pending", "residuals_in_parameters"}
_CHANGED = (
    "parameters have changed since the last sync, but not by steps of the optimizer that LocalSteps were given: sync() undoes that until "
    "that optimizer's next steps are sent. Was another optimizer made? close() these LocalSteps, and make new ones with the other"
)


class Fragment:
    """Some of the tensors that are trained, by their `names`: their training between two syncs, and the exchange that is under way.

    With `residuals_in_parameters`, what was not sent is moved into the parameters after each sync.
    """

    def __init__(self, training: LocalTraining, trained: Trained, outer: Outer | None, stats: Stats, residuals_in_parameters: bool) -> None:
        self.training, self.names, self.numel = training, set[str](), 0
        self._trained, self._outer, self._stats, self._keeps_residuals_in_parameters = trained, outer, stats, residuals_in_parameters
        self._residuals_in_parameters = residuals_in_parameters
        self._unchecked: list[str] = []
        self._versions: dict[str, int] | None = None
        self._pending: Pending | None = None

    def add(self, name: str, numel: int) -> None:
        """Add a tensor to this fragment."""
        self.names.add(name)
        self.numel += numel

    def add_anchors(self) -> None:
        """Let the values that new parameters have now be where their changes begin."""
        self._unchecked += self.training.add_anchors(self._views())

    def tensors(self) -> dict[str, Any]:
        """Return what is exchanged, as a step sees it."""
        return {name: tensor for name, tensor in self._trained.tensors().items() if name in self.names}

    def _views(self, frozen: bool = True) -> dict[str, Any]:
        return {name: parameter for name, parameter in self._trained.parameter_views(frozen).items() if name in self.names}

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for name, parameter in self._trained.parameters.items() if name in self.names]

    # Syncs

    @torch.no_grad()
    def sync(self, transport: Transport) -> None:
        """Exchange the changes and apply their means, in one go."""
        if not self.names:  # such as a fragment of buffers that are not averaged any more
            self.training.steps = 0
            return
        self._check_new_anchors(transport)
        outer = None if self.training.is_warming_up else self._outer
        self._apply(*self.training.sync(self.tensors(), transport), {}, outer)

    @torch.no_grad()
    def begin(self, worker: Worker, transport: Transport) -> None:
        """Let the worker exchange the changes; local steps go on beside it."""
        if self._unchecked:
            worker.submit(partial(self._check_new_anchors, transport)).result()  # after the exchange of another fragment
        capture = self.training.capture(self.tensors())
        parameters = self._parameters()
        work = partial(_exchanged, self.training, capture, transport, parameters, wait_for(parameters))
        self._pending = Pending(worker.submit(work), capture.values, capture.steps)
        self.training.steps = 0

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the exchange that is under way and apply its means; an error of it is raised here, and its change is sent next time."""
        if self._pending is None:
            return
        self._pending.wait()  # an interrupt here leaves it under way
        pending, self._pending = self._pending, None
        try:
            means, cost = pending.outcome.result()
        except Exception:
            self.training.steps += pending.steps
            raise
        self.training.syncs += 1
        self._apply(means, cost, pending.values, self._outer)

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same parameters here."""
        has_residuals = self._residuals_in_parameters and self.training.syncs > 0
        return not (self.training.steps or self._pending or has_residuals)

    def wait(self) -> None:
        """Wait until the exchange that is under way has ended, whether or not it went well."""
        if self._pending is not None:
            self._pending.wait()

    def _apply(self, means: Mapping[str, Gradient], cost: StepStats | None, values: Mapping[str, Any], outer: Outer | None) -> None:
        """Move the anchors by the means, and the parameters with them; what was added to parameters since they had `values` stays."""
        training, tensors = self.training, self.tensors()
        moves = training.local_change(values, tensors)
        if outer is None:
            training.apply(tensors, means)
        else:
            names = [name for name in means if self._trained.is_trained(name)]
            training.apply(tensors, {name: mean for name, mean in means.items() if name not in self._trained.parameters})
            for name in names:
                training.reset_to_anchor_(name, tensors[name])
            outer.step({name: means[name] for name in names})
            training.set_anchors({name: tensors[name] for name in names})
        training.set_anchor_plus_(tensors, moves)
        self._residuals_in_parameters = False
        if cost is not None:
            self._stats.add(cost)

    @torch.no_grad()
    def sync_without_steps(self, transport: Transport) -> None:
        """Let all ranks have the same parameters where none took a step since the last sync; refuse it where they have not."""
        if not self.names:
            return
        self._check_new_anchors(transport)
        is_changed = self._versions is None or self._versions != self._versions_now()
        if is_changed and self._versions is not None and self._residuals_in_parameters:
            warn(_CHANGED, stacklevel=3)
        self.move_residuals_out_of_parameters()
        is_same = are_equal(b"changed" if is_changed else b"unchanged", transport)
        if is_changed or not is_same:
            views = self._views()
            check_equal(list(views), map(_digest, views.values()), transport, self.training.all_steps, synced=True)

    def remember_versions(self) -> None:
        """Remember the parameters of a sync, to tell whether something else than steps has changed them when the next one comes."""
        self._versions = None if self.training.steps else self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        """Return by name how often parameters were written to."""
        return {name: parameter._version for name, parameter in self._trained.parameters.items() if name in self.names}

    # What was not sent

    @torch.no_grad()
    def move_residuals_into_parameters(self) -> None:
        """After a sync, if they belong there and no exchange is under way."""
        if self._keeps_residuals_in_parameters and not self._residuals_in_parameters and self._pending is None:
            self.training.move_residuals_into_(self._views(frozen=False))
            self._residuals_in_parameters = True

    @torch.no_grad()
    def move_residuals_out_of_parameters(self) -> None:
        """If they are there."""
        if self._residuals_in_parameters:
            self.training.move_residuals_out_of_(self._views())
            self._residuals_in_parameters = False

    # Checks

    def _check_new_anchors(self, transport: Transport) -> None:
        """Compare anchors that were not compared yet with those of the other ranks; at the first sync, the gradients too."""
        if self._unchecked:
            if not self.training.syncs:
                self._warn_of_equal_gradients(transport)
            digests = [_digest(self.training.anchors[name]) for name in self._unchecked]
            check_equal(self._unchecked, digests, transport, self.training.all_steps)
            self._unchecked = []

    def _warn_of_equal_gradients(self, transport: Transport) -> None:
        """Warn where all ranks have the same gradients: they train on the same data, or something has averaged them."""
        if transport.size == 1:
            return
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
        own = b"".join(_digest(view("gradient", gradient)) for gradient in dense if gradient.any())  # zeros are the same on all ranks
        if are_equal(own, transport) and own:
            warn(
                "all ranks have the same gradients: if the model is under DDP, give LocalSteps the DDP model, or DDP still sends every "
                "gradient; else give each rank data of its own",
                stacklevel=2,
            )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what is not in the anchors and the memory.

        Waits for the exchange that is under way: its means are part of the state. One that failed is not: its change is sent next time.
        """
        training, pending, steps = self.training, self._pending, self.training.steps
        if pending is not None and pending.has_failed():
            steps += pending.steps
            pending = None
        return {
            "names": sorted(self.names),
            "steps": steps,
            "due_after": training.due_after,
            "syncs": training.syncs,
            "pending": None if pending is None else pending.state_dict(),
            "residuals_in_parameters": self._residuals_in_parameters,
        }

    @staticmethod
    def names_of(state: Any) -> list[str]:
        """Return the names of the tensors of a fragment in a state, which is checked as far as that."""
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            raise InputError(f"a fragment in a state of LocalSteps has the keys {', '.join(sorted(_KEYS))}")
        names = state["names"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(f"names of a state of LocalSteps are a list of strings, got {shown(names)}")
        return names

    def checked(self, state: Any, tensors: Mapping[str, Any], anchors: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state, of a run with these `tensors` and these `anchors`, and return what lets the fragment go on from it."""
        names = {name for name in self.names_of(state) if name in tensors}
        if state["residuals_in_parameters"] and not self._keeps_residuals_in_parameters:
            raise InputError('the parameters of this state hold what was not sent: it goes on with memory="parameters"')
        steps, due_after, syncs = (natural(state[key], f"{key} of a state") for key in ("steps", "due_after", "syncs"))
        pending = Pending.loaded(state["pending"], tensors)
        without = sorted(set(pending.values) - set(anchors)) if pending is not None else []
        if without:
            raise InputError(f"the state has a pending change of {without[0]}, but no anchor for it")

        def restore() -> None:
            training = self.training
            self.names, self.numel = names, sum(prod(tensors[name].shape) for name in names)
            training.anchors = {name: anchor for name, anchor in anchors.items() if name in names}
            training.steps, training.due_after, training.syncs = steps, due_after, syncs
            self._unchecked, self._pending = list(training.anchors), pending
            self._residuals_in_parameters = bool(state["residuals_in_parameters"])
            self._versions = None

        return restore


def _exchanged(
    training: LocalTraining, capture: Capture, transport: Transport, parameters: list[torch.nn.Parameter], ready: Callable[[], None]
) -> tuple[dict[str, Gradient], StepStats | None]:
    """Exchange a capture on another thread than the one that trains; a device has computed the means when this returns."""
    ready()
    with torch.no_grad():
        outcome = training.exchange(capture, transport)
    wait_for(parameters)()
    return outcome


def _digest(anchor: Any) -> bytes:
    return digest(to_numpy(anchor) if isinstance(anchor, torch.Tensor) else anchor)
