"""Training without exchanging gradients: the optimizer's own steps, and the mean of what they changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
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
from ..step.budget import steps_within
from ..step.checkpoint import Checkpoint
from ..step.local import Capture, LocalTraining, are_equal, check_equal, digest
from ..step.policy import BySize, ExceptDense, Spec, policy_at, policy_of, title
from ..step.recipes import local_settings
from ..step.reducer import Reducer
from ..step.residual import Gradient, ResidualMemory
from ..step.stats import Stats, StepStats
from ..step.threads import Threads
from ..step.topology import Topology
from ..step.transport import Transport
from ..step.worker import Worker
from .convert import mapped_to_numpy, mapped_to_torch, to_numpy
from .hook import noop_hook
from .local_state import Pending, copied, loaded
from .names import unwrapped
from .outer import Outer, OuterOptimizer
from .skipped_steps import SkippedSteps
from .state import memory_named, topology_named
from .trained import Trained
from .transport import checked_timeout, connect, rank_and_size, without_group
from .views import view, wait_for

_KEYS = {"exchange", "anchors", "steps", "syncs", "outer", "pending", "residuals_in_parameters"}
_MEMORIES = ("residual", "parameters", "none")
_TAKING_LOCAL_STEPS: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_WITHOUT_EXCHANGE: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


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
    - `recipe`: ``"adam"`` for adaptive optimizers, ``"sgd"`` for SGD with or without momentum: sets `spec`, `every`, `memory` and
      `small_tensor_numel` to what was measured to be best; what is given replaces its part.
    - `buffers`: ``"mean"`` averages buffers of floats (batch norm) at every sync, uncompressed, ``"keep"`` leaves each rank its own.
      Buffers that hold an infinity or a NaN at the start (attention masks) are always kept.
    - `memory`: ``"residual"``, the default without a recipe, keeps what was not sent beside the parameters, which are equal on all ranks
      after every sync. ``"parameters"`` keeps it in them: each rank goes on from the common anchor plus its own change that was not sent
      yet. Where a spec leaves out much of a change, this trains better. Parameters are then equal on all ranks after `sync()` alone: call
      it before an evaluation and at the end. ``"none"`` drops what was not sent; a `ResidualMemory` has a decay.
    - `scaler`: the `GradScaler` of the loop: steps that it skips on one rank then count there too, so that ranks stay in step.
    - `small_tensor_numel`: smaller tensors are sent as they are; default 1024.
    - `topology`, `process_group`, `threads`, `seed`, `timeout`, `history`: as for `DeepReduceState`.

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
        small_tensor_numel: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        threads: int = 1,
        seed: int = 0,
        timeout: timedelta | None = None,
        history: int = 100,
    ) -> None:
        parallel = _parallel(model)
        _check_optimizer(optimizer)
        if topology == "dense":
            raise ConfigError("local steps without compression have the spec 'dense' and topology allgather, server or sharded")
        if every is not None and bytes_per_step is not None:
            raise ConfigError("give every, or bytes_per_step, which sets it")
        chosen = local_settings(recipe, spec=spec, every=every, memory=memory, small_tensor_numel=small_tensor_numel)
        self._trained = Trained(unwrapped(model), optimizer, buffers)
        policy = ExceptDense(policy_of(chosen.spec, chosen.small_tensor_numel), self._trained.averaged_buffers)
        shared, small_numel = Threads(threads), chosen.small_tensor_numel
        reducer = Reducer(policy, topology_named(topology), natural(seed, "a seed"), small_numel=small_numel, threads=shared)
        self._outer = None if outer is None else Outer(outer)
        self._unchecked: list[str] = []
        self._add_new_parameters()
        every = chosen.every if bytes_per_step is None else steps_within(bytes_per_step, policy, self._trained.tensors())
        self._unsent_in_parameters = chosen.memory == "parameters"
        self._residuals_beside = False  # with the above: they are to be moved into the parameters after the next step
        self._training = LocalTraining(reducer, memory_named(chosen.memory, _MEMORIES), every, warmup=warmup)
        self._delay = natural(delay, "delay")
        if self._delay >= self.every:
            raise ConfigError(f"delay is a number of steps below every, which is {self.every}; got {delay}")
        self._worker = Worker("deepreduce exchange")
        self._pending: Pending | None = None
        extras = [f"{name} {steps}" for name, steps in (("warmup", warmup), ("delay", delay)) if steps]
        self._title = ", ".join([title(chosen.spec), f"every {self.every}", *extras, reducer.topology.name])
        self._stats, self._process_group, self._timeout = Stats(history), process_group, checked_timeout(timeout)
        self._transport: Transport | None = None
        if self._outer is not None and self._outer.has_momentum and _is_sparse(policy):
            advice = "use outer=None, or a spec that sends all values"
            warn(f"outer momentum overshoots with the sparse spec {title(chosen.spec)}: {advice}", stacklevel=2)
        self._follow(optimizer, scaler)
        if parallel is not None:
            self._disable_gradient_exchange(parallel)

    def _follow(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Be told of the steps of an optimizer, and of those that a scaler skips."""
        apart = torch.compiler.disable  # the hooks are no part of a compiled step
        before, after = apart(self._before_step), apart(self._after_step)  # type: ignore[no-untyped-call]
        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        self._is_closed = False
        self._undo: list[Callable[[], object]] = [hook.remove for hook in hooks]
        _TAKING_LOCAL_STEPS.add(optimizer)
        self._undo.append(partial(_TAKING_LOCAL_STEPS.discard, optimizer))
        if scaler is not None:
            self._undo.append(SkippedSteps.of(scaler).add(optimizer, self._count_skipped_step))

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
        if len(self._training.anchors) < len(self._trained.parameters):
            self._unchecked += self._training.add_anchors(self._trained.parameter_views())

    def _after_step(self, *_: Any) -> None:
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

        Finishes the exchange that is under way, and then exchanges what was done since it began. All ranks have taken equally many steps,
        as under DDP: a `PeerError` says where they have not. With ``memory="parameters"`` the parameters become those of the last sync,
        also where they were set from outside since then.
        """
        if self._is_closed:
            raise InputError("these LocalSteps are closed: call sync() before close()")
        self._finish()
        if self._training.steps:
            self._sync()
        elif self._unsent_in_parameters and not self._residuals_beside:
            self._move_residuals_out_of_parameters()

    @torch.no_grad()
    def _sync(self) -> None:
        self._check_new_anchors()
        outer = None if self._training.is_warming_up else self._outer
        self._apply(*self._training.sync(self._trained.tensors(), self.transport), {}, outer)

    @torch.no_grad()
    def _begin(self) -> None:
        """Let the worker exchange the change; local steps go on beside it."""
        self._check_new_anchors()
        parameters, capture = list(self._trained.parameters.values()), self._training.capture(self._trained.tensors())
        work = partial(_exchanged, self._training, capture, self.transport, parameters, wait_for(parameters))
        self._pending = Pending(self._worker.submit(work), capture.values)
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
        training, tensors = self._training, self._trained.tensors()
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
        self._residuals_beside = self._unsent_in_parameters
        if cost is not None:
            self._stats.add(cost)

    @torch.no_grad()
    def _move_residuals_into_parameters(self) -> None:
        self._training.move_residuals_into_(self._trained.parameter_views(frozen=False))
        self._residuals_beside = False

    @torch.no_grad()
    def _move_residuals_out_of_parameters(self) -> None:
        self._training.move_residuals_out_of_(self._trained.parameter_views())
        self._residuals_beside = True

    def _check_new_anchors(self) -> None:
        """Compare anchors that were not compared yet with those of the other ranks; at the first sync, the gradients too."""
        if self._unchecked:
            if not self._training.syncs:
                self._warn_of_equal_gradients()
            digests = [_digest(self._training.anchors[name]) for name in self._unchecked]
            check_equal(self._unchecked, digests, self.transport, self._training.all_steps)
            self._unchecked = []

    def _warn_of_equal_gradients(self) -> None:
        """Warn where all ranks have the same gradients: they train on the same data, or something has averaged them."""
        if self.transport.size == 1:
            return
        gradients = [parameter.grad for parameter in self._trained.parameters.values() if parameter.grad is not None]
        own = b"".join(_digest(view("gradient", gradient)) for gradient in gradients if gradient.layout == torch.strided)
        if are_equal(own, self.transport) and own:
            warn(
                "all ranks have the same gradients: if the model is under DDP, give LocalSteps the DDP model, or DDP still sends every "
                "gradient; else give each rank data of its own",
                stacklevel=2,
            )

    def _add_new_parameters(self, also: Collection[str] = ()) -> None:
        new = self._trained.add_new(also)
        if new and self._outer is not None:
            self._outer.add(new)

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
        pending = None if self._pending is None else self._pending.state_dict()
        training = self._training
        checkpoint = Checkpoint.of(training.all_steps, training.reducer, training.memory, *rank_and_size(self._process_group))
        return {
            "exchange": mapped_to_torch(checkpoint.write()),
            "anchors": copied(training.anchors),
            "steps": training.steps,
            "syncs": training.syncs,
            "outer": None if self.outer is None else self.outer.state_dict(),
            "pending": pending,
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
        self._add_new_parameters(also=state["anchors"])  # which has those that were frozen since
        training, tensors = self._training, self._trained.tensors()
        checkpoint = Checkpoint.read(mapped_to_numpy(state["exchange"]))
        checkpoint.expect(training.reducer, *rank_and_size(self._process_group), list(tensors))
        anchors, pending = loaded(state["anchors"], tensors), Pending.loaded(state["pending"], tensors)
        steps, syncs = natural(state["steps"], "the steps of a state"), natural(state["syncs"], "the syncs of a state")
        without = sorted(set(pending.values) - set(anchors)) if pending is not None else []
        if without:
            raise InputError(f"the state has a pending change of {without[0]}, but no anchor for it")
        self._wait()
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        training.load(checkpoint, anchors, steps, syncs)
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
        if self._pending is not None:
            self._pending.wait()

    def _disconnect(self) -> None:
        self._is_closed = True
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


def _exchanged(
    training: LocalTraining, capture: Capture, transport: Transport, parameters: list[torch.nn.Parameter], ready: Callable[[], None]
) -> tuple[dict[str, Gradient], StepStats | None]:
    """Exchange a capture on another thread than the one that trains; a device has computed the means when this returns."""
    ready()
    with torch.no_grad():
        outcome = training.exchange(capture, transport)
    wait_for(parameters)()
    return outcome


def _check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that takes local steps already, or that only passes steps on to another one.

    Hooks of the latter are never called. Seen in accelerate 1.15.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"LocalSteps follows the steps of a torch optimizer, got {type(optimizer).__name__}: where it wraps another one, give that "
            "(of Accelerate: optimizer.optimizer)"
        )
    if optimizer in _TAKING_LOCAL_STEPS:
        raise ConfigError("this optimizer takes local steps already: close() the other LocalSteps, or make a new optimizer")


def _parallel(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the model if it is one of DDP. Refuse one whose DDP would go on to exchange something."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"LocalSteps takes the model first, then its optimizer; got {shown(model)}")
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not inside:
        return None
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"LocalSteps takes a DDP model itself, or a model without DDP; got {type(model).__name__} around one of DDP")
    if model.broadcast_buffers and any(True for _ in model.buffers()):
        raise ConfigError("DDP would broadcast the buffers in every forward pass: make it with broadcast_buffers=False for local steps")
    return model


def _is_sparse(policy: ExceptDense) -> bool:
    """Whether large tensors go by a sparsifier that leaves something out; unknown policies count as dense."""
    large = policy_at(policy.policy, 2**62)
    return isinstance(large, BySize) and not large.large.sparsifier.lossless


def _digest(anchor: Any) -> bytes:
    return digest(to_numpy(anchor) if isinstance(anchor, torch.Tensor) else anchor)
