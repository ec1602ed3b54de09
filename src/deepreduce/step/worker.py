"""Work off the training thread, one job after another."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_PATIENCE_SECONDS = 5.0
Job = tuple[Callable[[], Any], "Future[Any]"]
_running: dict[threading.Thread, SimpleQueue[Job | None]] = {}
_STARTING = threading.Lock()


class Worker:
    """One thread that does what it is given, in that order; it starts with the first job, and a process ends without it if it hangs.

    >>> worker = Worker("demo")
    >>> worker.submit(lambda: 6 * 7).result()
    42
    >>> worker.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a job; its result, or the error it raised, comes by the future. A job that is cancelled before it starts is not run."""
        if not self._is_running():
            with _STARTING:
                self._start()
        promise: Future[T] = Future()
        self._jobs.put((work, promise))
        return promise

    def _is_running(self) -> bool:
        thread = self._thread  # which `close` may take away
        return thread is not None and thread.is_alive()  # a process that was forked has none of the threads

    def _start(self) -> None:
        if not self._is_running():  # else another thread has done it
            self._jobs = SimpleQueue()
            self._thread = _started(self._name, self._jobs)
            weakref.finalize(self, self._jobs.put, None)

    def close(self) -> None:
        """Finish all jobs and end the thread; the next job starts a new one."""
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(_PATIENCE_SECONDS)
            self._thread, self._jobs = None, SimpleQueue()


def _started(name: str, jobs: SimpleQueue[Job | None]) -> threading.Thread:
    for ended in [thread for thread in _running if not thread.is_alive()]:
        del _running[ended]
    thread = threading.Thread(target=_serve, args=(jobs,), name=name, daemon=True)
    thread.start()
    _running[thread] = jobs
    return thread


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        work, promise = job
        if promise.set_running_or_notify_cancel():
            try:
                promise.set_result(work())
            except BaseException as error:
                promise.set_exception(error)
        del job, work, promise  # a job holds gradients: none must live on while the worker waits for the next one


@atexit.register
def _leave() -> None:
    """End all workers before the interpreter ends: a thread that still is inside a framework then would bring the process down.

    Also those whose `Worker` is gone. Their last job may be what held it, with the whole process group, and be about to close that.
    """
    for jobs in _running.values():
        jobs.put(None)
    for thread in _running:
        thread.join(_PATIENCE_SECONDS)
