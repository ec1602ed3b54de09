"""Training without exchanging gradients: the optimizer's own steps, and the mean of what they changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self
from warnings import warn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import ConfigError, InputError
from ..parameters import natural, shown
from ..step.arrays import arrays_of
from ..step.budget import steps_within
from ..step.checkpoint import Checkpoint
from ..step.local import Capture, LocalTraining, check_equal, digest
from ..step.policy import BySize, ExceptDense, Spec, policy_at, policy_of, title
from ..step.recipes import LOCAL_RECIPES, local_recipe
from ..step.reducer import Reducer
from ..step.residual import Gradient, ResidualMemory
from ..step.stats import Stats, StepStats
from ..step.threads import Threads
from ..step.topology import Topology
from ..step.transport import Transport
from ..step.worker import Worker
from .convert import mapped_to_numpy, mapped_to_torch, to_numpy
from .hook import noop_hook
from .names import plain_names, unwrapped
from .outer import Outer, OuterOptimizer
from .state import memory_named, topology_named
from .transport import connect, rank_and_size, without_group
from .views import view, wait_for

_KEYS = {"exchange", "anchors", "steps", "outer", "pending", "residuals_in_parameters"}
_PENDING_KEYS = {"means", "values"}
_MEMORIES = ("residual", "parameters", "none")
_TAKING_LOCAL_STEPS: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_WITHOUT_EXCHANGE: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class _Pending:
    """An exchange beside local steps: its means and cost (None after a restart), and the values of the parameters that it began with."""

    outcome: Future[tuple[dict[str, Gradient], StepStats | None]]
    values: Mapping[str, Any]


class LocalSteps:
    """Lets every rank take its own optimizer steps, and after every `every` of them applies the compressed mean of what they changed.

    For any optimizer; the loop stays as it is. DDP is not needed. At a sync, the change of the parameters since the last one is compressed
    with error feedback and exchanged, and its mean is applied to the parameters of the last sync, the anchor, which is the same on all
    ranks, bit for bit. All ranks go on from it, unless `memory` says otherwise. ``every=1`` is compressed data parallelism for optimizers
    such as Adam, which compressed gradients slow down; ``every=30`` with an `outer` optimizer is DiLoCo.

    - `model`: the module that is trained; it gives parameters their names. All ranks start with equal parameters. A model that a tool has
      put under DDP will do: DDP then exchanges no gradients, which cannot be undone for that DDP model.
    - `optimizer`: the optimizer of the loop. Its parameters are exchanged; groups may be added later.
    - `spec`: a spec string, a `DeepReduce`, a `Schedule`, or an object with `codec_for(name, source)`; or leave it to a `recipe`.
    - `every`: steps between two syncs; default 1.
    - `warmup`: the first steps, after each of which there is a sync, without delay or outer optimizer; default 0.
    - `outer`: None, the default, applies the mean. An optimizer of the same parameters, or what makes one of a list of
      parameters, takes a step from the last sync with the mean change as gradient, such as
      ``torch.optim.SGD(model.parameters(), 0.7, momentum=0.6, nesterov=True)``.
    - `delay`: how many local steps the exchange of a sync runs beside, below `every`; default 0: the sync waits for it. The change is
      taken after `every` steps, and its mean is applied `delay` steps later: the parameters become the new anchor plus what this rank did
      meanwhile, which is part of the next change. All ranks then have the same anchor bit for bit, and the same parameters after `sync()`.
      An error of the exchange is raised in the step that would apply the mean.
    - `bytes_per_step`: sets `every` to the shortest interval at which this rank's messages average about this many bytes per step. For
      specs whose size is known in advance (`none/all`, `topr`, `randomr`, `chunktopr`).
    - `recipe`: ``"adam"`` sets `spec`, `every` and `memory` to what was measured to be best; what is given replaces its part.
    - `buffers`: ``"mean"`` averages buffers of floats (batch norm) at every sync, uncompressed, ``"keep"`` leaves each rank its own.
      Buffers that begin with an infinity (attention masks) are always kept.
    - `memory`: ``"residual"``, the default without a recipe, keeps what was not sent beside the parameters, which are equal on all ranks
      after every sync. ``"parameters"`` keeps it in them: each rank goes on from the common anchor plus its own change that was not sent
      yet. Where a spec leaves out much of a change, this trains better. Parameters are then equal on all ranks after `sync()` alone: call
      it before an evaluation and at the end. ``"none"`` drops what was not sent; a `ResidualMemory` has a decay.
    - `scaler`: the `GradScaler` of the loop: steps that it skips on one rank then count there too, so that ranks stay in step.
    - `topology`, `small_tensor_numel`, `process_group`, `threads`, `seed`, `timeout`, `history`: as for `DeepReduceState`.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with LocalSteps(model, optimizer, "topr:0.1/rice/qsgd", every=5) as local:
    ...     for _ in range(10):
    ...         model(torch.ones(3)).backward()
    ...         optimizer.step()
    ...     local.syncs
    2
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        spec: Spec | None = None,
        every: int | None = None,
        outer: OuterOptimizer | None = None,
        *,
        warmup: int = 0,
        delay: int = 0,
        bytes_per_step: float | None = None,
        recipe: str | None = None,
        buffers: Literal["mean", "keep"] = "mean",
        topology: str | Topology = "allgather",
        memory: Literal["residual", "parameters", "none"] | ResidualMemory | None = None,
        small_tensor_numel: int = 1024,
        process_group: dist.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        threads: int = 1,
        seed: int = 0,
        timeout: timedelta | None = None,
        history: int = 100,
    ) -> None:
        parallel = _parallel(model)
        if optimizer in _TAKING_LOCAL_STEPS:
            raise ConfigError("this optimizer takes local steps already: close() the other LocalSteps, or make a new optimizer")
        if buffers not in ("mean", "keep"):
            raise ConfigError(f"buffers are 'mean' or 'keep', got {shown(buffers)}")
        if topology == "dense":
            raise ConfigError("local steps without compression have the spec 'dense' and topology allgather, server or sharded")
        if recipe is None and spec is None:
            raise ConfigError(f"give a spec, or a recipe: {', '.join(LOCAL_RECIPES)}")
        if every is not None and bytes_per_step is not None:
            raise ConfigError("give every, or bytes_per_step, which sets it")
        if recipe is not None:
            chosen = local_recipe(recipe)
            spec, every = chosen.spec if spec is None else spec, chosen.every if every is None else every
            memory = chosen.memory if memory is None else memory
        memory = "residual" if memory is None else memory
        assert spec is not None
        self._model = unwrapped(model)
        self._optimizer = optimizer
        self._averaged = _averaged_buffers(self._model) if buffers == "mean" else frozenset()
        policy = ExceptDense(policy_of(spec, small_tensor_numel), self._averaged)
        shared = Threads(threads)
        reducer = Reducer(policy, topology_named(topology), natural(seed, "a seed"), small_numel=small_tensor_numel, threads=shared)
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._unchecked: list[str] = []
        self._outer = None if outer is None else Outer(outer)
        self._add_new_parameters()
        every = every if bytes_per_step is None else steps_within(bytes_per_step, policy, self._tensors())
        self._unsent_in_parameters = memory == "parameters"
        self._residuals_beside = False  # with the above: they are to be moved into the parameters after the next step
        held = memory_named(memory, _MEMORIES)
        self._training = LocalTraining(reducer, held, 1 if every is None else every, warmup=warmup)
        self._delay = natural(delay, "delay")
        if self._delay >= self.every:
            raise ConfigError(f"delay is a number of steps below every, which is {self.every}; got {delay}")
        self._worker = Worker("deepreduce exchange")
        self._pending: _Pending | None = None
        self._title = f"{title(spec)}, every {self.every}"
        self._title += f"{f', warmup {warmup}' if warmup else ''}{f', delay {delay}' if delay else ''}, {reducer.topology.name}"
        self._stats, self._process_group, self._timeout = Stats(history), process_group, timeout
        self._transport: Transport | None = None
        self._steps_seen = 0
        if self._outer is not None and self._outer.has_momentum and _is_sparse(policy):
            warn(
                f"outer momentum overshoots with the sparse spec {title(spec)}: use outer=None, or a spec that sends all values",
                stacklevel=2,
            )
        apart = torch.compiler.disable  # the hooks are no part of a compiled step
        before, after = apart(self._before_step), apart(self._after_step)  # type: ignore[no-untyped-call]
        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        self._undo: list[Callable[[], object]] = [hook.remove for hook in hooks]
        _TAKING_LOCAL_STEPS.add(optimizer)
        self._undo.append(partial(_TAKING_LOCAL_STEPS.discard, optimizer))
        if scaler is not None:
            self._undo.append(_CountedSteps.on(scaler).add(self))
        if parallel is not None:
            self._disable_gradient_exchange(parallel)

    def __repr__(self) -> str:
        return f"LocalSteps({self._title})"

    @property
    def every(self) -> int:
        """How many steps lie between two syncs."""
        return self._training.every

    @property
    def syncs(self) -> int:
        """How many syncs there were."""
        return self._training.syncs

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer that takes a step with the mean change; None where the mean is applied."""
        return None if self._outer is None else self._outer.optimizer

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest syncs."""
        return self._stats

    @property
    def transport(self) -> Transport:
        """The other ranks: connected at first use."""
        if self._transport is None:
            if not dist.is_initialized():
                return without_group()  # not kept, as a process group may come
            self._transport = connect(self._process_group, self._timeout)
            weakref.finalize(self, self._transport.close).atexit = False
        return self._transport

    # Steps and syncs

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        self._add_new_parameters()
        if len(self._training.anchors) < len(self._parameters):
            self._unchecked += self._training.add_anchors(self._parameter_views())

    def _after_step(self, *_: Any) -> None:
        self._steps_seen += 1
        due = self._training.is_due()
        if self._training.steps >= self._delay:
            self._finish()
        if due and self._delay and not self._training.is_warming_up:
            self._begin()
        elif due:
            self._finish()  # one that was loaded
            self._sync()
        if self._residuals_beside and self._pending is None:
            self._move_residuals_into_parameters()

    def sync(self) -> None:
        """Bring all ranks to the same parameters now, such as before an evaluation: all ranks call it. After a sync it sends nothing.

        Finishes the exchange that is under way, and then exchanges what was done since it began. With ``memory="parameters"`` the
        parameters become those of the last sync, also where they were set from outside since then.
        """
        self._finish()
        if self._training.steps:
            self._sync()
        elif self._unsent_in_parameters and not self._residuals_beside:
            self._reset_to_anchors()

    @torch.no_grad()
    def _sync(self) -> None:
        self._check_new_anchors()
        outer = None if self._training.is_warming_up else self._outer
        self._apply(*self._training.sync(self._tensors(), self.transport), {}, outer)

    @torch.no_grad()
    def _begin(self) -> None:
        """Let the worker exchange the change; local steps go on beside it."""
        self._check_new_anchors()
        parameters, capture = list(self._parameters.values()), self._training.capture(self._tensors())
        work = partial(_exchanged, self._training, capture, self.transport, parameters, wait_for(parameters))
        self._pending = _Pending(self._worker.submit(work), capture.values)
        self._training.steps = 0

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the exchange that is under way and apply its means; an error of it is raised here, and its change is sent next time."""
        if self._pending is None:
            return
        pending = self._pending
        try:
            means, cost = pending.outcome.result()
        except Exception:
            self._pending = None
            raise
        self._pending = None
        self._training.syncs += 1
        self._apply(means, cost, pending.values, self._outer)

    def _apply(self, means: Mapping[str, Gradient], cost: StepStats | None, values: Mapping[str, Any], outer: Outer | None) -> None:
        """Move the anchors by the means, and the parameters with them; what was added to parameters since they had `values` stays."""
        training, tensors = self._training, self._tensors()
        moves = training.local_change(values, tensors)
        if outer is None:
            training.apply(tensors, means)
        else:
            names = [name for name in means if name in self._parameters]
            training.apply(tensors, {name: mean for name, mean in means.items() if name not in self._parameters})
            for name in names:
                training.reset_to_anchor_(name, tensors[name])
            outer.step({name: means[name] for name in names})
            training.set_anchors({name: tensors[name] for name in names})
        training.set_anchor_plus_(tensors, moves)
        self._residuals_beside = self._unsent_in_parameters
        if cost is not None:
            self._stats.add(cost)

    @torch.no_grad()
    def _move_residuals_into_parameters(self) -> None:
        views = self._parameter_views()
        self._training.move_residuals_into_({name: views[name] for name, each in self._parameters.items() if each.requires_grad})
        self._residuals_beside = False

    @torch.no_grad()
    def _reset_to_anchors(self) -> None:
        self._training.reset_to_anchors_(self._parameter_views())
        self._residuals_beside = True

    def _check_new_anchors(self) -> None:
        """Compare anchors that were not compared yet with those of the other ranks."""
        if self._unchecked:
            digests = [_digest(self._training.anchors[name]) for name in self._unchecked]
            check_equal(self._unchecked, digests, self.transport, self._training.syncs)
            self._unchecked = []

    def _add_new_parameters(self) -> None:
        """Add parameters that are new: at the start, from a group that was added, or no longer frozen."""
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter) for parameter in self._parameters.values()}
        new = [parameter for parameter in listed if parameter.requires_grad and id(parameter) not in known]
        if not new:
            return
        names = {id(parameter): name for name, parameter in plain_names(self._model.named_parameters()).items()}
        for parameter in new:
            if id(parameter) not in names:
                raise ConfigError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of the model")
        named = {names[id(parameter)]: parameter for parameter in new}
        self._parameters.update(named)
        if self._outer is not None:
            self._outer.add(named)

    def _tensors(self) -> dict[str, Any]:
        """All that is exchanged, by name: the parameters in the order of the optimizer, then the buffers."""
        buffers = {name: buffer for name, buffer in _float_buffers(self._model).items() if name in self._averaged}
        return self._parameter_views() | {name: view(name, buffer) for name, buffer in buffers.items()}

    def _parameter_views(self) -> dict[str, Any]:
        return {name: view(name, parameter) for name, parameter in self._parameters.items()}

    def _disable_gradient_exchange(self, parallel: DistributedDataParallel) -> None:
        """Let DDP exchange no gradients, unless other `LocalSteps`, which were closed, did so."""
        if parallel in _WITHOUT_EXCHANGE:
            return
        try:
            parallel.register_comm_hook(None, noop_hook)
        except RuntimeError as error:
            self._disconnect()
            raise ConfigError("the DDP model has a communication hook, which would exchange gradients: give one without a hook") from error
        _WITHOUT_EXCHANGE.add(parallel)

    def _count_skipped_step(self) -> None:
        self._before_step()
        self._after_step()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, also between two syncs; every rank has its own, beside its model and optimizer.

        Waits for the exchange that is under way, whose means are part of the state. Loads with `torch.load(..., weights_only=True)`.
        """
        pending = None if self._pending is None else {"means": self._pending.outcome.result()[0], "values": self._pending.values}
        training = self._training
        checkpoint = Checkpoint.of(training.syncs, training.reducer, training.memory, *rank_and_size(self._process_group))
        return {
            "exchange": mapped_to_torch(checkpoint.write()),
            "anchors": _copied(training.anchors),
            "steps": training.steps,
            "outer": None if self.outer is None else self.outer.state_dict(),
            "pending": None if pending is None else {key: _copied(table) for key, table in pending.items()},
            "residuals_in_parameters": self._unsent_in_parameters and not self._residuals_beside,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same rank: what follows has the same bits as without the interruption.

        Load the model and its optimizer too, each rank its own. A state that does not fit changes nothing.
        """
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise InputError(f"a state of LocalSteps has the keys {', '.join(sorted(_KEYS))}; got {found}")
        if (state["outer"] is None) != (self.outer is None):
            raise InputError(f"the state was made {'without' if state['outer'] is None else 'with'} an outer optimizer, this one is not")
        if state["residuals_in_parameters"] and not self._unsent_in_parameters:
            raise InputError('the parameters of this state hold what was not sent: it goes on with memory="parameters"')
        self._add_new_parameters()
        training, tensors = self._training, self._tensors()
        checkpoint = Checkpoint.read(mapped_to_numpy(state["exchange"]))
        checkpoint.expect(training.reducer, *rank_and_size(self._process_group), list(tensors))
        anchors, pending = _loaded(state["anchors"], tensors), _loaded_pending(state["pending"], tensors)
        steps = natural(state["steps"], "the steps of a state")
        without = sorted(set(pending.values) - set(anchors)) if pending is not None else []
        if without:
            raise InputError(f"the state has a pending change of {without[0]}, but no anchor for it")
        self._wait()
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        training.load(checkpoint, anchors, steps)
        self._unchecked, self._pending = list(anchors), pending
        self._residuals_beside = self._unsent_in_parameters and not state["residuals_in_parameters"]

    # Life

    def close(self) -> None:
        """Remove the hooks from the optimizer, wait for a running exchange, and close the connections; the parameters stay as they are.

        With `delay` or ``memory="parameters"``, call `sync()` before, so that ranks end with the same parameters.
        """
        self._wait()
        self._disconnect()

    def _wait(self) -> None:
        """Wait until no exchange is under way, whether or not it went well."""
        if self._pending is not None:
            wait([self._pending.outcome])

    def _disconnect(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        if self._transport is not None:
            self._transport.close()
        self._worker.close()
        self._training.reducer.threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._disconnect()  # others may have failed too, and not come


class _CountedSteps:
    """Stands in for `GradScaler.step`, and counts the steps that it skips for all `LocalSteps` of their optimizers.

    A skipped step does not call the optimizer. One object serves a scaler, so that its `LocalSteps` may be closed in any order.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler, self._step = scaler, scaler.step
        self._replaced = {name: own for name, own in vars(scaler).items() if name == "step"}
        self._counting: list[LocalSteps] = []

    @classmethod
    def on(cls, scaler: torch.amp.GradScaler) -> _CountedSteps:
        """Return the object that stands on a scaler; put one there if there is none."""
        if not isinstance(vars(scaler).get("step"), cls):
            vars(scaler)["step"] = cls(scaler)
        standing: _CountedSteps = vars(scaler)["step"]
        return standing

    def add(self, local: LocalSteps) -> Callable[[], object]:
        """Count for this one too; return what ends that."""
        self._counting.append(local)
        return partial(self._remove, local)

    def _remove(self, local: LocalSteps) -> None:
        self._counting.remove(local)
        if not self._counting and vars(self._scaler).get("step") is self:
            del vars(self._scaler)["step"]  # what the class has shows again
            vars(self._scaler).update(self._replaced)

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = [(local, local._steps_seen) for local in self._counting if local._optimizer is optimizer]
        result = self._step(optimizer, *args, **kwargs)
        for local, seen in before:
            if local._steps_seen == seen:
                local._count_skipped_step()
        return result


def _exchanged(
    training: LocalTraining, capture: Capture, transport: Transport, parameters: list[torch.nn.Parameter], ready: Callable[[], None]
) -> tuple[dict[str, Gradient], StepStats | None]:
    """Exchange a capture on another thread than the one that trains; a device has computed the means when this returns."""
    ready()
    with torch.no_grad():
        outcome = training.exchange(capture, transport)
    wait_for(parameters)()
    return outcome


def _parallel(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the model if it is one of DDP. Refuse one whose DDP would go on to exchange something."""
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not inside:
        return None
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"LocalSteps takes a DDP model itself, or a model without DDP; got {type(model).__name__} around one of DDP")
    if model.broadcast_buffers and any(True for _ in model.buffers()):
        raise ConfigError("DDP would broadcast the buffers in every forward pass: make it with broadcast_buffers=False for local steps")
    return model


def _averaged_buffers(model: torch.nn.Module) -> frozenset[str]:
    """Return the buffers that have a mean: one that begins with an infinity is a mask, not something that training changes."""
    return frozenset(name for name, buffer in _float_buffers(model).items() if bool(torch.isfinite(buffer).all()))


def _float_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in plain_names(model.named_buffers()).items() if buffer.is_floating_point() and buffer.numel()}


def _is_sparse(policy: ExceptDense) -> bool:
    """Whether large tensors go by a sparsifier that leaves something out; unknown policies count as dense."""
    large = policy_at(policy.policy, 2**62)
    return isinstance(large, BySize) and not large.large.sparsifier.lossless


def _digest(anchor: Any) -> bytes:
    return digest(to_numpy(anchor) if isinstance(anchor, torch.Tensor) else anchor)


def _copied(table: Mapping[str, Any]) -> Any:
    """Return copies of arrays by name, as tensors."""
    return mapped_to_torch({name: arrays_of(array).copy(array) for name, array in table.items()})


def _loaded(held: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of a state as copies, on the devices of the tensors that it belongs to."""
    table = mapped_to_numpy(held)
    for name, array in table.items():
        if name not in tensors or tuple(array.shape) != tuple(tensors[name].shape):
            raise InputError(f"the state has {name} of shape {tuple(array.shape)}, which the model has not")
    return {name: arrays_of(tensors[name]).copy(arrays_of(tensors[name]).moved(array, tensors[name])) for name, array in table.items()}


def _loaded_pending(state: Any, tensors: Mapping[str, Any]) -> _Pending | None:
    """Return the exchange that had ended when a state was made, and was not applied yet."""
    if state is None:
        return None
    if not isinstance(state, Mapping) or set(state) != _PENDING_KEYS:
        raise InputError(f"what is pending in a state of LocalSteps has the keys {', '.join(sorted(_PENDING_KEYS))}, or is None")
    outcome: Future[tuple[dict[str, Gradient], StepStats | None]] = Future()
    outcome.set_result((_loaded(state["means"], tensors), None))
    return _Pending(outcome, _loaded(state["values"], tensors))
