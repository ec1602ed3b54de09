"""How frames travel between ranks: the contract of a transport, and the part that all transports with padded collectives share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError
from .frame import HEADER_BYTES, Buffer, FrameTag, UnknownLength, frame_bytes, is_reported, read_frames, write_frame

ROOT = 0
"""The rank that gathers and broadcasts."""


class Transport(ABC):
    """The ranks of one group, for frames whose sizes differ. `sent_bytes` counts what this rank puts on the network.

    Every method is called by all ranks in the same order. A rank's own frame comes back as it went. Buffers are host memory here; a
    transport may copy to a device and back to use the collectives of that device. An error of the network is a `PeerError`.
    """

    rank: int
    size: int
    sent_bytes: int = 0

    @abstractmethod
    def all_gather(self, frame: bytes, tag: FrameTag) -> list[Buffer]:
        """Return the frames of all ranks, in the order of the ranks."""

    @abstractmethod
    def gather(self, frame: bytes, tag: FrameTag) -> list[Buffer] | None:
        """Return the frames of all ranks at the root, None elsewhere."""

    @abstractmethod
    def broadcast(self, frame: bytes | None, tag: FrameTag) -> Buffer:
        """Return the frame of the root, which alone gives one."""

    @abstractmethod
    def all_to_all(self, frames: Sequence[bytes], tag: FrameTag) -> list[Buffer]:
        """Send one frame to every rank; return the one that every rank sent here."""

    def close(self) -> None:
        """Close the connections: ranks that wait for this one get an error."""
        return None


class SingleRank(Transport):
    """One rank: everything comes back.

    >>> [bytes(frame) for frame in SingleRank().all_gather(b"frame", FrameTag("demo", 0, 0, 10))]
    [b'frame']
    """

    rank, size = 0, 1

    def all_gather(self, frame: bytes, tag: FrameTag) -> list[Buffer]:
        return [np.frombuffer(frame, np.uint8)]

    def gather(self, frame: bytes, tag: FrameTag) -> list[Buffer] | None:
        return self.all_gather(frame, tag)

    def broadcast(self, frame: bytes | None, tag: FrameTag) -> Buffer:
        return np.frombuffer(frame or b"", np.uint8)

    def all_to_all(self, frames: Sequence[bytes], tag: FrameTag) -> list[Buffer]:
        return self.all_gather(frames[0], tag)


class GatherOnly(Transport):
    """A transport that has an all-gather only: the other exchanges are made of it, at its volume."""

    def gather(self, frame: bytes, tag: FrameTag) -> list[Buffer] | None:
        frames = self.all_gather(frame, tag)
        return frames if self.rank == ROOT else None

    def broadcast(self, frame: bytes | None, tag: FrameTag) -> Buffer:
        return self.all_gather(write_frame(b"", tag) if frame is None else frame, tag)[ROOT]

    def all_to_all(self, frames: Sequence[bytes], tag: FrameTag) -> list[Buffer]:
        together = replace(tag, limit_bytes=self.size * (tag.limit_frame_bytes + 8))
        sizes = np.array([len(frame) for frame in frames], "<u8").tobytes()
        everyone = self.all_gather(write_frame(b"".join([sizes, *frames]), together), together)
        return [self._mine(joined, sender) for sender, joined in enumerate(read_frames(everyone, together, self.rank))]

    def _mine(self, joined: memoryview, sender: int) -> Buffer:
        table_bytes = 8 * self.size
        if len(joined) < table_bytes:
            raise CorruptError(f"rank {sender} sent {len(joined)} bytes, too few for the sizes of {self.size} frames")
        ends = table_bytes + np.cumsum(np.frombuffer(joined[:table_bytes], "<u8").astype(np.float64))
        if ends[-1] != len(joined):
            raise CorruptError(f"rank {sender} sent {len(joined)} bytes that do not hold a frame for each of {self.size} ranks")
        start = table_bytes if self.rank == 0 else int(ends[self.rank - 1])
        return np.frombuffer(joined[start : int(ends[self.rank])], np.uint8)


class Padded(GatherOnly):
    """Frames of unequal sizes over an all-gather of equal ones.

    A buffer has the capacity that the sizes of the previous exchange suggest, so that one collective is enough; what does not fit follows
    in a second one. The headers of the frames say all sizes, and are checked before anything is allocated by them.
    """

    def __init__(self) -> None:
        self._capacities: dict[int, int] = {}

    def all_gather(self, frame: bytes, tag: FrameTag) -> list[Buffer]:
        capacity = self.capacity(tag)
        fronts = self._all_gather(padded(frame[:capacity], capacity), tag)
        sizes = [checked_bytes(front, rank, tag) for rank, front in enumerate(fronts)]
        if (missing := max(sizes) - capacity) > 0:
            rests = self._all_gather(padded(frame[capacity:], self.with_headroom(missing)), tag)
            fronts = [np.concatenate(pair) for pair in zip(fronts, rests, strict=True)]
        self.update_capacity(tag, max(sizes))
        return [front[:size] for front, size in zip(fronts, sizes, strict=True)]

    def capacity(self, tag: FrameTag) -> int:
        """Return the size of the buffer for the next frame of a channel."""
        return self._capacities.get(tag.channel, self.with_headroom(HEADER_BYTES))

    def update_capacity(self, tag: FrameTag, longest: int) -> None:
        """Set the capacity of a channel after frames of at most this size; after a peak it shrinks slowly."""
        before = self.capacity(tag)
        self._capacities[tag.channel] = max(self.with_headroom(longest), before - before // 32)

    def with_headroom(self, size_bytes: int) -> int:
        """Return a capacity for frames like this one: some padding costs less than a second collective."""
        return size_bytes + size_bytes // 32 + 64

    @abstractmethod
    def _all_gather(self, buffer: Buffer, tag: FrameTag) -> list[Buffer]:
        """Return the buffers of all ranks, which are all of one size."""


def close_unless_reported(transport: Transport, error: BaseException) -> None:
    """Close a transport after an error that other ranks do not know of, so that none waits. After one they were told of, all can go on."""
    if not is_reported(error):
        transport.close()


def all_gather_array(array: NDArray[Any], transport: Transport, tag: FrameTag) -> NDArray[Any]:
    """Return the arrays of all ranks, which have one size and dtype, as the rows of one.

    >>> all_gather_array(np.array([1.5, 2.0]), SingleRank(), FrameTag("demo", 0, 0, 16))
    array([[1.5, 2. ]])
    """
    frames = transport.all_gather(write_frame(array.tobytes(), tag), tag)
    rows = read_frames(frames, tag, transport.rank)
    for sender, row in enumerate(rows):
        if len(row) != array.nbytes:
            raise CorruptError(f"rank {sender} sent {len(row)} bytes for {tag.description}, here they are {array.nbytes}")
    return np.frombuffer(b"".join(rows), array.dtype).reshape(len(rows), *array.shape)


def checked_bytes(start: Buffer, sender: int, tag: FrameTag) -> int:
    """Return the length of a frame whose header came from `sender`, at most what the exchange allows."""
    try:
        size_bytes = frame_bytes(start)
    except CorruptError as error:
        raise UnknownLength(f"message of rank {sender} for {tag.description}: {error}") from error
    if size_bytes > tag.limit_frame_bytes:
        raise UnknownLength(f"rank {sender} announces a frame of {size_bytes} bytes for {tag.description}, limit {tag.limit_frame_bytes}")
    return size_bytes


def padded(content: bytes, size_bytes: int) -> Buffer:
    """Return the content in a new buffer of this size, with zeros behind it."""
    buffer = np.zeros(size_bytes, np.uint8)
    buffer[: len(content)] = np.frombuffer(content, np.uint8)
    return buffer
