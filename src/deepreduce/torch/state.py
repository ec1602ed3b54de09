"""The state behind the hook: what is sent how, what is remembered, and what it cost."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from .. import steps
from ..accounting import Stats, StepStats
from ..errors import ConfigError, InputError, PeerError
from ..parameters import natural
from ..pipeline import DeepReduce
from ..policy import Policy, policy_of
from ..steps import Seed
from ..tensor import SparseTensor
from . import messages, sums
from .coo import coo_like
from .feedback import Feedback
from .lane import Lane
from .link import Link, Ticket
from .memory import TorchMemory
from .names import Names
from .source import numpy_dtype, sparse_of
from .stopwatch import Stopwatch
from .topology import TOPOLOGIES, AllGather, Delivery, Parcel, Topology, Trip
from .trial import Trial
from .units import Content, Unit, as_source

_START = 1024


class Scaler(Protocol):
    """What is used of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """The loss scale of this step."""
        ...


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that travel together; `last` closes the step."""

    names: Sequence[str]
    gradients: Sequence[torch.Tensor]
    step: int
    last: bool


@dataclass(frozen=True, eq=False)
class Packed:
    """A bucket that is encoded, with what error feedback needs afterwards: `groups` are the places of the gradients of each unit."""

    parcel: Parcel
    wide: Sequence[Content]
    idle: Sequence[bool]
    groups: Sequence[Sequence[int]]


class DeepReduceState:
    """Everything `deepreduce_hook` needs; give both to `DistributedDataParallel.register_comm_hook`.

    - `spec`: a spec string, a `DeepReduce`, or an object with `choose(name, source)` such as `BySize`.
    - `process_group`: who takes part; default all ranks. A group of its own is made of its members at the first step.
    - `topology`: ``"allgather"``, ``"server"``, ``"sharded"`` or a `Sharded(budget=...)`; ``"dense"`` is a plain allreduce.
    - `memory`: ``"residual"`` for error feedback, ``"none"``, or a `TorchMemory` with decay and momentum.
    - `small_tensor_numel`: smaller tensors travel as they are. (An object with `choose` decides that itself.)
    - `per`: where top-r is taken, in each ``"parameter"`` or over a whole ``"bucket"``.
    - `model`: gives parameters their names in checkpoints, errors and tables; otherwise they are numbered.
    - `scaler`: a `GradScaler`, whose loss scale the error feedback then follows.
    - `never_slower`: time steps of both kinds, now and then, and send dense gradients for as long as that is faster. For `allgather`. What
      is sent then depends on the clock: a run cannot be repeated bit by bit.
    - `seed`: of all that is drawn at random. `timeout`: of an exchange. `history`: steps of which `stats()` keeps the details.

    >>> state = DeepReduceState("topr:0.01/raw/fp16")
    >>> print(state)
    DeepReduceState(topr:0.01/raw/fp16, allgather, residual, per parameter from 1024 elements)
    """

    def __init__(
        self,
        spec: str | DeepReduce | Policy,
        process_group: dist.ProcessGroup | None = None,
        topology: str | Topology = "allgather",
        memory: Literal["residual", "none"] | TorchMemory = "residual",
        small_tensor_numel: int = 1024,
        per: Literal["parameter", "bucket"] = "parameter",
        *,
        model: torch.nn.Module | None = None,
        scaler: Scaler | None = None,
        never_slower: bool = False,
        seed: int = 0,
        timeout: timedelta | None = None,
        history: int = 100,
    ) -> None:
        if per not in ("parameter", "bucket"):
            raise ConfigError(f"per is 'parameter' or 'bucket', got {per!r}")
        self.policy = policy_of(spec, small_tensor_numel)
        self.process_group = process_group
        self.topology = _topology(topology)
        self.per = per
        self.names = Names(model)
        self.step = 0
        self.seed = natural(seed, "a seed")
        self._spec, self._memory_name, self._small_numel = _title(spec), str(memory), small_tensor_numel
        self._scaler, self._timeout = scaler, timeout
        self._feedback = Feedback(_memory(memory))
        self._owned = Feedback(None if self._feedback.memory is None else TorchMemory())
        self._link: Link | None = None
        self._packing, self._shipping = Lane("deepreduce pack"), Lane("deepreduce ship")
        self._failure: BaseException | None = None
        self._stats = Stats(history)
        if never_slower and not isinstance(self.topology, AllGather):
            raise ConfigError(f"never_slower goes with topology 'allgather', where no owner has debts of its own; got {topology!r}")
        if isinstance(memory, TorchMemory) and memory.momentum and (never_slower or self.topology is None):
            raise ConfigError(f"momentum belongs to what is sent compressed, and is lost in dense steps; got momentum {memory.momentum}")
        self._trial = Trial() if never_slower else None
        self._asked_step, self._compresses = -1, self.topology is not None

    def __repr__(self) -> str:
        topology = self.topology.name if self.topology else "dense"
        return f"DeepReduceState({self._spec}, {topology}, {self._memory_name}, per {self.per} from {self._small_numel} elements)"

    def stats(self) -> Stats:
        """Bytes and seconds of the latest steps."""
        return self._stats

    @property
    def link(self) -> Link:
        """The other ranks. Opened at first use, as a process group may not be there yet when a state is made."""
        if self._link is None:
            self._link = Link.open(self.process_group, self._timeout)
        return self._link

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember; every rank has its own. Loads with `torch.load(..., weights_only=True)`."""
        return {"step": self.step, "seed": self.seed, "sent": self._feedback.state_dict(), "owned": self._owned.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same rank: the next step is the same, bit for bit, as without the interruption."""
        if set(state) != {"step", "seed", "sent", "owned"}:
            raise InputError(f"a state of deepreduce has the keys step, seed, sent and owned, got {sorted(state)}")
        self._feedback.load_state_dict(state["sent"])
        self._owned.load_state_dict(state["owned"])
        self.step, self.seed = int(state["step"]), int(state["seed"])

    # A bucket's way

    def compresses(self) -> bool:
        """Whether the step that is under way travels compressed, on all ranks."""
        if self._trial is not None and self.step != self._asked_step:
            self._asked_step, self._compresses = self.step, self._trial.compresses(self.step, self._agreed)
        return self._compresses

    def _agreed(self, numbers: list[float]) -> list[float]:
        ticket = Ticket("the times of a trial", zlib.crc32(b"trial"), self.step, limit_bytes=8 * len(numbers))
        everyone = self.link.all_gather(np.array(numbers).tobytes(), ticket)
        return [float(most) for most in np.max([message.view(np.float64) for message in everyone], axis=0)]

    def pay(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> list[str]:
        """Add what is owed to gradients that travel whole; the names of those where something was."""
        if self._scaler is not None:
            self._feedback.rescale(self._scaler.get_scale())
        owing = [
            (name, gradient) for name, gradient in zip(names, gradients, strict=True) if self._feedback.owes(name) and not _idle(gradient)
        ]
        for name, gradient in owing:
            self._feedback.pay(name, gradient)
        return [name for name, _ in owing]

    def paid(self, names: Sequence[str]) -> None:
        """These debts have arrived at all ranks."""
        for name in names:
            self._feedback.forget(name)

    def reduce(self, names: Sequence[str], gradients: Sequence[torch.Tensor], last: bool = True) -> Future[None]:
        """Replace each gradient by the mean over all ranks. Buckets are exchanged in the order of these calls, the same on all ranks."""
        bucket = Bucket(names, gradients, self.step, last)
        self.step += 1 if last else 0
        ready = _gradients_ready(gradients)
        link, watch = self.link, Stopwatch()
        packed = self._packing.submit(lambda: self._pack(bucket, link, watch, ready))
        return self._shipping.submit(lambda: self._ship(bucket, link, watch, packed))

    @torch.no_grad()
    def _pack(self, bucket: Bucket, link: Link, watch: Stopwatch, ready: Callable[[], None]) -> Packed:
        ready()
        self._refuse_after_failure()
        with watch("encode"):
            if self._scaler is not None:
                self._feedback.rescale(self._scaler.get_scale())
            wide, narrow, idle = [], [], []
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
                with messages.naming(name):
                    content = _content(gradient)
                    idle.append(_idle(content))
                    wide.append(content if idle[-1] else self._feedback.compensate(name, content))
                    narrow.append(sums.narrow(wide[-1], content.dtype))
            groups = self._groups(narrow)
            units = [self._unit([bucket.names[place] for place in group], [narrow[place] for place in group]) for group in groups]
            return Packed(self._active.pack(units, self._seed(bucket, link)), wide, idle, groups)

    @torch.no_grad()
    def _ship(self, bucket: Bucket, link: Link, watch: Stopwatch, packing: Future[Packed]) -> None:
        sent_before = link.sent_bytes
        try:
            self._refuse_after_failure()
            error = packing.exception()
            parcel = packing.result().parcel if error is None else self._active.failed(error, link.size)
            if self._scaler is not None:
                self._owned.rescale(self._scaler.get_scale())
            delivery = self._active.ship(parcel, self._trip(bucket, link, watch))
            packed = packing.result()
            with watch("decode"):
                self._unpack(bucket, packed, delivery)
            self._count(bucket, packed.parcel, link.sent_bytes - sent_before, watch)
        except BaseException as failure:
            self._failure = self._failure or failure
            link.close()
            raise

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise PeerError(f"deepreduce stopped after an earlier failure: {self._failure}")

    def _unpack(self, bucket: Bucket, packed: Packed, delivery: Delivery) -> None:
        if delivery.finite:
            delivery.settle()
        for group, sent, shares in zip(packed.groups, delivery.sent, delivery.shares, strict=True):
            shapes = [tuple(bucket.gradients[place].shape) for place in group]
            parts = zip(*(sums.split(share, shapes) for share in shares), strict=True)
            for place, own, parted in zip(group, sums.split(sent, shapes), parts, strict=True):
                if delivery.finite and not packed.idle[place]:
                    self._feedback.update(bucket.names[place], packed.wide[place], own)
                _put(bucket.gradients[place], parted)

    def _count(self, bucket: Bucket, parcel: Parcel, sent_bytes: int, watch: Stopwatch) -> None:
        spent = watch.seconds
        cost = StepStats(bucket.step, 0, 0, sent_bytes, spent["encode"], spent["exchange"], spent["decode"])
        for message in parcel.messages:
            cost.message_bytes += len(message.blob)
            for unit, record in zip(message.units, message.records, strict=True):
                cost.count(unit.label, record)
        self._stats.add(cost, bucket.last)

    # What goes into a message

    @property
    def _active(self) -> Topology:
        if self.topology is None:
            raise ConfigError("topology 'dense' does not encode")
        return self.topology

    def _groups(self, contents: Sequence[Content]) -> list[list[int]]:
        """Which gradients make one unit: each alone, or all large dense ones of a dtype together."""
        groups: dict[object, list[int]] = {}
        for place, content in enumerate(contents):
            together = self.per == "bucket" and isinstance(content, torch.Tensor) and content.numel() >= self._small_numel
            groups.setdefault(content.dtype if together else place, []).append(place)
        return list(groups.values())

    def _unit(self, names: Sequence[str], contents: Sequence[Content]) -> Unit:
        label, content = names[0], contents[0]
        if len(names) > 1:
            label = f"{steps.summary(names)} [{zlib.crc32(chr(0).join(names).encode()):08x}]"
            content = torch.cat([each.reshape(-1) for each in contents if isinstance(each, torch.Tensor)])
        with messages.naming(label):
            codec = self.policy.choose(label, as_source(content))
        return Unit(label, self.names.number(names[0]), content, codec)

    def _seed(self, bucket: Bucket, link: Link) -> Seed:
        return Seed(self.seed + bucket.step, link.rank, link.size)

    def _trip(self, bucket: Bucket, link: Link, watch: Stopwatch) -> Trip:
        what = steps.summary(bucket.names)
        identity = repr((self._spec, self.topology, self.per, self._small_numel, [tuple(gradient.shape) for gradient in bucket.gradients]))
        limit_bytes = sum(20 * gradient.numel() + 4096 for gradient in bucket.gradients)

        def ticket(phase: str) -> Ticket:
            return Ticket(what, zlib.crc32(f"{phase} {identity}".encode()), bucket.step, limit_bytes)

        return Trip(link, self._seed(bucket, link), self._owned, ticket, watch)


def _title(spec: str | DeepReduce | Policy) -> str:
    """How a spec is called, the same on all ranks: the text of a policy without one of its own would hold an address."""
    return str(spec) if isinstance(spec, str | DeepReduce) or is_dataclass(spec) else type(spec).__name__


def _topology(topology: str | Topology) -> Topology | None:
    if isinstance(topology, Topology) or topology == "dense":
        return topology if isinstance(topology, Topology) else None
    if topology not in TOPOLOGIES:
        raise ConfigError(f"topology is one of {', '.join(sorted(TOPOLOGIES))} or dense, got {topology!r}")
    return TOPOLOGIES[topology]()


def _memory(memory: str | TorchMemory) -> TorchMemory | None:
    if isinstance(memory, TorchMemory):
        return memory
    if memory not in ("residual", "none"):
        raise ConfigError(f"memory is 'residual', 'none' or a TorchMemory, got {memory!r}")
    return TorchMemory() if memory == "residual" else None


def _gradients_ready(gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
    """What the packing lane waits for, so that it does not read gradients that a device is still computing."""
    if not gradients or not gradients[0].is_cuda:
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def _content(gradient: torch.Tensor) -> Content:
    numpy_dtype(gradient.dtype)  # refuses what is not a float
    return sparse_of(gradient) if gradient.layout == torch.sparse_coo else gradient.detach()


def _idle(content: Content) -> bool:
    """Whether a parameter was not used in this step: DDP drops its mean, so what it is owed must stay with us."""
    if isinstance(content, SparseTensor):
        return False
    start = content.reshape(-1)[:_START]  # hardly ever zero in a parameter that was used, and much less to read
    return not bool(start.any()) and not bool(content.any())


def _put(gradient: torch.Tensor, shares: Sequence[SparseTensor]) -> None:
    """Write a mean over a gradient, in place."""
    if gradient.layout == torch.sparse_coo:
        gradient.zero_().add_(coo_like(gradient, sums.combined(shares)))
    else:
        sums.fill_(gradient, shares)
