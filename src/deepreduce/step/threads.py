"""Threads that share the tensors of a bucket, each a range of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np

from ..cores import usable_cores
from ..errors import ConfigError
from ..parameters import natural, shown
from ..tensor import SparseTensor
from .worker import Worker

T = TypeVar("T")


class Threads:
    """The calling thread and up to `count - 1` more, but no more in all than this process may use cores.

    They start with the first work there is for them. A copy, pickled or not, has threads of its own.

    >>> threads = Threads(2)
    >>> arrays = [np.zeros(7), np.ones(3), np.ones(2)]
    >>> threads.share(arrays, lambda part: [array.size for array in arrays[part]])
    [7, 3, 2]
    >>> threads.close()
    """

    def __init__(self, count: int = 1) -> None:
        self._requested = natural(count, "threads")
        if self._requested < 1:
            raise ConfigError(f"threads is an int of at least 1, got {shown(count)}")
        self._workers = [Worker(f"deepreduce thread {number}") for number in range(1, min(self._requested, len(usable_cores())))]

    def __reduce__(self) -> tuple[type[Threads], tuple[int]]:
        return Threads, (self._requested,)

    def __len__(self) -> int:
        return 1 + len(self._workers)

    def share(self, tensors: Sequence[Any], work: Callable[[slice], Sequence[T]]) -> list[T]:
        """Return what `work` returns for all of the tensors, in their order: each thread calls it for a range of them.

        No thread is at work any more when this returns or raises; of several errors, the one of the first range is raised. Tensors of a
        device are left to the calling thread, as the device may keep an order of its own for the work of each thread.
        """
        if not self._workers or len(tensors) < 2 or not all(map(_is_on_host, tensors)):
            return list(work(slice(None)))
        own, *others = ranges(list(map(_numel, tensors)), len(self))
        begun: list[Future[Sequence[T]]] = []
        try:
            for worker, part in zip(self._workers, others, strict=False):
                begun.append(worker.submit(partial(work, part)))
            results = [work(own)]
            for number, part in enumerate(others):
                # A thread that has not begun may be busy with another bucket: its range is not waited for, but done here.
                results.append(work(part) if begun[number].cancel() else begun[number].result())
        finally:
            wait([promise for promise in begun if not promise.cancel()])
            begun.clear()  # an error refers to this frame: with its future it would keep the tensors alive
        return list(chain.from_iterable(results))

    def close(self) -> None:
        """End the threads; the next work would start new ones."""
        for worker in self._workers:
            worker.close()


ONE_THREAD = Threads()


def ranges(sizes: Sequence[int], count: int) -> list[slice]:
    """Return ranges of about the same total size that follow one another, at most `count`, and none of them empty.

    >>> ranges([5, 1, 1, 3], 2)
    [slice(0, 1, None), slice(1, 4, None)]
    """
    ends = np.cumsum(sizes)
    middles = ends - np.asarray(sizes) / 2
    cuts = np.searchsorted(middles, ends[-1] * np.arange(1, count) / count)
    return [slice(low, high) for low, high in pairwise(sorted({0, *cuts.tolist(), len(sizes)}))]


def _is_on_host(tensor: object) -> bool:
    return isinstance(tensor, np.ndarray | SparseTensor)


def _numel(tensor: Any) -> int:
    return tensor.nnz if isinstance(tensor, SparseTensor) else tensor.size
