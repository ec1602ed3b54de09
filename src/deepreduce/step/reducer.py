"""One training step: compensate, encode, exchange, decode, and keep what was not sent as the residual.

::

    gradients ─ compensate ─ codec for each ─ encode ─┐
                                                      ├ exchange by a topology
    means     ─ update     ─                 decode  ─┘
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from math import prod
from operator import attrgetter
from time import perf_counter
from typing import Any, Literal, NoReturn

from ..pipeline import DeepReduce, raise_named
from ..sparsify.nonzero import NonZero
from ..tensor import Shape, SparseTensor
from . import sums
from .arrays import HOST, arrays_of
from .exchange import ExchangeContext, ExchangeResult
from .frame import Failure, FrameTag
from .items import EncodedMessage, OutgoingTensor, step_source, summary
from .packed import Compensated, Packed
from .policy import ByStep, Policy, policy_at, title
from .residual import Gradient, ResidualMemory
from .seeds import StepSeed
from .stats import StepStats
from .stopwatch import Stopwatch
from .threads import ONE_THREAD, Threads
from .topology import Topology
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

    bucket: Bucket
    tensors: Sequence[OutgoingTensor]
    messages: Sequence[EncodedMessage]
    compensated: Sequence[Compensated]
    groups: Sequence[Sequence[int]]
    packed: Packed | None

    def by_gradient(self, parts: Sequence[Sequence[SparseTensor]]) -> list[Sequence[SparseTensor]]:
        """Return the parts of every gradient, cut out of those of the tensors that gradients travelled in."""
        gradients = self.bucket.gradients
        if len(self.groups) == len(gradients):
            return list(parts)
        found: list[Sequence[SparseTensor]] = [[] for _ in gradients]
        for group, column in zip(self.groups, parts, strict=True):
            shapes = [tuple(gradients[index].shape) for index in group]
            for index, own in zip(group, zip(*(sums.split(part, shapes) for part in column), strict=True), strict=True):
                found[index] = own
        return found


@dataclass(frozen=True)
class ErrorFeedback:
    """The residuals of one rank: of its own gradients, and of the sums of the ranges it owns. None: no error feedback."""

    own: ResidualMemory | None
    owned: ResidualMemory | None
    numels: dict[str, int] = field(default_factory=dict)
    """The sizes of the tensors of which ranges are owned, by name."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no residual."""
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
    >>> from deepreduce.step.transport import SingleRank
    >>> reducer = Reducer(policy_of("topr:1/raw/raw", small_numel=0), AllGather())
    >>> memory = ErrorFeedback(ResidualMemory(), None)
    >>> for step in range(2):
    ...     bucket = Bucket(["w"], [np.float32([3, 2])], step)
    ...     means, _ = reducer.reduce(bucket, memory, SingleRank())
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
    threads: Threads = field(default=ONE_THREAD, repr=False, compare=False)
    """Threads that divide the tensors of a bucket; the creator of the reducer closes them."""
    _tags: dict[Any, tuple[list[Shape], FrameTag]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reduce(self, bucket: Bucket, memory: ErrorFeedback, transport: Transport) -> tuple[list[Gradient], StepStats]:
        """Return the means of a bucket as new tensors, and what they cost."""
        context = self.context(bucket, memory, transport)
        try:
            prepared = self.prepare(bucket, memory, context)
        except Exception as error:
            self.report_failure(error, context)
        result, stats = self.exchange(prepared, memory, context)
        means = [
            sums.combined([sums.divided(part, result.divisor) for part in parts])
            if isinstance(gradient, SparseTensor)
            else _cast_like(arrays_of(gradient).total(parts, gradient, result.divisor), gradient)
            for gradient, parts in zip(bucket.gradients, prepared.by_gradient(result.parts), strict=True)
        ]
        return means, stats

    # Before the exchange

    def context(self, bucket: Bucket, memory: ErrorFeedback, transport: Transport) -> ExchangeContext:
        """Return what the exchange of a bucket needs. Of its gradients only the shapes are used."""
        seed, divisor = StepSeed(self.seed, bucket.step, transport.rank), transport.size if self.average else 1
        return ExchangeContext(transport, self._tag(bucket), seed, memory.owned, Stopwatch(), divisor, self.threads)

    def prepare(self, bucket: Bucket, memory: ErrorFeedback, context: ExchangeContext) -> Prepared:
        """Compensate and encode a bucket. No residual changes yet."""
        start = perf_counter()
        packed, compensated = self._compensate(bucket, memory)
        groups = self._groups(compensated) if self.per == "bucket" else list(zip(range(len(compensated))))
        tensors = self._outgoing(bucket, compensated, groups)
        messages = self.topology.encode(tensors, context.seed, context.transport.size, self.threads)
        context.watch.add("encode", start)
        return Prepared(bucket, tensors, messages, compensated, groups, packed)

    def report_failure(self, error: Exception, context: ExchangeContext) -> NoReturn:
        """Tell all ranks that a bucket could not be prepared, in the exchange in which they wait for it, and raise the error."""
        with suppress(Exception):  # raises the error itself; where the others cannot be told, the error is still the reason
            self.topology.fail(Failure(error), context)
        raise error

    def _compensate(self, bucket: Bucket, memory: ErrorFeedback) -> tuple[Packed | None, list[Compensated]]:
        """Return every gradient plus its residual, and the small ones that were computed together."""
        packed = memory.own.compensate_small(bucket.names, bucket.gradients) if memory.own is not None and len(bucket.names) > 1 else None
        found = {} if packed is None else dict(zip(packed.indices, packed.compensated_of(bucket.gradients), strict=True))
        large = list(filterfalse(found.__contains__, range(len(bucket.names))))
        names, gradients = list(map(bucket.names.__getitem__, large)), list(map(bucket.gradients.__getitem__, large))
        found.update(zip(large, self.threads.share(gradients, partial(_compensated, memory.own, names, gradients)), strict=True))
        return packed, list(map(found.__getitem__, range(len(bucket.names))))

    def _groups(self, compensated: Sequence[Compensated]) -> Sequence[Sequence[int]]:
        """Which gradients make one tensor: all large dense ones of a dtype together, each other one alone."""
        groups: dict[object, list[int]] = {}
        for index, (_, content, source, _) in enumerate(compensated):
            together = not isinstance(content, SparseTensor) and source.numel >= self.small_numel
            groups.setdefault(source.dtype if together else index, []).append(index)
        return list(groups.values())

    def _outgoing(self, bucket: Bucket, compensated: Sequence[Compensated], groups: Sequence[Sequence[int]]) -> list[OutgoingTensor]:
        """Return what is sent: each gradient with its codec, or those of a group as one."""
        policy, tensors = policy_at(self.policy, bucket.step), []
        for group in groups:
            if len(group) == 1:
                (index,) = group
                name, gradient, content = bucket.names[index], bucket.gradients[index], compensated[index]
            else:
                name, gradient, content = _joint(group, bucket, compensated)
            try:
                tensors.append(_outgoing_tensor(name, gradient, content, policy))
            except Exception as error:
                raise_named(error, name)
        return tensors

    # The exchange and after it

    def exchange(self, prepared: Prepared, memory: ErrorFeedback, context: ExchangeContext) -> tuple[ExchangeResult, StepStats]:
        """Exchange a bucket and update the residuals."""
        sent_before = context.transport.sent_bytes
        result = self.topology.exchange(prepared.tensors, prepared.messages, context)
        start = perf_counter()
        if result.is_finite:
            if result.update_owned is not None:
                result.update_owned()
            if self.topology.has_owners:
                memory.numels.update((tensor.name, tensor.numel) for tensor in prepared.tensors)
            self._update_own(prepared, result, memory)
        context.watch.add("decode", start)
        return result, self._cost(prepared, context.transport.sent_bytes - sent_before, context.watch)

    def _update_own(self, prepared: Prepared, result: ExchangeResult, memory: ErrorFeedback) -> None:
        if memory.own is None:
            return
        sent = prepared.by_gradient(list(zip(result.sent, strict=True)))
        small: set[int] = set()
        if prepared.packed is not None:
            small.update(prepared.packed.indices)
            memory.own.update_small_(prepared.packed, [sent[index][0] for index in prepared.packed.indices])
        for index, (total, _, _, unused) in enumerate(prepared.compensated):
            if index not in small and not unused:  # the total of an unused one is the gradient itself
                memory.own.update_(prepared.bucket.names[index], total, sent[index][0])

    def _tag(self, bucket: Bucket) -> FrameTag:
        """Return the tag of the exchange of a bucket, the same on all ranks; the identity of a bucket is made once."""
        shapes = list(map(_SHAPE, bucket.gradients))
        key = (*bucket.names, len(shapes))
        known = self._tags.get(key)
        if known is None or known[0] != shapes:
            tensors = [(name, tuple(shape)) for name, shape in zip(bucket.names, shapes, strict=True)]
            identity = repr((title(self.policy), self.topology, self.per, self.small_numel, tensors))
            limit_bytes = sum(20 * prod(shape) + 4096 for shape in shapes)
            tag = FrameTag(summary(bucket.names), zlib.crc32(identity.encode()), 0, limit_bytes)
            known = self._tags[key] = shapes, tag
        tag = known[1]
        return FrameTag(tag.description, tag.channel, bucket.step, tag.limit_bytes)

    def _cost(self, prepared: Prepared, sent_bytes: int, watch: Stopwatch) -> StepStats:
        spent = watch.seconds
        cost = StepStats(prepared.bucket.step, 0, 0, sent_bytes, spent["encode"], spent["exchange"], spent["decode"])
        for message in prepared.messages:
            cost.message_bytes += len(message.blob)
            for tensor, record in zip(message.tensors, message.records, strict=True):
                cost.count(tensor.name, record)
        return cost


_SHAPE = attrgetter("shape")


def _compensated(memory: ResidualMemory | None, names: Sequence[str], gradients: Sequence[Gradient], part: slice) -> list[Compensated]:
    """Return the gradients of a range plus their residuals. An error names the gradient.

    Frameworks drop the mean of a parameter that was not used, so its residual must stay here.
    """
    compensated = []
    for name, gradient in zip(names[part], gradients[part], strict=True):
        try:
            unused = not isinstance(gradient, SparseTensor) and prod(gradient.shape) > 0 and arrays_of(gradient).is_zero(gradient)
            total = gradient if unused or memory is None else memory.compensate(name, gradient)
            content = _cast_like(total, gradient)
            compensated.append(Compensated(total, content, step_source(content), unused))
        except Exception as error:
            raise_named(error, name)
    return compensated


def _joint(group: Sequence[int], bucket: Bucket, compensated: Sequence[Compensated]) -> tuple[str, Gradient, Compensated]:
    """Return gradients that travel as one: their name, themselves, and what is sent of them; unused if none of them was used."""
    own, gradients = [compensated[index] for index in group], [bucket.gradients[index] for index in group]
    arrays = arrays_of(own[0].content)
    content = arrays.concatenate([each.content for each in own])
    together = Compensated(content, content, step_source(content), all(each.is_unused for each in own))
    return _joint_name([bucket.names[index] for index in group]), arrays.concatenate(gradients), together


def _outgoing_tensor(name: str, gradient: Gradient, compensated: Compensated, policy: Policy) -> OutgoingTensor:
    _, content, source, unused = compensated
    codec = policy.codec_for(name, source)
    if not unused and codec.sparsifier.lossless:
        touched = _touched(content, codec, gradient)
        if touched is not content:
            content, source = touched, step_source(touched)
    return OutgoingTensor(name, content, codec, source, None, unused)


def _cast_like(compensated: Gradient, gradient: Gradient) -> Gradient:
    """The compensated gradient in the dtype of the gradient."""
    if compensated.dtype == gradient.dtype:
        return compensated
    if not isinstance(compensated, SparseTensor):
        arrays = arrays_of(compensated)
        return arrays.cast_saturating(compensated, arrays.dtype(gradient))
    return SparseTensor.trusted(compensated.support, HOST.cast_saturating(compensated.values, gradient.dtype), compensated.shape)


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
