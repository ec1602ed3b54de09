"""The frame around a message between ranks: how long it is, which exchange it belongs to, and whether its sender failed.

A rank that cannot make its message sends the reason instead, so that nobody waits for it: every rank then raises, at the same exchange.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, PeerError

Buffer = NDArray[np.uint8]

_HEADER = struct.Struct("<QIIBI")  # payload bytes, channel, step, kind, CRC-32 of what stands before it
HEADER_BYTES = _HEADER.size
_MESSAGE, _FAILURE = 0, 1
_MAX_FAILURE_BYTES = 2000
_REPORTED = "_deepreduce_reported"  # set on an error when all ranks know of it


@dataclass(frozen=True)
class Failure:
    """What a rank sends in place of a message that it could not make."""

    error: Exception

    def text(self) -> bytes:
        """Return the reason, for the other ranks."""
        return f"{type(self.error).__name__}: {self.error}".encode(errors="replace")[:_MAX_FAILURE_BYTES]

    def raise_reported(self) -> NoReturn:
        """Raise the error as one that all ranks were told of."""
        setattr(self.error, _REPORTED, True)
        raise self.error


Payload = bytes | memoryview | Failure


class PeerFailure(PeerError):
    """Another rank sent a `Failure`: all ranks raise this at the same exchange, and can go on with the next one."""


class UnknownLength(CorruptError):
    """The header of a frame cannot be believed: ranks may no longer be at the same collective, so that nothing can follow."""


def is_reported(error: BaseException) -> bool:
    """Return whether all ranks know of an error and are ready for the next exchange: it came from a `Failure`, or was sent in one.

    >>> is_reported(PeerFailure("rank 1 failed")), is_reported(ValueError("here alone"))
    (True, False)
    """
    return isinstance(error, PeerFailure) or (getattr(error, _REPORTED, False) and not isinstance(error, UnknownLength))


@dataclass(frozen=True)
class FrameTag:
    """Which exchange a frame belongs to: the same on all ranks. No message in it is longer than `limit_bytes`."""

    description: str
    channel: int
    step: int
    limit_bytes: int

    def phase(self, name: str) -> FrameTag:
        """Return the tag of one phase of a topology that has several."""
        return FrameTag(self.description, zlib.crc32(name.encode(), self.channel), self.step, self.limit_bytes)

    @property
    def limit_frame_bytes(self) -> int:
        """The longest frame that anyone may send."""
        return HEADER_BYTES + max(self.limit_bytes, _MAX_FAILURE_BYTES)


_REASONS = (
    "all ranks need the same model, spec, topology and checkpoint, and tensors of the same names in the same order",
    "all ranks take equally many steps from the same checkpoint, and meet after the same ones (uneven data? a sync() of one rank alone?)",
)


def write_frame(payload: Payload, tag: FrameTag) -> bytes:
    """Return the frame of a payload.

    >>> frame = write_frame(b"hello", FrameTag("demo", channel=1, step=0, limit_bytes=10))
    >>> frame_bytes(frame) == len(frame) == HEADER_BYTES + 5
    True
    """
    body, kind = (payload.text(), _FAILURE) if isinstance(payload, Failure) else (payload, _MESSAGE)
    header = _HEADER.pack(len(body), tag.channel, tag.step % 2**32, kind, 0)[:-4]
    return b"".join((header, zlib.crc32(header).to_bytes(4, "little"), body))


def frame_bytes(start: bytes | Buffer) -> int:
    """Return the length of the frame that begins here; `CorruptError` if its header was changed."""
    return HEADER_BYTES + _read_header(start)[0]


def read_frames(frames: Sequence[Buffer], tag: FrameTag, rank: int, sent: Payload | None = None) -> list[memoryview]:
    """Return the messages of all ranks. What is not of this exchange is refused, and a `Failure` is raised.

    A rank that has `sent` a failure itself raises its own error: all ranks know of it now.
    """
    if isinstance(sent, Failure):
        sent.raise_reported()
    messages = []
    failure: PeerFailure | None = None
    for sender, frame in enumerate(frames):
        kind, body = _read_frame(frame, sender, tag, rank)
        if kind == _FAILURE and failure is None:
            failure = PeerFailure(f"rank {sender} failed: {bytes(body).decode(errors='replace') or 'see its own error'}")
        messages.append(body)
    if failure is not None:  # when all of them were checked
        raise failure
    return messages


def _read_header(start: bytes | Buffer) -> tuple[int, int, int, int]:
    view = start.data if isinstance(start, np.ndarray) else memoryview(start)
    if len(view) < HEADER_BYTES:
        raise CorruptError(f"a frame has a header of {HEADER_BYTES} bytes, {len(view)} came")
    size_bytes, channel, step, kind, checksum = _HEADER.unpack_from(view)
    if zlib.crc32(view[: HEADER_BYTES - 4]) != checksum:
        raise CorruptError("the header of a frame was changed on its way")
    return size_bytes, channel, step, kind


def _read_frame(frame: Buffer, sender: int, tag: FrameTag, rank: int) -> tuple[int, memoryview]:
    try:
        size_bytes, channel, step, kind = _read_header(frame)
    except CorruptError as error:
        raise CorruptError(f"message of rank {sender} for {tag.description}: {error}") from error
    if (channel, step) != (tag.channel, tag.step % 2**32):
        raise PeerError(
            f"rank {sender} is at step {step} in exchange {channel:08x}, rank {rank} at step {tag.step} in "
            f"{tag.channel:08x} ({tag.description}): {_REASONS[channel == tag.channel]}"
        )
    limit_bytes = tag.limit_bytes if kind == _MESSAGE else _MAX_FAILURE_BYTES
    if size_bytes > limit_bytes or kind not in (_MESSAGE, _FAILURE):
        raise CorruptError(f"rank {sender} announces {size_bytes} bytes of kind {kind} for {tag.description}, limit {limit_bytes}")
    if len(frame) != HEADER_BYTES + size_bytes:
        raise CorruptError(f"rank {sender} announces {size_bytes} bytes for {tag.description}, {len(frame) - HEADER_BYTES} came")
    return kind, frame.data[HEADER_BYTES:]
