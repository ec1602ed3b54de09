"""One process per rank, each on a link of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from deepreduce.lab.train.launcher import free_port
from deepreduce.lab.train.links import Host


class RankError(RuntimeError):
    """A rank failed; the last line it wrote says why."""


Started = list[tuple["subprocess.Popen[str]", IO[str]]]


@contextmanager
def started(hosts: Sequence[Host], script: str, job: dict[str, Any]) -> Iterator[Started]:
    """Start a script of this folder once per host, with a job as JSON; all end with the `with`."""
    shared = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(hosts)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / script), json.dumps(job)]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exit cleans up, the default does not
    with ExitStack() as stack:
        ranks: Started = []
        for rank, host in enumerate(hosts):
            environment = os.environ | shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface}
            errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(host.command(command), env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append((process, errors))
        yield ranks


def results(ranks: Started, timeout: float = 3600) -> list[Any]:
    """Return what each rank printed as JSON at its end. A rank that fails ends the wait for the others."""
    end = time.monotonic() + timeout
    while any(process.poll() is None for process, _ in ranks):
        if any(process.poll() for process, _ in ranks):
            time.sleep(1)  # for the reasons of the others
            break
        if time.monotonic() > end:
            raise RankError(f"no result within {timeout:.0f} s")
        time.sleep(0.1)
    failed = [(process, errors) for process, errors in ranks if process.poll()]
    if failed:
        raise RankError(" / ".join(dict.fromkeys(_reason(process, errors) for process, errors in failed)))
    outputs = [process.stdout.read() for process, _ in ranks if process.stdout]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _reason(process: subprocess.Popen[str], errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if "Error" in line or "what():" in line]
    code = process.returncode
    return lines[-1][:200] if lines else (signal.Signals(-code).name if code < 0 else f"exit code {code}")


def run(hosts: Sequence[Host], script: str, job: dict[str, Any], timeout: float = 3600) -> list[Any]:
    """Start, wait, and return the results of all ranks."""
    with started(hosts, script, job) as ranks:
        return results(ranks, timeout)


def sent_by_interface() -> int:
    """Return how many bytes the network interface of this rank has sent so far, headers included."""
    lines = (line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)
    counters = {name.strip(): numbers.split() for name, numbers in lines}
    return int(counters[os.environ["GLOO_SOCKET_IFNAME"]][8])
