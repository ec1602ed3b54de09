"""Real processes of jax.distributed, in a harness that fails fast: no child outlives it, and the first failure is the one shown."""

import socket
import time
import traceback
from multiprocessing import connection, get_context

_CONTEXT = get_context("spawn")  # JAX has threads from the start, and does not survive a fork


class Processes:
    """So many processes, which are ready for `run` until the end of the `with` block."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        port = _free_port()
        self._pipes, self._children = [], []
        for rank in range(self.size):
            here, there = _CONTEXT.Pipe()
            child = _CONTEXT.Process(target=_serve, args=(there, port, rank, self.size), daemon=True)
            child.start()
            there.close()
            self._pipes.append(here)
            self._children.append(child)
        return self

    def __exit__(self, *error):
        for child in self._children:
            child.kill()
            child.join()
        for pipe in self._pipes:
            pipe.close()

    def run(self, function, *arguments, timeout=60):
        """What `function(rank, *arguments)` returns in every process; the traceback of the process that failed first is raised."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        deadline, values = time.monotonic() + timeout, {}
        while len(values) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in values}
            ready = connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            assert ready, f"processes {sorted(waiting.values())} did not answer within {timeout} s"
            for pipe in ready:
                values[waiting[pipe]] = _received(pipe, waiting[pipe])
        return [values[rank] for rank in range(self.size)]


def _received(pipe, rank):
    try:
        value, error = pipe.recv()
    except EOFError:
        raise AssertionError(f"process {rank} died") from None
    assert error is None, f"process {rank} failed:\n{error}"
    return value


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe, port, rank, size):
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, initialization_timeout=60)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = function(rank, *arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)
