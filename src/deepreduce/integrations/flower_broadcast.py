"""The way from Flower's server to its clients: weights as differences to those that a client has.

The weights that clients have go through numbered versions; a message leads from one to the next. A client that is some versions behind
gets the messages that it missed, any other one the whole weights. What a message leaves out is part of the difference that the next one
is made of.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from .. import pipeline
from ..errors import InputError
from ..seeds import mix
from ..step.policy import ByStep, Policy, policy_at
from .flower_records import BROADCAST, NumpyArrays, floats, numel, numpy_of, record_of

_VERSIONS = "deepreduce.versions"
_WEIGHTS = "deepreduce.weights."
_KEPT_MESSAGES = 8


@dataclass
class _Broadcast:
    """One record of weights: its latest version as the strategy gave it and as clients have it, and the messages that led there."""

    policy: Policy | ByStep
    given: ArrayRecord
    weights: NumpyArrays
    version: int = 0
    messages: deque[ArrayRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_MESSAGES))

    def advance(self, record: ArrayRecord) -> None:
        """Make a new version if these are new weights."""
        if record is self.given or record == self.given:
            return
        new = numpy_of(record)
        if [(key, array.shape, array.dtype) for key, array in new.items()] != [(key, a.shape, a.dtype) for key, a in self.weights.items()]:
            raise InputError("the downlink is for one model: a record has other arrays than before")
        self.given, self.version = record, self.version + 1
        changes = {key: array - self.weights[key] for key, array in floats(new).items()}
        blob = pipeline.encode_many(policy_at(self.policy, self.version).codec_for, changes, mix("broadcast", self.version))
        others = {key: record[key] for key in new if key not in changes}
        self.messages.append(ArrayRecord({BROADCAST: Array("uint8", (len(blob),), BROADCAST, blob), **others}))
        self.weights = _applied(self.weights, self.messages[-1])

    def since(self, version: int | None) -> list[ArrayRecord] | None:
        """Return the messages from a version to the latest; None if a client needs the whole weights."""
        if version is None or self.version - version > len(self.messages):
            return None
        return list(self.messages)[len(self.messages) - (self.version - version) :]


class Broadcasts:
    """The weights that a server sends, by record, and the versions that its clients have."""

    def __init__(self, policy: Policy | ByStep) -> None:
        self.policy = policy
        self._broadcasts: dict[str, _Broadcast] = {}
        self._held: dict[int, dict[str, int]] = {}
        self._on_the_way: dict[int, dict[str, int]] = {}

    def weights(self, name: str) -> NumpyArrays:
        """Return the weights that clients have after the latest message."""
        return self._broadcasts[name].weights

    def content(self, content: RecordDict, node_id: int) -> RecordDict:
        """Return the content of a message with what this client needs in place of its arrays."""
        made = RecordDict({name: record for name, record in content.items() if not isinstance(record, ArrayRecord)})
        versions: dict[str, int] = {}
        for name, record in content.array_records.items():
            if name not in self._broadcasts:
                self._broadcasts[name] = _Broadcast(self.policy, record, numpy_of(record))
            broadcast = self._broadcasts[name]
            broadcast.advance(record)
            versions[name] = broadcast.version
            messages = broadcast.since(self._held.get(node_id, {}).get(name))
            if messages is None:
                made[name] = record_of(broadcast.weights)
                continue
            first = broadcast.version - len(messages) + 1
            made[name] = ArrayRecord({f"{n}/{key}": array for n, each in enumerate(messages, first) for key, array in each.items()})
            versions[f"{name}/from"] = first - 1
        made[_VERSIONS] = ConfigRecord(dict(versions))
        self._on_the_way[node_id] = {name: versions[name] for name in content.array_records}
        return made

    def acknowledge(self, node_id: int, arrived: bool) -> None:
        """Note that a client replied: it has what it was sent, or, if it failed, perhaps nothing."""
        versions = self._on_the_way.pop(node_id, {})
        if arrived:
            self._held.setdefault(node_id, {}).update(versions)
        else:
            self._held.pop(node_id, None)


def received_broadcasts(message: Message, context: Context) -> None:
    """Replace what `Broadcasts` made by whole weights, in a message to a client, which keeps them in its state."""
    if _VERSIONS not in message.content:
        return
    versions = message.content.config_records[_VERSIONS]
    held = context.state.config_records[_VERSIONS] if _VERSIONS in context.state else ConfigRecord()
    for name, record in list(message.content.array_records.items()):
        if f"{name}/from" in versions:
            first, last, have = map(int, (versions[f"{name}/from"], versions[name], held.get(name, -1)))
            if not first <= have <= last:
                raise InputError(f"the server sent {name!r} as a difference to version {first}, this client has version {have}")
            weights = numpy_of(context.state.array_records[_WEIGHTS + name])
            for number in range(have + 1, last + 1):
                start = f"{number}/"
                weights = _applied(weights, ArrayRecord({key.removeprefix(start): a for key, a in record.items() if key.startswith(start)}))
            message.content[name] = record_of(weights)
        context.state[_WEIGHTS + name] = message.content[name]
        held[name] = versions[name]
    context.state[_VERSIONS] = held
    del message.content[_VERSIONS]


def _applied(weights: NumpyArrays, message: ArrayRecord) -> NumpyArrays:
    """Return the next version of weights, in the same way on the server and on clients."""
    changes = pipeline.decode_many(message[BROADCAST].data, max_numel=numel(weights))
    return {key: array + changes[key] if key in changes else message[key].numpy() for key, array in weights.items()}
