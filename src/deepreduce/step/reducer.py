"""One training step: compensate, encode, exchange, decode, and remember what was not sent.

::

    gradients ─ compensate ─ codec for each ─ encode ─┐
                                                      ├ exchange by a topology
    means     ─ update     ─                 decode  ─┘
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from ..sparsify.nonzero import NonZero
from ..tensor import SparseTensor
from . import sums
from .arrays import HOST, arrays_of
from .frame import Exchange, Failure
from .items import Encoded, Item, naming, summary
from .policy import Policy, StepPolicy, policy_at, title
from .residual import Gradient, ResidualMemory
from .seeds import StepSeed
from .stats import StepStats
from .stopwatch import Stopwatch
from .topology import Delivery, Topology, Trip
from .transport import Transport


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
    compensated: Sequence[Gradient]
    groups: Sequence[Sequence[int]]


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

    policy: Policy | StepPolicy
    topology: Topology
    seed: int = 0
    per: Literal["parameter", "bucket"] = "parameter"
    small_numel: int = 1024
    average: bool = True
    """Whether gradients are averaged over the ranks, or summed."""

    def reduce(self, bucket: Bucket, memory: Memory, transport: Transport) -> tuple[list[Gradient], StepStats]:
        """Return the means of a bucket as new tensors, and what they cost."""
        watch, prepared = Stopwatch(), Future[Prepared]()
        try:
            prepared.set_result(self.prepare(bucket, memory, transport.rank, transport.size, watch))
        except Exception as error:
            prepared.set_exception(error)
        delivery, stats = self.deliver(bucket, prepared, memory, transport, watch)
        means = [
            sums.combined([sums.divided(part, delivery.divisor) for part in parts])
            if isinstance(gradient, SparseTensor)
            else _narrow(arrays_of(gradient).total(parts, gradient, delivery.divisor), gradient)
            for gradient, parts in zip(bucket.gradients, self.parts(bucket, prepared.result(), delivery), strict=True)
        ]
        return means, stats

    # Before the exchange

    def prepare(self, bucket: Bucket, memory: Memory, rank: int, size: int, watch: Stopwatch) -> Prepared:
        """Compensate and encode a bucket. Nothing is remembered yet."""
        with watch("encode"):
            compensated, contents, idle = [], [], []
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
                with naming(name):
                    idle.append(_is_idle(gradient))
                    compensated.append(gradient if idle[-1] or memory.own is None else memory.own.compensate(name, gradient))
                    contents.append(_narrow(compensated[-1], gradient))
            groups = self._groups(contents)
            tensors = [self._item(bucket, group, contents, all(idle[index] for index in group)) for group in groups]
            seed = StepSeed(self.seed, bucket.step, rank)
            return Prepared(tensors, self.topology.encode(tensors, seed, size), compensated, groups)

    def _groups(self, contents: Sequence[Gradient]) -> list[list[int]]:
        """Which gradients make one tensor: each alone, or all large dense ones of a dtype together."""
        groups: dict[object, list[int]] = {}
        for index, content in enumerate(contents):
            together = self.per == "bucket" and not isinstance(content, SparseTensor) and _numel(content) >= self.small_numel
            groups.setdefault(str(content.dtype) if together else index, []).append(index)
        return list(groups.values())

    def _item(self, bucket: Bucket, group: Sequence[int], contents: Sequence[Gradient], idle: bool) -> Item:
        name, content, gradient = bucket.names[group[0]], contents[group[0]], bucket.gradients[group[0]]
        if len(group) > 1:
            names = [bucket.names[index] for index in group]
            name = f"{summary(names)} [{zlib.crc32(chr(0).join(names).encode()):08x}]"
            arrays = arrays_of(content)
            content = arrays.concatenate([contents[index] for index in group])
            gradient = arrays.concatenate([bucket.gradients[index] for index in group])
        with naming(name):
            codec = policy_at(self.policy, bucket.step).codec_for(name, Item.source_of(content))
            item = Item(name, content, codec, idle=idle)
            return item if idle else replace(item, content=_touched(item, gradient))

    # The exchange and after it

    def deliver(
        self, bucket: Bucket, prepared: Future[Prepared], memory: Memory, transport: Transport, watch: Stopwatch
    ) -> tuple[Delivery, StepStats]:
        """Exchange a bucket and update the memory. A bucket that could not be prepared is reported to all ranks, and its error raised."""
        sent_before = transport.sent_bytes
        seed, divisor = StepSeed(self.seed, bucket.step, transport.rank), transport.size if self.average else 1
        trip = Trip(transport, self._exchange(bucket), seed, memory.owned, watch, divisor)
        error = prepared.exception()
        if isinstance(error, Exception):
            try:
                self.topology.fail(Failure(error), trip)
            finally:
                raise error
        ready = prepared.result()
        delivery = self.topology.exchange(ready.tensors, ready.messages, trip)
        with watch("decode"):
            if delivery.is_finite:
                delivery.settle()
                memory.numels.update((tensor.name, tensor.numel) for tensor in ready.tensors if self.topology.has_owners)
                self._remember(bucket, ready, delivery, memory)
        return delivery, self._cost(bucket, ready, transport.sent_bytes - sent_before, watch)

    def parts(self, bucket: Bucket, prepared: Prepared, delivery: Delivery) -> list[Sequence[SparseTensor]]:
        """Return, for every gradient, the sparse tensors that add up to its mean."""
        return _by_gradient(bucket, prepared, [list(parts) for parts in delivery.parts])

    def _remember(self, bucket: Bucket, prepared: Prepared, delivery: Delivery, memory: Memory) -> None:
        if memory.own is None:
            return
        sent = _by_gradient(bucket, prepared, [[part] for part in delivery.sent])
        idle = {index for group, tensor in zip(prepared.groups, prepared.tensors, strict=True) if tensor.idle for index in group}
        for index, name in enumerate(bucket.names):
            if index not in idle:
                memory.own.remember(name, prepared.compensated[index], sums.scaled(sent[index][0], 1.0))

    def _exchange(self, bucket: Bucket) -> Exchange:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients]
        identity = repr((title(self.policy), self.topology, self.per, self.small_numel, shapes))
        limit_bytes = sum(20 * _numel(gradient) + 4096 for gradient in bucket.gradients)
        return Exchange(summary(bucket.names), zlib.crc32(identity.encode()), bucket.step, limit_bytes)

    def _cost(self, bucket: Bucket, prepared: Prepared, sent_bytes: int, watch: Stopwatch) -> StepStats:
        spent = watch.seconds
        cost = StepStats(bucket.step, 0, 0, sent_bytes, spent["encode"], spent["exchange"], spent["decode"])
        for message in prepared.messages:
            cost.message_bytes += len(message.blob)
            for tensor, record in zip(message.items, message.records, strict=True):
                cost.count(tensor.name, record)
        return cost


def _is_idle(gradient: Gradient) -> bool:
    """Whether a parameter was not used in this step: frameworks drop its mean, so its residual must stay here."""
    return not isinstance(gradient, SparseTensor) and _numel(gradient) > 0 and arrays_of(gradient).is_zero(gradient)


def _narrow(compensated: Gradient, gradient: Gradient) -> Gradient:
    """The compensated gradient in the dtype of the gradient."""
    if not isinstance(compensated, SparseTensor):
        arrays = arrays_of(compensated)
        return arrays.narrow(compensated, arrays.dtype(gradient))
    return SparseTensor.trusted(compensated.support, HOST.narrow(compensated.values, gradient.dtype), compensated.shape)


def _touched(item: Item, gradient: Gradient) -> Gradient:
    """What a sparsifier that selects everything is given: the residual counts only where the gradient is not zero itself.

    Otherwise every position that was ever touched would be sent in every step, for the rounding errors of earlier ones.
    """
    if isinstance(item.content, SparseTensor) and item.codec.sparsifier.lossless and isinstance(gradient, SparseTensor):
        return sums.at(item.content, gradient.indices)
    if isinstance(item.codec.sparsifier, NonZero) and not isinstance(item.content, SparseTensor):
        return item.arrays.nonzero_where(item.content, gradient)
    return item.content


def _numel(gradient: Gradient) -> int:
    return prod(gradient.shape)


def _by_gradient(bucket: Bucket, prepared: Prepared, parts: Sequence[Sequence[SparseTensor]]) -> list[Sequence[SparseTensor]]:
    """Cut the parts of every tensor into those of the gradients that travelled in it."""
    found: list[Sequence[SparseTensor]] = [[] for _ in bucket.names]
    for group, column in zip(prepared.groups, parts, strict=True):
        shapes = [tuple(bucket.gradients[index].shape) for index in group]
        for index, own in zip(group, zip(*(sums.split(part, shapes) for part in column), strict=True), strict=True):
            found[index] = own
    return found
