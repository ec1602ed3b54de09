"""Work that is handed to threads and comes back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from ..cores import usable_cores

T = TypeVar("T")


class OrderedPool(Generic[T]):
    """Runs jobs in `threads` threads, a few ahead, and gives their results to `deliver` in the order of the jobs; here if `threads` is 1.

    >>> done = []
    >>> with OrderedPool(2, done.append) as pool:
    ...     for n in range(5):
    ...         pool.run(lambda n=n: n * n)
    >>> done
    [0, 1, 4, 9, 16]
    """

    def __init__(self, threads: int, deliver: Callable[[T], None]) -> None:
        self._deliver, self._threads = deliver, threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._waiting: deque[Future[T]] = deque()

    def run(self, job: Callable[[], T]) -> None:
        """Take a job; waits while too many are under way."""
        if self._pool is None:
            self._deliver(job())
            return
        self._waiting.append(self._pool.submit(job))
        while len(self._waiting) > self._threads + 1:
            self._deliver(self._waiting.popleft().result())

    def __enter__(self) -> OrderedPool[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            while self._waiting and kind is None:
                self._deliver(self._waiting.popleft().result())
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)


def default_threads() -> int:
    """As many threads as this process may use, at most 8."""
    return min(len(usable_cores()), 8)
