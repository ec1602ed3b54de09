"""From the environment of torchrun to the one of TensorFlow, which wants the address of every worker."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import ExitStack

from .launcher import free_port

_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.05


def join() -> None:
    """Set TF_CONFIG. Rank 0 listens at the master's port, where all others leave their addresses and get the whole list."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    workers = _list_all(master, size) if rank == 0 else _leave_address(master, rank)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})


def _list_all(master: tuple[str, int], size: int) -> list[str]:
    workers = [f"{master[0]}:{free_port()}"] + [""] * (size - 1)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(master, backlog=size))
        listener.settimeout(_PATIENCE_SECONDS)
        streams = []
        for _ in range(1, size):
            connection, _ = listener.accept()
            streams.append(stack.enter_context(stack.enter_context(connection).makefile("rw")))
            rank, address = json.loads(streams[-1].readline())
            workers[rank] = address
        for stream in streams:
            stream.write(json.dumps(workers) + "\n")
            stream.flush()
    return workers


def _leave_address(master: tuple[str, int], rank: int) -> list[str]:
    with _connected(master) as connection, connection.makefile("rw") as stream:
        address = f"{connection.getsockname()[0]}:{free_port()}"
        stream.write(json.dumps([rank, address]) + "\n")
        stream.flush()
        workers: list[str] = json.loads(stream.readline())
    return workers


def _connected(master: tuple[str, int]) -> socket.socket:
    """Rank 0 may not listen yet."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection(master, timeout=_PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
