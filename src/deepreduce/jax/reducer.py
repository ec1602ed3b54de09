"""One step on the host, with plain arrays: compensate, encode, exchange, decode, mean, and what is owed afterwards."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import numpy as np

from ..accounting import Stats, StepStats
from ..policy import Policy
from ..steps import Seed, narrow, wide_dtype
from ..tensor import SparseTensor, Values
from . import messages
from .link import Link, Ticket, exchange


class Reducer:
    """Replaces gradients by their means. It remembers nothing but what it cost: all else is given and given back."""

    def __init__(self, policy: Policy, seed: int, stats: Stats) -> None:
        self.policy, self.seed, self.stats = policy, seed, stats

    def reduce(
        self, step: int, names: Sequence[str], gradients: Sequence[Values], owed: Sequence[Values], link: Link
    ) -> tuple[Values, ...]:
        """The means of all gradients, then what each is owed from now on if anything was `owed` before."""
        if not names:
            return ()
        clock = [time.perf_counter()]
        wide = [gradient.astype(wide_dtype(gradient.dtype), copy=False) for gradient in gradients]
        wide = [array + rest for array, rest in zip(wide, owed, strict=True)] if owed else wide
        outgoing = [narrow(array, gradient.dtype) for array, gradient in zip(wide, gradients, strict=True)]
        payload = self._payload(names, outgoing, Seed(self.seed + step, link.rank, link.size))
        clock.append(time.perf_counter())
        sent_before = link.sent_bytes
        received = exchange(link, payload, _ticket(step, names, outgoing))
        clock.append(time.perf_counter())
        parts = [messages.decode(blob, names, outgoing, rank) for rank, blob in enumerate(received)]
        means = [_mean(column, like) for column, like in zip(zip(*parts, strict=True), outgoing, strict=True)]
        if owed and all(np.all(np.isfinite(part.values)) for message in parts for part in message):
            owed = [_rest(array, part) for array, part in zip(wide, parts[link.rank], strict=True)]
        clock.append(time.perf_counter())
        cost = StepStats(step, message_bytes=len(received[link.rank]), sent_bytes=link.sent_bytes - sent_before)
        cost.encode_seconds, cost.exchange_seconds, cost.decode_seconds = np.diff(clock).tolist()
        for name, record in zip(names, messages.records(received[link.rank], names, outgoing), strict=True):
            cost.count(name, record)
        self.stats.add(cost)
        return *means, *owed

    def _payload(self, names: Sequence[str], outgoing: Sequence[Values], seed: Seed) -> bytes | Exception:
        """A message; or the reason why there is none, for the others, who wait for one."""
        try:
            return messages.encode(names, outgoing, self.policy, seed)
        except Exception as error:
            return error


def _mean(parts: Sequence[SparseTensor], like: Values) -> Values:
    """Each part is divided before it is added, in the order of the processes: the same bits everywhere."""
    total = np.zeros(like.size, wide_dtype(like.dtype))
    for part in parts:
        total[part.indices] += part.values.astype(total.dtype, copy=False) / len(parts)
    return narrow(total.reshape(like.shape), like.dtype)


def _rest(wide: Values, sent: SparseTensor) -> Values:
    rest = np.array(wide, order="C")
    rest.reshape(-1)[sent.indices] -= sent.values.astype(rest.dtype, copy=False)
    return rest


def _ticket(step: int, names: Sequence[str], outgoing: Sequence[Values]) -> Ticket:
    identity = repr([(name, array.shape, str(array.dtype)) for name, array in zip(names, outgoing, strict=True)])
    return Ticket(zlib.crc32(identity.encode()), step, sum(20 * array.size + 4096 for array in outgoing))
