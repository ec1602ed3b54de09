"""Flower: clients send their updates as one compressed message, and the server may do the same.

`CompressMod` goes around a ClientApp, `CompressedGrid` around the grid of a ServerApp; strategies and apps see plain weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from .. import inspection, pipeline
from ..errors import CorruptError, DeepReduceError, InputError
from ..message import DEFAULT_MAX_NUMEL
from ..seeds import mix
from ..step.arrays import HOST
from ..step.policy import Spec, policy_at, policy_of
from ..step.residual import ResidualMemory
from .flower_broadcast import Broadcasts, received_broadcasts
from .flower_records import DIFFERENCE, MESSAGE, UPDATE, NumpyArrays, data_bytes, floats, is_message, numel, numpy_of, packed, record_of

_RESIDUAL, _ROUNDS = "deepreduce.residual.", "deepreduce.rounds"
_FAILED_PRECONDITION = 6  # Flower's code for a message that a mod could not work with


class CompressMod:
    """A mod that compresses what a ClientApp replies: ``ClientApp(mods=[CompressMod("topr:0.01/rice/qsgd")])``.

    Weights travel as differences to those that were received, anything else made of floats as it is; the server needs a `CompressedGrid`.
    What was not sent is kept in `Context.state` and added in the next round. Arrays below
    `small_tensor_numel` elements are sent uncompressed.
    """

    def __init__(self, spec: Spec, *, small_tensor_numel: int = 1024, seed: int = 0) -> None:
        self.policy, self.seed = policy_of(spec, small_tensor_numel), seed

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Run the app, and compress its reply."""
        received_broadcasts(message, context)
        received = {name: numpy_of(record) for name, record in message.content.array_records.items()}
        reply = call_next(message, context)
        if reply.has_content():
            for name, record in list(reply.content.array_records.items()):
                reply.content[name] = self._compressed(name, record, received.get(name), context)
        return reply

    def _compressed(self, name: str, record: ArrayRecord, received: NumpyArrays | None, context: Context) -> ArrayRecord:
        arrays = numpy_of(record)
        if received is not None and _alike(arrays, received):
            others = {key: record[key] for key in arrays if key not in floats(arrays)}
            return packed(self._encoded(name, _differences(arrays, received), context), DIFFERENCE, others)
        if len(floats(arrays)) == len(arrays):
            return packed(self._encoded(name, arrays, context), UPDATE)
        return record

    def _encoded(self, name: str, update: NumpyArrays, context: Context) -> bytes:
        """Return the message of an update with its residual, and keep the rest of it."""
        memory, number = ResidualMemory(), _next_round(name, context)
        if _RESIDUAL + name in context.state:
            memory.residuals = dict(numpy_of(context.state.array_records[_RESIDUAL + name]))
        compensated = {key: memory.compensate(key, array) for key, array in update.items()}
        content = {key: HOST.cast_saturating(total, update[key].dtype) for key, total in compensated.items()}
        policy, seed = policy_at(self.policy, number), mix(self.seed, context.node_id, number, name)
        blob = pipeline.encode_many(policy.codec_for, content, seed)
        for key, sent in pipeline.decode_many_sparse(blob, max_numel=numel(content)).items():
            memory.update(key, compensated[key], sent)
        context.state[_RESIDUAL + name] = record_of(memory.residuals)
        return blob


def _next_round(name: str, context: Context) -> int:
    """Count the rounds of a record in this client; returns the number of this one."""
    counts = ConfigRecord(dict(context.state.config_records[_ROUNDS]) if _ROUNDS in context.state else {})
    number = int(counts.get(name, 0))
    counts[name] = number + 1
    context.state[_ROUNDS] = counts
    return number


@dataclass
class Traffic:
    """Bytes of arrays in one direction, and what they would have been without compression."""

    sent_bytes: int = 0
    dense_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller than dense."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass(frozen=True)
class _Sent:
    """A message that was sent: its arrays as the client has them, and until when a reply may come.

    The records are those of the strategy, which many messages share.
    """

    message: Message
    arrays: Mapping[str, NumpyArrays | ArrayRecord]
    expires: float

    def numpy_of(self, name: str) -> NumpyArrays:
        """Return the arrays of a record that was sent, none if there is no such record."""
        arrays = self.arrays.get(name, {})
        return numpy_of(arrays) if isinstance(arrays, ArrayRecord) else arrays


class CompressedGrid(Grid):
    """A grid whose replies may come from clients with a `CompressMod`: ``strategy.start(grid=CompressedGrid(grid), ...)``.

    With `downlink`, a spec, weights go to the clients compressed too: as differences to what they received before, whose error the next
    ones correct. A client that joins gets them whole. `uplink` and `downlink` count bytes. A reply that cannot be decoded becomes an error
    reply, which strategies leave out.
    """

    def __init__(self, grid: Grid, downlink: Spec | None = None, *, small_tensor_numel: int = 1024) -> None:
        self.grid = grid
        self.uplink, self.downlink = Traffic(), Traffic()
        self._broadcasts = None if downlink is None else Broadcasts(policy_of(downlink, small_tensor_numel))
        self._sent: dict[str, _Sent] = {}

    # The grid of Flower

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the grid."""
        return self.grid.run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = [self._outgoing(message) for message in messages]
        ids = list(self.grid.push_messages([sent.message for sent in outgoing]))
        now = time.time()
        self._sent = {key: sent for key, sent in self._sent.items() if sent.expires > now} | dict(zip(ids, outgoing, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = self.grid.pull_messages(message_ids)
        return [self._incoming(reply, self._sent.pop(reply.metadata.reply_to_message_id, None)) for reply in replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        nodes = Counter(message.metadata.dst_node_id for message in messages)
        if (most := max(nodes.values(), default=1)) > 1:
            raise InputError(f"send_and_receive tells replies apart by their node, got {most} messages to one node: use push_messages")
        outgoing = {sent.message.metadata.dst_node_id: sent for sent in map(self._outgoing, messages)}
        replies = self.grid.send_and_receive([sent.message for sent in outgoing.values()], timeout=timeout)
        return [self._incoming(reply, outgoing.get(reply.metadata.src_node_id)) for reply in replies]

    # What is added

    def _outgoing(self, message: Message) -> _Sent:
        metadata, content = message.metadata, message.content
        arrays: Mapping[str, NumpyArrays | ArrayRecord] = dict(content.array_records)
        sent = message
        if self._broadcasts is not None and arrays:
            content = self._broadcasts.content(content, metadata.dst_node_id)
            kept = {"ttl": metadata.ttl, "group_id": metadata.group_id}
            arrays = {name: self._broadcasts.weights(name) for name in arrays}
            sent = Message(content, metadata.dst_node_id, metadata.message_type, **kept)
        self.downlink.sent_bytes += sum(map(data_bytes, content.array_records.values()))
        self.downlink.dense_bytes += sum(map(data_bytes, message.content.array_records.values()))
        return _Sent(sent, arrays, time.time() + metadata.ttl)

    def _incoming(self, reply: Message, sent: _Sent | None) -> Message:
        if self._broadcasts is not None:
            self._broadcasts.acknowledge(reply.metadata.src_node_id, reply.has_content())
        if not reply.has_content():
            return reply
        try:
            for name, record in list(reply.content.array_records.items()):
                self.uplink.sent_bytes += data_bytes(record)
                if is_message(record):
                    reply.content[name] = _decoded(record, {} if sent is None else sent.numpy_of(name))
                self.uplink.dense_bytes += data_bytes(reply.content.array_records[name])
        except DeepReduceError as error:
            unknown = "; this grid does not know, or no longer knows, the message that it replies to" if sent is None else ""
            return _failed(reply, f"node {reply.metadata.src_node_id}: {error}{unknown}")
        return reply


def _failed(reply: Message, reason: str) -> Message:
    """Return a reply with an error in place of its content. It keeps its metadata, by which apps tell replies apart."""
    reply.content = None
    reply.error = Error(_FAILED_PRECONDITION, reason)
    return reply


def _decoded(record: ArrayRecord, sent: NumpyArrays) -> ArrayRecord:
    """Return the arrays of a message. Bytes of a client are hostile: a difference is like what was sent, and an update has its bounds."""
    array = record[MESSAGE]
    if array.stype == UPDATE:
        return record_of(pipeline.decode_many(array.data, max_numel=max(numel(sent), DEFAULT_MAX_NUMEL)))
    told = {key: (info.shape, info.dtype) for key, info in inspection.inspect(array.data).tensors.items()}
    known = {key: (values.shape, values.dtype.name) for key, values in floats(sent).items()}
    if told != known:
        raise CorruptError(f"a difference to {_listed(known)} came with {_listed(told)}")
    changes = pipeline.decode_many(array.data, max_numel=numel(sent))
    whole = {key: Array(values + changes[key]) if key in changes else record.get(key, Array(values)) for key, values in sent.items()}
    return ArrayRecord(whole)


def _alike(arrays: NumpyArrays, received: NumpyArrays) -> bool:
    return {key: (array.shape, array.dtype) for key, array in arrays.items()} == {
        key: (array.shape, array.dtype) for key, array in received.items()
    }


def _differences(arrays: NumpyArrays, received: NumpyArrays) -> NumpyArrays:
    return {key: array - received[key] for key, array in floats(arrays).items()}


def _listed(arrays: Mapping[str, Any]) -> str:
    return f"{len(arrays)} arrays ({', '.join(f'{key} {kind}' for key, kind in list(arrays.items())[:3])})"
