"""Start the workers, listen to them, and end them all, whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import FrameType
from typing import IO

from ...cores import usable_cores
from ...errors import ConfigError
from .contract import Emit, Event, Plan
from .failures import WorkerError
from .links import Host, shaped_links

FRAMEWORKS = ("torch", "tensorflow", "jax")
_GRACE_SECONDS = 5.0
_TAIL_LINES = 30


@dataclass
class WorkerProcess:
    """One started process. Its standard input is held open: when that ends, so does the worker."""

    rank: int
    process: subprocess.Popen[str]
    errors: IO[str]
    stray_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def tail(self) -> str:
        """Return the last lines it wrote to standard error, and to standard output beside its events."""
        self.errors.seek(0)
        return "".join([*self.errors.readlines()[-_TAIL_LINES:], *self.stray_lines]).strip()


def worker_module(framework: str) -> str:
    """The module that trains with this framework."""
    if framework not in FRAMEWORKS:
        raise ConfigError(f"no framework {framework!r}; there are {', '.join(FRAMEWORKS)}")
    if find_spec(framework) is None:
        raise ConfigError(f"{framework} is not installed: pip install 'deepreduce[{framework}]'")
    return f"deepreduce.lab.train.{framework}_worker"


def joins_others() -> bool:
    """Whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launch(plan: Plan, listen: Emit) -> None:
    """Run all workers of a plan to their end. `listen` gets every event in this thread.

    Raises `WorkerError` with the traceback of the first worker that failed. On Ctrl-C, and on any error, no worker is left.
    """
    module = worker_module(plan.framework)
    with ExitStack() as stack:
        stack.enter_context(_terminable())
        hosts: Sequence[Host | None] = stack.enter_context(shaped_links(plan.workers, plan.link)) if plan.link else [None] * plan.workers
        address = hosts[0].address if hosts[0] else "127.0.0.1"
        environment = {"WORLD_SIZE": str(plan.workers), "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
        workers: list[WorkerProcess] = []
        stack.callback(_end_all, workers)
        all_cores = usable_cores()
        for rank, host in enumerate(hosts):
            cores = share(all_cores, rank, plan.workers)
            with only_on(cores):
                workers.append(_start(module, plan, rank, host, environment | {"OMP_NUM_THREADS": _threads(cores)}))
        _listen_to(workers, listen)


def share(cores: Sequence[int], rank: int, workers: int) -> Sequence[int]:
    """Those of one worker; more workers than cores take turns.

    >>> [share(range(8), rank, 3) for rank in range(3)], [share(range(2), rank, 4) for rank in range(4)]
    ([range(0, 2), range(2, 5), range(5, 8)], [range(0, 1), range(1, 2), range(0, 1), range(1, 2)])
    """
    shares = min(workers, len(cores))
    number = rank % shares
    return cores[number * len(cores) // shares : (number + 1) * len(cores) // shares]


@contextmanager
def only_on(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside stays on these cores, and does not push others from them by waking up (SCHED_BATCH). Linux only.

    Workers that share few cores get in each other's way otherwise: a thread of gloo that finds a connection locked tries again without end,
    and may do so on the core of the thread that holds the lock. An exchange of 2 ms then takes 6.
    """
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    _schedule(cores, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        _schedule(*before)


def _schedule(cores: Iterable[int], policy: int, parameter: os.sched_param) -> None:
    with suppress(OSError):  # a sandbox may forbid it: slower, no more
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, policy, parameter)


def _start(module: str, plan: Plan, rank: int, host: Host | None, shared: dict[str, str]) -> WorkerProcess:
    command = [sys.executable, "-m", module, plan.to_json()]
    environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment["GLOO_SOCKET_IFNAME"] = host.interface if host else _loopback()
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with its worker)
    process = subprocess.Popen(
        host.command(command) if host else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which ends the workers in order
    )
    return WorkerProcess(rank, process, errors)


def _threads(cores: Sequence[int]) -> str:
    return os.environ.get("OMP_NUM_THREADS") or str(len(cores))


def _loopback() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if sys.platform == "linux" else "lo0")


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _listen_to(workers: Sequence[WorkerProcess], listen: Emit) -> None:
    inbox: queue.SimpleQueue[tuple[WorkerProcess, Event | None]] = queue.SimpleQueue()
    for worker in workers:
        threading.Thread(target=_read_events, args=(worker, inbox), daemon=True).start()
    failures: list[Event] = []
    running = len(workers)
    while running:
        worker, event = inbox.get()
        if event is None:
            running -= 1
            if worker.process.wait():
                failures += _drain(inbox)
                raise WorkerError(_blame(worker, failures))
        elif event["event"] == "failed":
            failures.append(event)
        else:
            listen(event)


def _read_events(worker: WorkerProcess, inbox: queue.SimpleQueue[tuple[WorkerProcess, Event | None]]) -> None:
    """Put the events of a worker into the inbox, and None at its end. Lines that are no events are kept for its `tail`."""
    assert worker.process.stdout is not None
    try:
        with worker.process.stdout as lines:
            for line in lines:
                event = _event(line)
                if event is None:
                    worker.stray_lines.append(line)
                else:
                    inbox.put((worker, event))
    finally:
        inbox.put((worker, None))


def _event(line: str) -> Event | None:
    """Return the event of a line; None for what a library printed, or a worker that was killed left unfinished.

    >>> _event('{"event": "ready"}'), _event("hello"), _event("17"), _event('{"event": "re')
    ({'event': 'ready'}, None, None, None)
    """
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _drain(inbox: queue.SimpleQueue[tuple[WorkerProcess, Event | None]]) -> Iterator[Event]:
    with suppress(queue.Empty):
        while True:
            _, event = inbox.get_nowait()
            if event is not None and event["event"] == "failed":
                yield event


def _blame(ended: WorkerProcess, failures: Sequence[Event]) -> str:
    """Of all that failed, the first: the others fell because it did."""
    if failures:
        first = min(failures, key=lambda event: float(event["time"]))
        return f"worker {first['rank']} failed:\n{first['traceback'].rstrip()}"
    code = ended.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"worker {ended.rank} {how}\n{ended.tail()}".rstrip()


def _end_all(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        _signal(worker, signal.SIGTERM)
    for worker in workers:
        try:
            worker.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            _signal(worker, signal.SIGKILL)
            worker.process.wait()
        for stream in (worker.process.stdin, worker.errors):
            if stream is not None:
                stream.close()


def _signal(worker: WorkerProcess, number: signal.Signals) -> None:
    """To the worker and whatever it started."""
    if worker.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, number)


@contextmanager
def _terminable() -> Iterator[None]:
    """A polite `kill` ends the launcher as Ctrl-C does, so that it ends the workers and removes the links too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: Callable[[int, FrameType | None], object] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
