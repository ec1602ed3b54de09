"""One training step: compensate, encode, exchange, decode, and remember what was not sent.

::

    gradients ─ compensate ─ codec for each ─ encode ─┐
                                                      ├ exchange by a topology
    means     ─ update     ─                 decode  ─┘
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from time import perf_counter
from typing import Any, Literal

from ..pipeline import DeepReduce, raise_named
from ..source import Source
from ..sparsify.nonzero import NonZero
from ..tensor import Shape, SparseTensor
from . import sums
from .arrays import HOST, arrays_of
from .frame import Exchange, Failure
from .items import Encoded, Item, source_of, summary
from .packed import Compensated, Packed
from .policy import ByStep, Policy, policy_at, title
from .residual import Gradient, ResidualMemory
from .seeds import StepSeed
from .stats import StepStats
from .stopwatch import Stopwatch
from .topology import Topology
from .transport import Transport
from .trip import Delivery, Trip


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that travel together; `last` closes the step."""

    names: Sequence[str]
    gradients: Sequence[Gradient]
    step: int
    last: bool = True


@dataclass(frozen=True, eq=False)
class Prepared:
    """A bucket that is encoded: its tensors, their messages, and the compensated gradients that error feedback needs afterwards.

    `groups` are the indices of the gradients of each tensor: one, or those that travel as one.
    """

    tensors: Sequence[Item]
    messages: Sequence[Encoded]
    compensated: Sequence[Compensated]
    groups: Sequence[Sequence[int]]
    packed: Packed | None


@dataclass(frozen=True)
class Memory:
    """What a rank remembers: of its own gradients, and of the sums that it owns. None: nothing."""

    own: ResidualMemory | None
    owned: ResidualMemory | None
    numels: dict[str, int] = field(default_factory=dict)
    """The sizes of the tensors of which ranges are owned, by name."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return not any(memory is not None and memory.residuals for memory in (self.own, self.owned))

    def rescale(self, scale: float) -> None:
        """Follow a loss scale."""
        for memory in (self.own, self.owned):
            if memory is not None:
                memory.rescale(scale)


@dataclass(frozen=True)
class Reducer:
    """Replaces gradients by their means over all ranks, the same on all ranks bit for bit.

    >>> import numpy as np
    >>> from deepreduce.step.policy import policy_of
    >>> from deepreduce.step.topology import AllGather
    >>> from deepreduce.step.transport import Alone
    >>> reducer = Reducer(policy_of("topr:1/raw/raw", small_numel=0), AllGather())
    >>> memory = Memory(ResidualMemory(), None)
    >>> for step in range(2):
    ...     bucket = Bucket(["w"], [np.float32([3, 2])], step)
    ...     means, _ = reducer.reduce(bucket, memory, Alone())
    ...     print(means[0])
    [3. 0.]
    [0. 4.]
    """

    policy: Policy | ByStep
    topology: Topology
    seed: int = 0
    per: Literal["parameter", "bucket"] = "parameter"
    small_numel: int = 1024
    average: bool = True
    """Whether gradients are averaged over the ranks, or summed."""
    _exchanges: dict[Any, tuple[list[Shape], Exchange]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reduce(self, bucket: Bucket, memory: Memory, transport: Transport) -> tuple[list[Gradient], StepStats]:
        """Return the means of a bucket as new tensors, and what they cost."""
        watch = Stopwatch()
        return self.complete(bucket, self.attempt(bucket, memory, transport, watch), memory, transport, watch)

    def complete(
        self, bucket: Bucket, prepared: Prepared | Exception, memory: Memory, transport: Transport, watch: Stopwatch
    ) -> tuple[list[Gradient], StepStats]:
        """Return what `reduce` does, for a bucket that `attempt` has encoded or not."""
        delivery, stats = self.deliver(bucket, prepared, memory, transport, watch)
        assert isinstance(prepared, Prepared)  # else `deliver` has raised
        means = [
            sums.combined([sums.divided(part, delivery.divisor) for part in parts])
            if isinstance(gradient, SparseTensor)
            else _narrow(arrays_of(gradient).total(parts, gradient, delivery.divisor), gradient)
            for gradient, parts in zip(bucket.gradients, self.parts(bucket, prepared, delivery.parts), strict=True)
        ]
        return means, stats

    # Before the exchange

    def attempt(self, bucket: Bucket, memory: Memory, transport: Transport, watch: Stopwatch) -> Prepared | Exception:
        """Return the bucket encoded, or why it cannot be: `deliver` tells the other ranks."""
        try:
            return self.prepare(bucket, memory, transport.rank, transport.size, watch)
        except Exception as error:
            return error

    def prepare(self, bucket: Bucket, memory: Memory, rank: int, size: int, watch: Stopwatch) -> Prepared:
        """Compensate and encode a bucket. Nothing is remembered yet."""
        start = perf_counter()
        packed = memory.own.compensate_small(bucket.names, bucket.gradients) if memory.own is not None and len(bucket.names) > 1 else None
        small = {} if packed is None else dict(zip(packed.indices, packed.compensated_of(bucket.gradients), strict=True))
        compensated: list[Compensated] = []
        name = ""
        try:
            for index, (name, gradient) in enumerate(zip(bucket.names, bucket.gradients, strict=True)):
                compensated.append(small.get(index) or self._compensated(name, gradient, memory))
            policy, groups, tensors = policy_at(self.policy, bucket.step), self._groups(compensated), []
            for group in groups:
                if len(group) == 1:
                    name, gradient = bucket.names[group[0]], bucket.gradients[group[0]]
                    _, content, source, idle = compensated[group[0]]
                else:
                    name, gradient, content, source, idle = _joint(group, bucket, compensated)
                tensors.append(_item(name, gradient, content, source, idle, policy))
        except Exception as error:
            raise_named(error, name)
        seed = StepSeed(self.seed, bucket.step, rank)
        prepared = Prepared(tensors, self.topology.encode(tensors, seed, size), compensated, groups, packed)
        watch.add("encode", start)
        return prepared

    def _compensated(self, name: str, gradient: Gradient, memory: Memory) -> Compensated:
        """A gradient plus its residual. Frameworks drop the mean of a parameter that was not used, so its residual must stay here."""
        idle = not isinstance(gradient, SparseTensor) and prod(gradient.shape) > 0 and arrays_of(gradient).is_zero(gradient)
        total = gradient if idle or memory.own is None else memory.own.compensate(name, gradient)
        content = _narrow(total, gradient)
        return Compensated(total, content, source_of(content), idle)

    def _groups(self, compensated: Sequence[Compensated]) -> Sequence[Sequence[int]]:
        """Which gradients make one tensor: each alone, or all large dense ones of a dtype together."""
        if self.per == "parameter":
            return list(zip(range(len(compensated))))
        groups: dict[object, list[int]] = {}
        for index, (_, content, source, _) in enumerate(compensated):
            together = not isinstance(content, SparseTensor) and source.numel >= self.small_numel
            groups.setdefault(source.dtype if together else index, []).append(index)
        return list(groups.values())

    # The exchange and after it

    def deliver(
        self, bucket: Bucket, prepared: Prepared | Exception, memory: Memory, transport: Transport, watch: Stopwatch
    ) -> tuple[Delivery, StepStats]:
        """Exchange a bucket and update the memory. A bucket that could not be prepared is reported to all ranks, and its error raised."""
        sent_before = transport.sent_bytes
        seed, divisor = StepSeed(self.seed, bucket.step, transport.rank), transport.size if self.average else 1
        trip = Trip(transport, self._exchange(bucket), seed, memory.owned, watch, divisor)
        if isinstance(prepared, Exception):
            try:
                self.topology.fail(Failure(prepared), trip)
            finally:
                raise prepared
        delivery = self.topology.exchange(prepared.tensors, prepared.messages, trip)
        start = perf_counter()
        if delivery.is_finite:
            if delivery.update_owned is not None:
                delivery.update_owned()
            if self.topology.has_owners:
                memory.numels.update((tensor.name, tensor.numel) for tensor in prepared.tensors)
            self._remember(bucket, prepared, delivery, memory)
        watch.add("decode", start)
        return delivery, self._cost(bucket, prepared, transport.sent_bytes - sent_before, watch)

    def parts(self, bucket: Bucket, prepared: Prepared, parts: Sequence[Sequence[SparseTensor]]) -> list[Sequence[SparseTensor]]:
        """Return the parts of every gradient, cut out of those of the tensors that gradients travelled in."""
        if len(prepared.groups) == len(bucket.names):
            return list(parts)
        found: list[Sequence[SparseTensor]] = [[] for _ in bucket.names]
        for group, column in zip(prepared.groups, parts, strict=True):
            shapes = [tuple(bucket.gradients[index].shape) for index in group]
            for index, own in zip(group, zip(*(sums.split(part, shapes) for part in column), strict=True), strict=True):
                found[index] = own
        return found

    def write_small(self, bucket: Bucket, prepared: Prepared, parts: Sequence[Sequence[SparseTensor]], divisor: int) -> Sequence[int]:
        """Write the means of the small gradients in place, in one call; return which ones these are."""
        if prepared.packed is None:
            return ()
        prepared.packed.fill_(bucket.gradients, parts, divisor)
        return prepared.packed.indices

    def _remember(self, bucket: Bucket, prepared: Prepared, delivery: Delivery, memory: Memory) -> None:
        if memory.own is None:
            return
        sent = self.parts(bucket, prepared, list(zip(delivery.sent, strict=True)))
        small: set[int] = set()
        if prepared.packed is not None:
            small.update(prepared.packed.indices)
            memory.own.remember_small(prepared.packed, [sent[index][0] for index in prepared.packed.indices])
        for index, (total, _, _, idle) in enumerate(prepared.compensated):
            if index not in small and not idle:  # the total of an idle one is the gradient itself
                memory.own.remember(bucket.names[index], total, sent[index][0])

    def _exchange(self, bucket: Bucket) -> Exchange:
        """Which exchange this is, the same on all ranks; the identity of a bucket is made once."""
        shapes = list(map(_SHAPE, bucket.gradients))
        key = (*bucket.names, len(shapes))
        known = self._exchanges.get(key)
        if known is None or known[0] != shapes:
            identity = repr((title(self.policy), self.topology, self.per, self.small_numel, shapes))
            limit_bytes = sum(20 * prod(shape) + 4096 for shape in shapes)
            exchange = Exchange(summary(bucket.names), zlib.crc32(identity.encode()), 0, limit_bytes)
            known = self._exchanges[key] = shapes, exchange
        what = known[1]
        return Exchange(what.what, what.channel, bucket.step, what.limit_bytes)

    def _cost(self, bucket: Bucket, prepared: Prepared, sent_bytes: int, watch: Stopwatch) -> StepStats:
        spent = watch.seconds
        cost = StepStats(bucket.step, 0, 0, sent_bytes, spent["encode"], spent["exchange"], spent["decode"])
        for message in prepared.messages:
            cost.message_bytes += len(message.blob)
            for tensor, record in zip(message.items, message.records, strict=True):
                cost.count(tensor.name, record)
        return cost


_SHAPE = attrgetter("shape")


def _joint(group: Sequence[int], bucket: Bucket, compensated: Sequence[Compensated]) -> tuple[str, Gradient, Gradient, Source, bool]:
    """The name of gradients that travel as one, themselves, what is sent of them, its source, and whether none of them was used."""
    own, gradients = [compensated[index] for index in group], [bucket.gradients[index] for index in group]
    arrays = arrays_of(own[0].content)
    content = arrays.concatenate([each.content for each in own])
    idle = all(each.idle for each in own)
    return _joint_name([bucket.names[index] for index in group]), arrays.concatenate(gradients), content, source_of(content), idle


def _item(name: str, gradient: Gradient, content: Gradient, source: Source, idle: bool, policy: Policy) -> Item:
    codec = policy.codec_for(name, source)
    if not idle and codec.sparsifier.lossless:
        touched = _touched(content, codec, gradient)
        if touched is not content:
            content, source = touched, source_of(touched)
    return Item(name, content, codec, source, None, idle)


def _narrow(compensated: Gradient, gradient: Gradient) -> Gradient:
    """The compensated gradient in the dtype of the gradient."""
    if compensated.dtype == gradient.dtype:
        return compensated
    if not isinstance(compensated, SparseTensor):
        arrays = arrays_of(compensated)
        return arrays.narrow(compensated, arrays.dtype(gradient))
    return SparseTensor.trusted(compensated.support, HOST.narrow(compensated.values, gradient.dtype), compensated.shape)


def _touched(content: Gradient, codec: DeepReduce, gradient: Gradient) -> Gradient:
    """What a sparsifier that selects everything is given: the residual counts only where the gradient is not zero itself.

    Otherwise every position that was ever touched would be sent in every step, for the rounding errors of earlier ones.
    """
    if isinstance(content, SparseTensor) and isinstance(gradient, SparseTensor):
        return sums.at(content, gradient.indices)
    if isinstance(codec.sparsifier, NonZero) and not isinstance(content, SparseTensor):
        return arrays_of(content).nonzero_where(content, gradient)
    return content


def _joint_name(names: Sequence[str]) -> str:
    return f"{summary(names)} [{zlib.crc32(chr(0).join(names).encode()):08x}]"
