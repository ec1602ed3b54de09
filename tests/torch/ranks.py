"""Real processes joined by gloo, in a harness that fails fast: no child outlives a call, and the first failure is the one shown."""

import os
import sys
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from multiprocessing import connection, get_context
from runpy import run_path
from socket import socket
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.torch.preload"])


@dataclass
class Outcome:
    """How a rank ended: what it returned, or the traceback of its error, or neither if it died or was killed."""

    rank: int
    value: object = None
    error: str | None = None
    seconds: float = 0.0
    alive: bool = True


def run_ranks(function, size, *arguments, timeout=60, joined=True):
    """What `function(rank, *arguments)` returns on every rank; the traceback of the rank that failed first is raised."""
    outcomes = watch_ranks(function, size, *arguments, timeout=timeout, all_must_end=False, joined=joined)
    failed = [outcome for outcome in outcomes if outcome.error or not outcome.alive]
    if failed:
        first = min(failed, key=lambda outcome: outcome.seconds)
        raise AssertionError(f"rank {first.rank} of {size} failed after {first.seconds:.1f} s:\n{first.error or 'it died'}")
    return [outcome.value for outcome in outcomes]


def watch_ranks(function, size, *arguments, timeout=60, all_must_end=True, joined=True):
    """How every rank ended. Unless `all_must_end`, the others are killed when one fails. No rank is left after `timeout` seconds.

    The ranks are `joined` in a process group, or join by themselves.
    """
    with TemporaryDirectory() as directory:
        store = f"{directory}/store" if joined else None
        pipes, children = [], []
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            child = _CONTEXT.Process(target=_main, args=(there, store, function, rank, size, arguments), daemon=True)
            child.start()
            there.close()
            pipes.append(here)
            children.append(child)
        try:
            return _collect(pipes, timeout, all_must_end)
        finally:
            for child in children:
                child.kill()
                child.join()


def run_script(path, size, *arguments, timeout=120):
    """What rank 0 of a script prints, in processes that find the environment of torchrun."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_ranks(_script, size, path, size, port, arguments, joined=False, timeout=timeout)[0]


def _script(rank, path, size, port, arguments):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [str(path), *arguments]
    with redirect_stdout(StringIO()) as printed:
        run_path(str(path), run_name="__main__")
    return printed.getvalue()


def _collect(pipes, timeout, all_must_end):
    start = time.monotonic()
    outcomes = {}
    while len(outcomes) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        left = start + timeout - time.monotonic()
        ready = connection.wait(waiting, max(0, left))
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(outcomes))
            errors = "\n".join(outcome.error for outcome in outcomes.values() if outcome.error)
            raise AssertionError(f"ranks {missing} did not end within {timeout} s\n{errors}")
        for pipe in ready:
            outcome = _received(pipe, pipes.index(pipe), time.monotonic() - start)
            outcomes[outcome.rank] = outcome
            if not all_must_end and (outcome.error or not outcome.alive):
                return list(outcomes.values())
    return [outcomes[rank] for rank in range(len(pipes))]


def _received(pipe, rank, seconds):
    try:
        value, error = pipe.recv()
    except EOFError:
        return Outcome(rank, seconds=seconds, alive=False)
    return Outcome(rank, value, error, seconds)


def _main(pipe, store, function, rank, size, arguments):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if store:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30))
        pipe.send((function(rank, *arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.poll(None)  # stay until the others have ended too: leaving would close their connections
    os._exit(0)
