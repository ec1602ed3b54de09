"""What is noted of every step beside the statistics of deepreduce. DDP reads the annotations of a hook: they must not be strings here."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from ...steps import Seed
from ...torch import DeepReduceState, deepreduce_hook
from ...torch.stopwatch import Stopwatch
from ...torch.topology import Delivery, Parcel, Topology, Trip
from ...torch.units import Unit


class Probe:
    """Notes when the gradients of a step were ready, the exchanges of an allreduce, and how many elements are zero in one early step.

    The seconds of every allreduce go to the end of `exchanges`.
    """

    def __init__(self, probed_step: int, exchanges: list[float]) -> None:
        self.ready_at, self._exchanges = 0.0, exchanges
        self._probed_step, self._zeros, self._counted = probed_step, 0, 0
        self._busy_until = 0.0

    def hook(self, state: DeepReduceState, bucket: GradBucket) -> Future[torch.Tensor]:
        """For `register_comm_hook`."""
        if state.step == self._probed_step:
            buffer = bucket.buffer()
            self._zeros += buffer.numel() - int(torch.count_nonzero(buffer))
            self._counted += buffer.numel()
        self.ready_at = time.perf_counter()
        reduced = deepreduce_hook(state, bucket)
        return reduced if state.topology else self._timed(reduced, self.ready_at)

    def _timed(self, reduced: Future[torch.Tensor], start: float) -> Future[torch.Tensor]:
        """Buckets of an allreduce share the link: a moment in which two are under way counts once."""

        def note(reduced: Future[torch.Tensor]) -> torch.Tensor:
            end = time.perf_counter()
            self._exchanges.append(max(0.0, end - max(start, self._busy_until)))
            self._busy_until = max(end, self._busy_until)
            return reduced.value()

        return reduced.then(note)

    @property
    def zeros(self) -> float:
        """The share of zeros in the gradient of the probed step, before anything is left out."""
        return self._zeros / self._counted if self._counted else 0.0


class Paced(Stopwatch):
    """Lets nobody go on before all are through an exchange, and does not count that.

    Workers that share the cores of one machine would otherwise decode while others still exchange, and take the processor from them: on
    links of their own they have machines of their own.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._group = group

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        with super().__call__(part):
            yield
        if part == "exchange" and self._group is not None:
            dist.barrier(self._group)


@dataclass(frozen=True)
class Watched(Topology):
    """Another topology, with the seconds of every single exchange put into `exchanges`; `paced` for workers on shaped links."""

    name: ClassVar[str] = "watched"
    inner: Topology
    paced: bool
    exchanges: list[float] = field(repr=False)

    def pack(self, units: Sequence[Unit], seed: Seed) -> Parcel:
        return self.inner.pack(units, seed)

    def failed(self, error: BaseException, size: int) -> Parcel:
        return self.inner.failed(error, size)

    def ship(self, parcel: Parcel, trip: Trip) -> Delivery:
        watch = Paced(trip.link.group) if self.paced else Stopwatch()
        delivery = self.inner.ship(parcel, replace(trip, watch=watch))
        self.exchanges.append(watch.seconds["exchange"])
        for part, seconds in watch.seconds.items():
            trip.watch.seconds[part] += seconds
        return delivery
