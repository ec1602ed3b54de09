"""Which network interface messages go by is in the log, and in the error of a connection."""

import logging
from datetime import timedelta

import pytest
import torch

from deepreduce.errors import PeerError
from deepreduce.torch import DeepReduceState, allreduce_

from .ranks import run_ranks


class Listener(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def logged(rank, name):
    """What is logged when the first tensor goes out, with GLOO_SOCKET_IFNAME as given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", name) if name else patch.delenv("GLOO_SOCKET_IFNAME")
        patch.setattr("socket.gethostbyname", lambda host: "127.0.0.1")
        log, listener = logging.getLogger("deepreduce"), Listener()
        log.setLevel(logging.INFO)
        log.addHandler(listener)
        allreduce_(torch.ones(4), DeepReduceState("dense"))
    return listener.lines


@pytest.mark.parametrize(
    ("name", "text"), [("lo", "the interface lo, as GLOO_SOCKET_IFNAME says"), (None, "the address 127.0.0.1 of this host's name; GLOO_SO")]
)
def test_the_interface_is_logged(name, text):
    for rank, lines in enumerate(run_ranks(logged, 2, name)):
        assert len(lines) == 1
        assert f"rank {rank} sends over gloo on {text}" in lines[0]


def left_alone(rank):
    state = DeepReduceState("dense", timeout=timedelta(seconds=2))
    allreduce_(torch.ones(4), state)
    if rank == 0:  # the other one does not take part any more
        with pytest.raises(PeerError, match="GLOO_SOCKET_IFNAME names the one to use"):
            allreduce_(torch.ones(4), state)


def test_an_error_of_a_connection_names_the_variable():
    run_ranks(left_alone, 2)
