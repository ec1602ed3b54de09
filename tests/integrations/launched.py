"""The environment that torchrun gives its processes: tools read their place in it."""

import os
import socket


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_if_launched(rank, size, port):
    """Set the variables of torchrun in this process."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
