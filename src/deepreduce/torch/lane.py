"""Work off the training thread, one thing after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_PATIENCE_SECONDS = 1.0
Job = tuple[Callable[[], Any], "Future[Any]"]


class Lane:
    """One thread that does what it is given, in that order; it starts with the first job and never keeps a process from ending.

    >>> lane = Lane("demo")
    >>> lane.submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a job; its result, or the error it raised, comes by the future."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop, self._jobs, self._thread)
        promise: Future[T] = Future()
        self._jobs.put((work, promise))
        return promise


def _stop(jobs: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    """End a lane, at the latest when the interpreter does: a thread that then still is inside torch would bring the process down."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_SECONDS)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        work, promise = job
        try:
            promise.set_result(work())
        except BaseException as error:
            promise.set_exception(error)
        del job, work, promise  # a job holds gradients: none must live on while the lane waits for the next one
