"""Training without exchanging gradients: the optimizer's own steps, and the mean of what they changed."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from math import prod
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
from ..step.local import LocalTraining, interval
from ..step.policy import BySize, ExceptDense, Spec, policy_at, policy_of, title
from ..step.recipes import local_settings
from ..step.reducer import Reducer
from ..step.residual import ResidualMemory
from ..step.stats import Stats
from ..step.threads import Threads
from ..step.topology import Topology
from ..step.transport import Transport
from ..step.worker import Worker
from .convert import mapped_to_numpy, mapped_to_torch
from .fragment import Fragment
from .hook import noop_hook
from .local_state import copied, loaded
from .names import unwrapped
from .outer import Outer, OuterOptimizer
from .skipped_steps import SkippedSteps
from .state import memory_named, topology_named
from .trained import Trained
from .transport import checked_timeout, connect, rank_and_size, without_group
from .views import view

_KEYS = {"exchange", "anchors", "outer", "fragments"}
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
      put under DDP will do: DDP then exchanges neither gradients nor buffers, which cannot be undone for that DDP model.
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
    - `fragments`: parts that the tensors are divided into, as equal in size as whole tensors allow; default 1, at most `every` and the
      number of tensors. Each has a sync after every `every` steps, but at another step than the others, so that the link is used more
      evenly, and a small `delay` hides more of it.
    - `bytes_per_step`: sets `every` to the shortest interval at which this rank's messages average about this many bytes per step. For
      specs whose size is known in advance (`none/all`, `topr`, `randomr`, `chunktopr`, and codecs of yours that have `expected_bits`).
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
        fragments: int = 1,
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
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"scaler is a torch.amp.GradScaler, got {shown(scaler)}")
        if topology == "dense":
            raise ConfigError("local steps without compression have the spec 'dense' and topology allgather, server or sharded")
        if every is not None and bytes_per_step is not None:
            raise ConfigError("give every, or bytes_per_step, which sets it")
        chosen = local_settings(recipe, spec=spec, every=every, memory=memory, small_tensor_numel=small_tensor_numel)
        self._trained = Trained(unwrapped(model), optimizer, buffers)
        policy = ExceptDense(policy_of(chosen.spec, chosen.small_tensor_numel), self._trained.averaged_buffers)
        shared, small_numel = Threads(threads), chosen.small_tensor_numel
        self._reducer = Reducer(policy, topology_named(topology), natural(seed, "a seed"), small_numel=small_numel, threads=shared)
        self._memory = memory_named(chosen.memory, _MEMORIES)
        self._outer = None if outer is None else Outer(outer)
        self._add(self._trained.new())
        within = None if bytes_per_step is None else steps_within(bytes_per_step, policy, self._trained.tensors())
        self._every = interval(chosen.every if within is None else within)
        self._delay = natural(delay, "delay")
        if self._delay >= self.every:
            raise ConfigError(f"delay is a number of steps below every, which is {self.every}; got {delay}")
        self._stats, self._process_group, self._timeout = Stats(history), process_group, checked_timeout(timeout)
        self._fragments = self._divided(natural(fragments, "fragments"), warmup, chosen.memory == "parameters")
        self._worker = Worker("deepreduce exchange")
        given = [(warmup, f"warmup {warmup}"), (delay, f"delay {delay}"), (fragments > 1, f"fragments {fragments}")]
        self._title = ", ".join(
            [title(chosen.spec), f"every {self.every}", *(text for is_given, text in given if is_given), self._reducer.topology.name]
        )
        self._transport: Transport | None = None
        if self._outer is not None and self._outer.has_momentum and _is_sparse(policy):
            advice = "use outer=None, or a spec that sends all values"
            warn(f"outer momentum overshoots with the sparse spec {title(chosen.spec)}: {advice}", stacklevel=2)
        self._follow(optimizer, scaler)
        at_exit = partial(_warn_if_not_synchronized, weakref.ref(self))
        atexit.register(at_exit)
        self._undo.append(partial(atexit.unregister, at_exit))
        if parallel is not None:
            self._disable_exchange_of(parallel)

    def _divided(self, fragments: int, warmup: int, unsent_in_parameters: bool) -> list[Fragment]:
        """Return fragments without tensors. They take turns: the first sync of the last one is after `every` steps, the others before."""
        most = min(self.every, max(1, len(self._trained.tensors())))
        if not 1 <= fragments <= most:
            raise ConfigError(f"fragments are at least 1 and at most {most}, by every and by the tensors that there are; got {fragments}")
        firsts = [(number + 1) * self.every // fragments for number in range(fragments)]
        trainings = [LocalTraining(self._reducer, self._memory, self.every, warmup=warmup, first=first) for first in firsts]
        return [Fragment(each, self._trained, self._outer, self._stats, unsent_in_parameters) for each in trainings]

    def _follow(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Be told of the steps of an optimizer, and of those that a scaler skips."""
        not_compiled = torch.compiler.disable  # the hooks are no part of a compiled step
        before, after = not_compiled(self._before_step), not_compiled(self._after_step)  # type: ignore[no-untyped-call]
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
        return self._every

    @property
    def syncs(self) -> int:
        """How many syncs there were; each is of one fragment."""
        return sum(fragment.training.syncs for fragment in self._fragments)

    @property
    def _steps(self) -> int:
        return self._fragments[0].training.all_steps

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer that takes a step with the mean change; None where the mean is applied."""
        return None if self._outer is None else self._outer.optimizer

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest syncs; each is of one fragment."""
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
        self._add(self._trained.new())
        if sum(len(fragment.training.anchors) for fragment in self._fragments) < len(self._trained.parameters):
            self._distribute()
            for fragment in self._fragments:
                fragment.add_anchors()

    def _distribute(self) -> None:
        """Give each tensor that is in no fragment yet to the smallest of them, the largest tensor first."""
        placed = {name for fragment in self._fragments for name in fragment.names}
        sizes = {name: prod(tensor.shape) for name, tensor in self._trained.tensors().items() if name not in placed}
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            min(self._fragments, key=lambda fragment: fragment.numel).add(name, sizes[name])

    def _after_step(self, *_: Any) -> None:
        due = [fragment for fragment in self._fragments if fragment.training.count_step()]
        for fragment in self._fragments:
            if fragment in due or fragment.training.steps >= self._delay:
                fragment.finish()
        for fragment in due:
            if self._delay and fragment.names and not fragment.training.is_warming_up:
                fragment.begin(self._worker, self.transport)
            else:
                self._finish()  # a state may have been loaded with exchanges under way
                fragment.sync(self.transport)
        for fragment in self._fragments:
            fragment.move_residuals_into_parameters()
            fragment.remember_versions()

    def _finish(self) -> None:
        for fragment in self._fragments:
            fragment.finish()

    def sync(self) -> None:
        """Bring all ranks to the same parameters now, such as before an evaluation: all ranks call it.

        Finishes the exchange that is under way, and then exchanges what was done since it began. All ranks have taken equally many steps,
        as under DDP: a `PeerError` says where they have not. Where no step was taken since the last sync, nothing is sent, but the ranks
        compare whether something else has changed their parameters: a `PeerError` says so.
        """
        if self._is_closed:
            raise InputError("these LocalSteps are closed: call sync() before close()")
        self._before_step()
        self._finish()
        for fragment in self._fragments:
            if fragment.training.steps:
                fragment.sync(self.transport)
            else:
                fragment.sync_without_steps(self.transport)
            fragment.training.restart()
            fragment.remember_versions()

    def _add(self, new: Mapping[str, torch.nn.Parameter]) -> None:
        """Train these parameters too."""
        if new and self._outer is not None:
            self._outer.add(new)
        self._trained.add(new)

    def _disable_exchange_of(self, parallel: DistributedDataParallel) -> None:
        """Let DDP exchange neither gradients nor buffers, unless other `LocalSteps`, which were closed, did so."""
        if parallel in _WITHOUT_EXCHANGE:
            return
        try:
            parallel.register_comm_hook(None, noop_hook)
        except RuntimeError as error:
            self._disconnect()
            raise ConfigError("the DDP model has a communication hook, which would exchange gradients: give one without a hook") from error
        parallel.broadcast_buffers = False
        _WITHOUT_EXCHANGE.add(parallel)

    def _count_skipped_step(self) -> None:
        self._before_step()
        self._after_step()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, also between two syncs; every rank has its own, beside its model and optimizer.

        Waits for the exchange that is under way, whose means are part of the state. Loads with `torch.load(..., weights_only=True)`.
        """
        fragments = [fragment.state_dict() for fragment in self._fragments]
        checkpoint = Checkpoint.of(self._steps, self._reducer, self._memory, *rank_and_size(self._process_group))
        return {
            "exchange": mapped_to_torch(checkpoint.write()),
            "anchors": copied({name: anchor for fragment in self._fragments for name, anchor in fragment.training.anchors.items()}),
            "outer": None if self.outer is None else self.outer.state_dict(),
            "fragments": fragments,
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
        if not isinstance(state["anchors"], Mapping) or not isinstance(state["fragments"], list):
            raise InputError("a state of LocalSteps has anchors by name, and a list of fragments")
        if len(state["fragments"]) != len(self._fragments):
            raise InputError(f"the state was made with fragments={len(state['fragments'])}, here it is {len(self._fragments)}")
        named = [name for saved in state["fragments"] for name in Fragment.names_of(saved)]
        if len(set(named)) < len(named):
            raise InputError("a tensor is in two fragments of the state")
        new = self._trained.new(also=state["anchors"])  # also those that were frozen since
        tensors = self._trained.tensors() | {name: view(name, parameter) for name, parameter in new.items()}
        checkpoint = Checkpoint.read(mapped_to_numpy(state["exchange"]))
        checkpoint.expect(self._reducer, *rank_and_size(self._process_group), list(tensors))
        anchors = loaded(state["anchors"], tensors)
        pairs = zip(self._fragments, state["fragments"], strict=True)
        restores = [fragment.checked(saved, tensors, anchors) for fragment, saved in pairs]
        self._wait()
        self._add(new)
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        checkpoint.restore(self._memory)
        for fragment, restore in zip(self._fragments, restores, strict=True):
            restore()
            fragment.training.all_steps = checkpoint.step
        self._distribute()  # such as buffers that were kept where the state was made

    # Life

    def close(self) -> None:
        """Remove the hooks from the optimizer, wait for a running exchange, and close the connections; the parameters stay as they are.

        Call `sync()` before, so that all ranks end with the same parameters; there is a warning where they do not.
        """
        self._wait()
        if not (self._is_closed or self._is_synchronized):
            warn("closed between two syncs, with other parameters on each rank: call sync() on all ranks before close()", stacklevel=2)
        self._disconnect()

    @property
    def _is_synchronized(self) -> bool:
        """Whether all ranks have the same parameters, as far as this one knows."""
        is_alone = self._transport is None or self._transport.size == 1
        return is_alone or all(fragment.is_synchronized for fragment in self._fragments)

    def _wait(self) -> None:
        for fragment in self._fragments:
            fragment.wait()

    def _disconnect(self) -> None:
        self._is_closed = True
        for undo in self._undo:
            undo()
        self._undo = []
        if self._transport is not None:
            self._transport.close()
        self._worker.close()
        self._reducer.threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._disconnect()  # others may have failed too, and not come


def _warn_if_not_synchronized(reference: weakref.ref[LocalSteps]) -> None:
    """At the end of the program, say so if the parameters of this rank are its own."""
    local = reference()
    if local is not None and not local._is_synchronized:
        warn(
            "the program ends between two syncs, with other parameters on each rank: call sync() and then close() on all ranks",
            stacklevel=1,
        )


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
    """Return the model if it is one of DDP. Refuse one inside another model."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"LocalSteps takes the model first, then its optimizer; got {shown(model)}")
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if not inside:
        return None
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"LocalSteps takes a DDP model itself, or a model without DDP; got {type(model).__name__} around one of DDP")
    return model


def _is_sparse(policy: ExceptDense) -> bool:
    """Whether large tensors go by a sparsifier that leaves something out; unknown policies count as dense."""
    large = policy_at(policy.policy, 2**62)
    return isinstance(large, BySize) and not large.large.sparsifier.lossless
