"""The state behind the hook: options, residuals, and what it cost. A step itself is `deepreduce.step.Reducer`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..parameters import natural
from ..step.checkpoint import Checkpoint
from ..step.exchange import ExchangeContext
from ..step.flush import move_owned_residuals
from ..step.frame import FrameTag
from ..step.policy import Spec, policy_of, title
from ..step.recipes import GRADIENT_RECIPES, gradient_recipe
from ..step.reducer import Bucket, ErrorFeedback, Prepared, Reducer
from ..step.residual import ResidualMemory
from ..step.stats import Stats, StepStats
from ..step.threads import Threads
from ..step.topology import AllGather, Topology, topology_of
from ..step.transport import Transport, close_unless_reported
from ..step.trial import SendMode, Trial, all_reduce_max
from ..step.worker import Worker
from .convert import mapped_to_numpy, mapped_to_torch
from .mean_buffers import MeanBuffers, Means
from .names import Names
from .transport import checked_timeout, connect, rank_and_size, without_group
from .views import view, wait_for, write_mean


class Scaler(Protocol):
    """What is used of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """Return the loss scale of this step."""
        ...


@dataclass(frozen=True)
class Options:
    """How a state was set up, apart from what is sent how."""

    process_group: dist.ProcessGroup | None
    scaler: Scaler | None
    timeout: timedelta | None
    dense: bool

    def __post_init__(self) -> None:
        checked_timeout(self.timeout)


class DeepReduceState:
    """Everything `deepreduce_hook` needs; give both to `DistributedDataParallel.register_comm_hook`.

    - `spec`: a spec string, a `DeepReduce`, a `Schedule`, or an object with `codec_for(name, source)` such as `BySize`.
    - `process_group`: who takes part; default all ranks. The state opens gloo connections of its own between them at the first step.
    - `topology`: ``"allgather"``, ``"server"``, ``"sharded"`` or a `Sharded(budget=...)`; ``"dense"`` is a plain allreduce.
    - `memory`: ``"residual"`` for error feedback (the default without a recipe), ``"none"``, or a `ResidualMemory` with decay and momentum.
    - `small_tensor_numel`: smaller tensors travel as they are. (An object with `codec_for` decides that itself.)
    - `per`: where top-r is taken, in each ``"parameter"`` or over a whole ``"bucket"``.
    - `recipe`: ``"sgd"`` is Deep Gradient Compression: a density that falls to 1% over 500 steps, and momentum correction, so that the
      optimizer itself has no momentum. A `spec` or a `memory` that is given replaces its part.
    - `model`: gives parameters their names in checkpoints, errors and tables; otherwise they are numbered.
    - `scaler`: a `GradScaler`, whose loss scale the error feedback then follows.
    - `never_slower`: time compressed steps, dense ones, dense ones in bfloat16 and, beside another topology, compressed ones by allgather,
      now and when the link changes, and send what is fastest; `stats().choice` says what and why. It depends on the clock: a run cannot be
      repeated bit by bit. In dense steps, gradients that a backward pass made anew lie in buffers that every step reuses, which saves DDP
      a copy: clone those that are to outlive the next backward pass.
    - `threads`: number of threads that encode and decode tensors in host memory, at most as many as this process may use cores; results do
      not depend on it. Default 1, as ranks often share a machine.
    - `seed`: of all that is drawn at random. `timeout`: of an exchange. `history`: steps of which `stats()` keeps the details.

    A state can be pickled and copied, before and between steps; the copy opens connections of its own. `close()`, or leaving a ``with``,
    ends its threads and connections.

    >>> with DeepReduceState("topr:0.01/raw/fp16") as state:
    ...     print(state)
    DeepReduceState(topr:0.01/raw/fp16, allgather, residual, per parameter from 1024 elements)
    """

    def __init__(
        self,
        spec: Spec | None = None,
        process_group: dist.ProcessGroup | None = None,
        topology: str | Topology = "allgather",
        memory: Literal["residual", "none"] | ResidualMemory | None = None,
        small_tensor_numel: int = 1024,
        per: Literal["parameter", "bucket"] = "parameter",
        *,
        recipe: str | None = None,
        model: torch.nn.Module | None = None,
        scaler: Scaler | None = None,
        never_slower: bool = False,
        threads: int = 1,
        seed: int = 0,
        timeout: timedelta | None = None,
        history: int = 100,
    ) -> None:
        if per not in ("parameter", "bucket"):
            raise ConfigError(f"per is 'parameter' or 'bucket', got {per!r}")
        if recipe is not None:
            chosen = gradient_recipe(recipe)
            spec, memory = chosen.schedule() if spec is None else spec, chosen.memory() if memory is None else memory
        memory = "residual" if memory is None else memory
        if spec is None:
            raise ConfigError(f"give a spec, or a recipe: {', '.join(GRADIENT_RECIPES)}")
        policy = policy_of(spec, small_tensor_numel)
        self.options = Options(process_group, scaler, timeout, topology == "dense")
        shared = Threads(threads)
        self.reducer = Reducer(policy, topology_named(topology), natural(seed, "a seed"), per, small_tensor_numel, threads=shared)
        self._without_owners = replace(self.reducer, topology=AllGather())
        self.memory = memory_named(memory)
        self.names = Names(model)
        self.step = 0
        self._title = f"{title(spec)}, {'dense' if self.options.dense else self.reducer.topology.name}, "
        self._title += f"{memory}, per {per} from {small_tensor_numel} elements"
        self._stats = Stats(history)
        own = self.memory.own
        if own is not None and own.momentum and (never_slower or self.options.dense):
            raise ConfigError(f"momentum belongs to what is sent compressed, and is lost in dense steps; got momentum {own.momentum}")
        if never_slower and self.options.dense:
            raise ConfigError("topology 'dense' leaves never_slower nothing to choose from: give the topology of compressed steps")
        if never_slower and per == "bucket" and self.reducer.topology.has_owners:
            raise ConfigError(f"never_slower with per='bucket' goes with topology 'allgather' only, got {self.reducer.topology.name!r}")
        self._trial = self._new_trial() if never_slower else None
        self._start()

    def _new_trial(self) -> Trial:
        """A trial of all modes; without owners there is one exchange less to wait for, which may be faster."""
        return Trial(modes=("compressed", "dense", "bf16", *(("allgather",) if self.reducer.topology.has_owners else ())))

    def _start(self) -> None:
        """Set up what a copy does not take over: threads, connections and buffers, which come when they are first needed."""
        self._encoding, self._exchanging = Worker("deepreduce encode"), Worker("deepreduce exchange")
        self._transport: Transport | None = None
        self._means = MeanBuffers()

    def __repr__(self) -> str:
        return f"DeepReduceState({self._title})"

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest steps."""
        return self._stats

    def bind(self, model: torch.nn.Module) -> None:
        """Take the names of parameters from this model, as the argument `model` does."""
        self.names.bind(model)

    def set_scaler(self, scaler: Scaler | None) -> None:
        """Follow the loss scale of this `GradScaler` from the next step on, as with the argument `scaler`; None for no loss scale."""
        self.options = replace(self.options, scaler=scaler)

    @property
    def transport(self) -> Transport:
        """The other ranks. Opened at first use, as a process group may not be there yet when a state is made."""
        if self._transport is None:
            if not dist.is_initialized():
                return without_group()  # not kept, as a process group may come
            self._transport = connect(self.options.process_group, self.options.timeout)
            weakref.finalize(self, self._transport.close).atexit = False
        return self._transport

    # Life

    def close(self) -> None:
        """End the threads and connections of this state; its residuals stay. The next step would open new ones."""
        self._encoding.close()
        self._exchanging.close()
        self.reducer.threads.close()
        if self._transport is not None:
            self._transport.close()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what `_start` sets up. A process group cannot be pickled; a copy in this process keeps it (see `__deepcopy__`)."""
        kept = {key: value for key, value in vars(self).items() if key not in ("_encoding", "_exchanging", "_transport", "_means")}
        options = self.options
        return kept | {"options": Options(None, None, options.timeout, options.dense)}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self._start()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepReduceState:
        from copy import deepcopy

        copied = object.__new__(DeepReduceState)
        memo[id(self)] = copied
        copied.__setstate__({key: deepcopy(value, memo) for key, value in self.__getstate__().items()} | {"options": self.options})
        return copied

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; every rank has its own. Loads with `torch.load(..., weights_only=True)`."""
        checkpoint = Checkpoint.of(self.step, self.reducer, self.memory, *rank_and_size(self.options.process_group))
        state: dict[str, Any] = mapped_to_torch(checkpoint.write())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same rank: the next step is the same, bit for bit, as without the interruption.

        `reshard` makes the states of all ranks into those of another number of ranks. A state that does not fit changes nothing.
        """
        checkpoint = Checkpoint.read(mapped_to_numpy(state))
        checkpoint.expect(self.reducer, *rank_and_size(self.options.process_group), self.names.known)
        checkpoint.restore(self.memory)
        self.step = checkpoint.step
        if self._trial is not None:
            self._trial = self._new_trial()

    # A step

    def next_mode(self) -> SendMode:
        """Return the mode of the step that is under way, the same on all ranks; may exchange timings with them."""
        if self._trial is None:
            return "dense" if self.options.dense else "compressed"
        mode = self._trial.next_mode(self.step, self._agreed)
        self._stats.choice = self._trial.choice
        return mode

    def means_for(self, bucket: dist.GradBucket, mode: SendMode) -> Means | None:  # type: ignore[name-defined]
        """Return where the mean of a bucket goes in this mode, for `never_slower`; None for the bucket's own buffer."""
        if mode == "dense" and self._trial is not None:
            return self._means.of(bucket)
        self._means.clear()
        return None

    def _agreed(self, numbers: list[float]) -> list[float]:
        return all_reduce_max(numbers, self.transport, FrameTag("the times of a trial", 0, self.step, 8 * len(numbers)))

    def follow_scale(self) -> None:
        """Bring the residuals to the loss scale of this step."""
        if self.options.scaler is not None:
            self.memory.rescale(self.options.scaler.get_scale())

    def reduce(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool = True, mode: SendMode = "compressed"
    ) -> Future[None]:
        """Replace each gradient by the mean over all ranks, off this thread.

        Buckets are exchanged in the order of these calls, the same on all ranks; one is encoded while the one before is exchanged.
        """
        bucket, reducer, context = self._begin(names, gradients, last, mode)
        prepared = self._encoding.submit(partial(self._prepare, reducer, bucket, context, wait_for(gradients)))
        return self._exchanging.submit(lambda: self._exchange(reducer, gradients, context, prepared.result))

    def reduce_now(self, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool = True, mode: SendMode = "compressed") -> None:
        """Replace each gradient by the mean over all ranks, on this thread."""
        bucket, reducer, context = self._begin(names, gradients, last, mode)
        self._exchange(reducer, gradients, context, partial(self._prepare, reducer, bucket, context, wait_for(gradients)))

    def end_step(self) -> None:
        """Close a step of which no bucket was the last one, when all its buckets are done."""
        self._stats.add(StepStats(self.step))
        self.step += 1

    def _begin(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool, mode: SendMode
    ) -> tuple[Bucket, Reducer, ExchangeContext]:
        """Return a bucket of torch tensors, who reduces it, and what its exchange needs."""
        bucket, reducer = Bucket(names, gradients, self.step, last), self._without_owners if mode == "allgather" else self.reducer
        context = reducer.context(bucket, self.memory, self.transport)
        self.step += 1 if last else 0
        return bucket, reducer, context

    def _prepare(self, reducer: Reducer, given: Bucket, context: ExchangeContext, ready: Callable[[], None]) -> Prepared:
        ready()
        tensors: Sequence[Any] = given.gradients
        bucket = Bucket(given.names, list(map(view, given.names, tensors)), given.step, given.last)
        if self.options.scaler is not None:
            self.follow_scale()
        if reducer is not self.reducer:
            rank, size = context.transport.rank, context.transport.size
            move_owned_residuals(self.memory, self.reducer.topology, bucket.names, bucket.gradients, rank, size)
        return reducer.prepare(bucket, self.memory, context)

    def _exchange(
        self, reducer: Reducer, gradients: Sequence[torch.Tensor], context: ExchangeContext, prepare: Callable[[], Prepared]
    ) -> None:
        """Exchange what `prepare` gives, and write the means over the gradients. All ranks are told of an error of it."""
        try:
            try:
                prepared = prepare()
            except Exception as error:
                reducer.report_failure(error, context)
            result, cost = reducer.exchange(prepared, self.memory, context)
        except BaseException as error:
            close_unless_reported(context.transport, error)
            raise
        start, means = perf_counter(), prepared.by_gradient(result.parts)
        seen, small = prepared.bucket.gradients, set[int]()
        if prepared.packed is not None:
            prepared.packed.fill_(seen, means, result.divisor)
            small.update(prepared.packed.indices)
        for index, gradient in enumerate(gradients):
            if index not in small:
                write_mean(gradient, seen[index], means[index], result.divisor)
        context.watch.add("decode", start)
        cost.decode_seconds = context.watch.seconds["decode"]
        self._stats.add(cost, prepared.bucket.last)


def topology_named(topology: str | Topology) -> Topology:
    """Return a topology by its name; ``"dense"`` has the accounting of an allgather."""
    return AllGather() if topology == "dense" else topology_of(topology, "dense")


def memory_named(memory: str | ResidualMemory, names: Sequence[str] = ("residual", "none")) -> ErrorFeedback:
    """Return the error feedback of a rank, by one of these names or with a memory of the user's."""
    if isinstance(memory, ResidualMemory):
        return ErrorFeedback(memory, ResidualMemory())
    if memory not in names:
        raise ConfigError(f"memory is {', '.join(map(repr, names))} or a ResidualMemory, got {memory!r}")
    return ErrorFeedback(None, None) if memory == "none" else ErrorFeedback(ResidualMemory(), ResidualMemory())
