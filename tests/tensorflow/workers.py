"""Real processes under MultiWorkerMirroredStrategy, in a harness that fails fast: none outlives a call, and the first failure is shown."""

import json
import os
import socket
import time
import traceback
from contextlib import ExitStack
from multiprocessing import connection, get_context

import pytest

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.tensorflow.preload"])


def run_workers(function, size, *arguments, timeout=300):
    """What `function(rank, strategy, *arguments)` returns on every worker. When one fails, the others are killed."""
    cluster = _free_addresses(size)
    pipes, children = [], []
    try:
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            child = _CONTEXT.Process(target=_main, args=(there, cluster, rank, function, arguments), daemon=True)
            child.start()
            there.close()
            pipes.append(here)
            children.append(child)
        return _collect(pipes, time.monotonic() + timeout)
    finally:
        for child in children:
            child.kill()
            child.join()


def _free_addresses(size):
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(size)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def _collect(pipes, deadline):
    values = {}
    while len(values) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        ready = connection.wait(waiting, max(0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"workers {sorted(set(range(len(pipes))) - set(values))} did not end in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                value, error = pipe.recv()
            except EOFError:
                value, error = None, "it died"
            if error:
                pytest.fail(f"worker {rank} failed:\n{error}")
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _main(pipe, cluster, rank, function, arguments):
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        pipe.send((function(rank, tf.distribute.MultiWorkerMirroredStrategy(), *arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.poll(None)  # stay until the others have ended too: leaving would close their connections
    os._exit(0)
