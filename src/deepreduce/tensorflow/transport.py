"""Frames over the all-gather of a strategy, which only a graph can call.

A step runs in a thread of its own. Where it exchanges, it hands its frame to the graph, which gathers the frames of all replicas and hands
them back.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, PeerError
from ..step.frame import Buffer, Failure, FrameTag, write_frame
from ..step.transport import GatherOnly, checked_bytes, padded
from ..step.worker import Worker

Words = NDArray[np.int32]
"""Frames travel as int32, which every collective takes, padded to whole words."""

T = TypeVar("T")


class Replicas(GatherOnly):
    """The replicas of a strategy, for a thread beside the graph. Bytes are counted as a ring sends them, padded to the longest frame."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.outgoing: SimpleQueue[Words] = SimpleQueue()
        self.incoming: SimpleQueue[Words | None] = SimpleQueue()
        self._tag = FrameTag("a step that did not begin", 0, 0, 0)

    def all_gather(self, frame: bytes, tag: FrameTag) -> list[Buffer]:
        self._tag = tag
        self.outgoing.put(to_words(frame))
        gathered = self.incoming.get()
        if gathered is None:
            raise PeerError(f"rank {self.rank} could not exchange {tag.description} in step {tag.step}: the step was given up")
        frames = from_words(gathered, self.size, tag)
        self.sent_bytes += (self.size - 1) * max(_whole(frame.size) for frame in frames)
        return frames

    def final_frame(self, error: Exception | None) -> Words:
        """Return the frame for exchanges that come after the end of the step."""
        return to_words(write_frame(b"" if error is None else Failure(error), self._tag))


class HostStep(Generic[T]):
    """One step of one replica. `work` runs in a thread; the graph calls `first`, `following` before each further exchange, and `last`.

    If `work` ends too early, the error waits for `last`: this replica still takes part in all exchanges, so that no other waits for it.
    """

    def __init__(self, worker: Worker, transport: Replicas, rounds: int, work: Callable[[Replicas], T]) -> None:
        self._transport = transport
        self._result = worker.submit(lambda: _run(transport, rounds, work))

    def first(self) -> Words:
        """Return the frame for the first exchange."""
        return self._transport.outgoing.get()

    def following(self, gathered: Words) -> Words:
        """Take the frames of all replicas, and return that for the next exchange."""
        self._transport.incoming.put(gathered)
        return self._transport.outgoing.get()

    def last(self, gathered: Words) -> T:
        """Take the frames of all replicas, and return what the work returns, or raise its error."""
        self._transport.incoming.put(gathered)
        self.give_up()  # there is no further exchange
        return self._result.result()

    def give_up(self) -> None:
        """End the work at its next exchange."""
        self._transport.incoming.put(None)


def _run(transport: Replicas, rounds: int, work: Callable[[Replicas], T]) -> T:
    failure: Exception | None = None
    try:
        return work(transport)
    except Exception as error:
        failure = error
        raise
    finally:
        for _ in range(rounds):
            transport.outgoing.put(transport.final_frame(failure))


def to_words(frame: bytes) -> Words:
    """Return a frame as whole words.

    >>> to_words(b"12345").tolist()
    [875770417, 53]
    """
    return padded(frame, _whole(len(frame))).view(np.int32)


def from_words(words: Any, size: int, tag: FrameTag) -> list[Buffer]:
    """Return the frames of all replicas, which follow one another.

    >>> tag = FrameTag("demo", 0, 0, 9)
    >>> gathered = np.concatenate([to_words(write_frame(body, tag)) for body in (b"12345", b"6")])
    >>> [bytes(frame[-1:]) for frame in from_words(gathered, 2, tag)]
    [b'5', b'6']
    """
    rest, frames = np.ascontiguousarray(words).view(np.uint8), []
    for sender in range(size):
        size_bytes = checked_bytes(rest, sender, tag)
        frames.append(rest[:size_bytes])
        rest = rest[_whole(size_bytes) :]
    if rest.size:
        raise CorruptError(f"{rest.size} bytes came after the frames of {size} replicas for {tag.description}")
    return frames


def _whole(size_bytes: int) -> int:
    return size_bytes + -size_bytes % 4
