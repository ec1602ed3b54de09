"""What a training step cost this rank: bytes and seconds, in all and for every parameter. All adapters count the same way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..message import Record
from ..parameters import shown

if TYPE_CHECKING:
    from rich.table import Table

    from .trial import Choice


_Counted = tuple[int, ...]
"""The fields of a `ParameterStats`: the garbage collector does not look at tuples of numbers, of which a history has very many."""

_LOCK = threading.Lock()  # of all stats: one of their own would keep them from being pickled


def ring_bytes(gradient_bytes: int, workers: int) -> int:
    """What a worker sends in a ring allreduce of dense gradients.

    >>> ring_bytes(1000, workers=2), ring_bytes(1000, workers=4)
    (1000, 1500)
    """
    return 2 * (workers - 1) * gradient_bytes // workers


@dataclass(frozen=True)
class ParameterStats:
    """One parameter in one step: what this rank encoded of it."""

    dense_bytes: int = 0
    message_bytes: int = 0
    nnz: int = 0
    index_bytes: int = 0
    value_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller than dense."""
        return _ratio(self.dense_bytes, self.message_bytes)

    @property
    def bits_per_index(self) -> float:
        """Bits spent on positions for each kept element."""
        return 8 * self.index_bytes / self.nnz if self.nnz else 0.0

    @property
    def bits_per_value(self) -> float:
        """Bits spent on values, and on their order, for each kept element."""
        return 8 * self.value_bytes / self.nnz if self.nnz else 0.0


@dataclass
class StepStats:
    """One step of this rank.

    `message_bytes` is what it encoded of its own gradients, headers included; `sent_bytes` is what it put on the network to get it to the
    others. Encoding, exchange and decoding run beside the backward pass: their seconds are not all waited for.
    """

    step: int
    dense_bytes: int = 0
    message_bytes: int = 0
    sent_bytes: int = 0
    encode_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0
    _counted: dict[str, _Counted] = field(default_factory=dict, repr=False)

    @property
    def parameters(self) -> dict[str, ParameterStats]:
        """What each parameter cost, by its name."""
        return {name: ParameterStats(*counted) for name, counted in self._counted.items()}

    @property
    def ratio(self) -> float:
        """How many times the message is smaller than dense gradients."""
        return _ratio(self.dense_bytes, self.message_bytes)

    @property
    def bits_per_index(self) -> float:
        """Bits spent on positions for each kept element."""
        return self._total().bits_per_index

    @property
    def bits_per_value(self) -> float:
        """Bits spent on values for each kept element."""
        return self._total().bits_per_value

    def _total(self) -> ParameterStats:
        parts = self.parameters.values()
        return ParameterStats(
            nnz=sum(part.nnz for part in parts),
            index_bytes=sum(part.index_bytes for part in parts),
            value_bytes=sum(part.value_bytes for part in parts),
        )

    def count(self, label: str, record: Record) -> None:
        """Count one tensor of a message; several may belong to one parameter."""
        dense_bytes, index_bytes = prod(record.shape) * record.dtype.itemsize, len(record.index_part)
        value_bytes = len(record.order_part) + len(record.value_part)
        counted = dense_bytes, index_bytes + value_bytes, record.nnz, index_bytes, value_bytes
        before = self._counted.get(label)
        self._counted[label] = counted if before is None else tuple(map(add, before, counted))
        self.dense_bytes += dense_bytes

    def count_dense_steps(self, steps: int, gradients: Container[str]) -> None:
        """Let the dense bytes be those of the gradients of so many steps, which the message stands for; other tensors have none."""
        per_step = {label: counted[0] if label in gradients else 0 for label, counted in self._counted.items()}
        self._counted = {label: (steps * per_step[label], *counted[1:]) for label, counted in self._counted.items()}
        self.dense_bytes = steps * sum(per_step.values())

    def merge(self, bucket: StepStats) -> None:
        """Add what something else cost: one bucket or one replica of this step, or one step of many."""
        self.dense_bytes += bucket.dense_bytes
        self.message_bytes += bucket.message_bytes
        self.sent_bytes += bucket.sent_bytes
        self.encode_seconds += bucket.encode_seconds
        self.exchange_seconds += bucket.exchange_seconds
        self.decode_seconds += bucket.decode_seconds
        mine, other = self._counted, bucket._counted
        self._counted = mine | other
        for label in mine.keys() & other.keys():
            self._counted[label] = tuple(map(add, mine[label], other[label]))

    def scalars(self) -> dict[str, float]:
        """The totals by name, for a log."""
        return {
            "dense_bytes": self.dense_bytes,
            "message_bytes": self.message_bytes,
            "sent_bytes": self.sent_bytes,
            "ratio": self.ratio,
            "bits_per_index": self.bits_per_index,
            "bits_per_value": self.bits_per_value,
            "encode_seconds": self.encode_seconds,
            "exchange_seconds": self.exchange_seconds,
            "decode_seconds": self.decode_seconds,
        }


_NONE = StepStats(step=-1)


class Stats:
    """The latest steps of a run, oldest first. Its own `sent_bytes`, `message_bytes` and `dense_bytes` count all steps.

    `choice` is what `never_slower` chose last, and why: None before it has, and without it.

    >>> stats = Stats(history=10)
    >>> stats.add(StepStats(step=0, dense_bytes=4000, message_bytes=40, sent_bytes=44), last=False)
    >>> stats.add(StepStats(step=0, dense_bytes=4000, message_bytes=40, sent_bytes=44), last=True)
    >>> stats.last.ratio, stats.last.sent_bytes
    (100.0, 88)
    >>> stats
    Stats(88 bytes sent, messages 100.0x smaller than dense; of these step 0: 88 bytes, 100.0x)
    """

    def __init__(self, history: int) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ConfigError(f"history is an int of at least 1, got {shown(history)}")
        self.steps: deque[StepStats] = deque(maxlen=history)
        self.sent_bytes = self.message_bytes = self.dense_bytes = 0
        self.choice: Choice | None = None
        self._open = _NONE

    def __repr__(self) -> str:
        if not self.steps:
            return "Stats(no step yet)"
        last = self.last
        step = f"of these step {last.step}: {last.sent_bytes:,} bytes, {last.ratio:.1f}x"
        return f"Stats({self.sent_bytes:,} bytes sent, messages {self.ratio:.1f}x smaller than dense; {step})"

    @property
    def last(self) -> StepStats:
        """The latest finished step."""
        return self.steps[-1] if self.steps else StepStats(step=-1)

    @property
    def ratio(self) -> float:
        """How many times all messages together are smaller than dense gradients."""
        return _ratio(self.dense_bytes, self.message_bytes)

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open.step >= 0

    def add(self, bucket: StepStats, last: bool = True) -> None:
        """Add the cost of one bucket; `last` ends the step. May be called from any thread."""
        with _LOCK:
            if not last and self.steps and self.steps[-1].step == bucket.step:
                self.steps[-1].merge(bucket)  # the last bucket was counted before this one
            else:
                if self._open.step == bucket.step:
                    self._open.merge(bucket)
                else:
                    self._open = bucket
            self.sent_bytes += bucket.sent_bytes
            self.message_bytes += bucket.message_bytes
            self.dense_bytes += bucket.dense_bytes
            if last:
                self.steps.append(self._open)
                self._open = _NONE

    def table(self, rows: int = 20) -> Table:
        """The latest step as a table for `rich.print`: the `rows` parameters that cost most, and the total."""
        from rich.table import Table

        last = self.last
        table = Table(title=f"step {last.step}: {last.sent_bytes:,} bytes sent, {1000 * last.exchange_seconds:.1f} ms on the network")
        table.add_column("parameter")
        for title in ("dense bytes", "bytes", "ratio", "bits/index", "bits/value"):
            table.add_column(title, justify="right")
        dearest = sorted(last.parameters.items(), key=lambda item: -item[1].message_bytes)
        for name, part in dearest[:rows]:
            table.add_row(name, *_cells(part.dense_bytes, part.message_bytes, part.ratio, part.bits_per_index, part.bits_per_value))
        if len(dearest) > rows:
            table.add_row(f"{len(dearest) - rows} more")
        table.add_section()
        table.add_row(
            "all, with headers", *_cells(last.dense_bytes, last.message_bytes, last.ratio, last.bits_per_index, last.bits_per_value)
        )
        return table

    def write(self, writer: Any, prefix: str = "deepreduce", parameters: bool = False) -> None:
        """Give the latest step to a TensorBoard `SummaryWriter`; with `parameters`, the bytes of each as well."""
        last = self.last
        for name, number in last.scalars().items():
            writer.add_scalar(f"{prefix}/{name}", number, last.step)
        for name, part in last.parameters.items() if parameters else ():
            writer.add_scalar(f"{prefix}/parameters/{name}", part.message_bytes, last.step)


def _cells(dense_bytes: int, message_bytes: int, ratio: float, bits_per_index: float, bits_per_value: float) -> list[str]:
    return [f"{dense_bytes:,}", f"{message_bytes:,}", f"{ratio:.1f}x", f"{bits_per_index:.2f}", f"{bits_per_value:.2f}"]


def _ratio(dense_bytes: int, message_bytes: int) -> float:
    return dense_bytes / message_bytes if message_bytes else 1.0
