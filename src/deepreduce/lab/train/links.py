"""Every worker on its own shaped link: a network namespace, a veth pair and a token bucket in both directions, joined by a bridge.

::

    worker 0 [namespace] eth ── tbf ──┐
    worker 1 [namespace] eth ── tbf ──┤ bridge
    worker 2 [namespace] eth ── tbf ──┘

Linux only, and root: nothing else can make namespaces and shape links.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .failures import LinkError

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_INTERFACE = "eth0"
_SUBNET = "10.83"
_LATENCY = "400ms"
_CONGESTION = "cubic"  # the default of Linux; bbr, which some hosts have, holds short messages back below the rate of the link
_NAME = re.compile(r"dr(\d+)(w|b|v)\d*")


@dataclass(frozen=True)
class Host:
    """One end of the network: where a worker is started, and under which address others find it."""

    namespace: str
    address: str
    interface: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """`arguments` as a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def parse_rate(text: str) -> int:
    """Return bits per second.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000, 2500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text)
    rate = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if rate < 8000:
        raise ConfigError(f"a rate is a number with bit, kbit, mbit or gbit, of 8kbit at least: 100mbit; got {text!r}")
    return rate


def check_links() -> None:
    """Raise `LinkError`, saying what is missing, where shaped links cannot be made."""
    if sys.platform != "linux":
        raise LinkError(f"--link needs the network namespaces of Linux; this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"--link needs the command(s) {' and '.join(missing)}: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise LinkError("--link makes network namespaces, which only root may: run it with sudo, or without --link")


@contextmanager
def shaped_links(count: int, rate: str | None) -> Iterator[list[Host]]:
    """`count` hosts on links of `rate` to a common bridge; None for no limit. All is removed at the end, whatever happens inside.

    What an earlier process left because it was killed is removed first.
    """
    bits = None if rate is None else parse_rate(rate)
    if not 1 <= count <= 250:
        raise ConfigError(f"1 to 250 hosts on shaped links, got {count}")
    check_links()
    remove_stale()
    prefix = f"dr{os.getpid()}"
    try:
        yield _build(prefix, count, bits)
    finally:
        _remove(prefix, count)


def remove_stale() -> None:
    """Remove the namespaces and bridges of processes that are gone."""
    for name in [*_namespaces(), *_interfaces()]:
        match = _NAME.fullmatch(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _run_quietly("ip", "netns" if match[2] == "w" else "link", "delete", name)


def _build(prefix: str, count: int, bits: int | None) -> list[Host]:
    bridge = f"{prefix}b"
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "link", "set", bridge, "up")
    return [_attach(prefix, bridge, number, bits) for number in range(count)]


def _attach(prefix: str, bridge: str, number: int, bits: int | None) -> Host:
    namespace, outer = f"{prefix}w{number}", f"{prefix}v{number}"
    address = f"{_SUBNET}.{os.getpid() % 250 + 1}.{number + 1}"
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", _INTERFACE, "netns", namespace)
    _run("ip", "link", "set", outer, "master", bridge, "up")
    inside = ("ip", "-n", namespace)
    _run(*inside, "address", "add", f"{address}/24", "dev", _INTERFACE)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", _INTERFACE, "up")
    if _CONGESTION in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        subnet = f"{address.rpartition('.')[0]}.0/24"
        _run(*inside, "route", "change", subnet, "dev", _INTERFACE, "src", address, "congctl", _CONGESTION)
    if bits is not None:
        _run("tc", "qdisc", "add", "dev", outer, "root", *_bucket(bits))
        _run("tc", "-n", namespace, "qdisc", "add", "dev", _INTERFACE, "root", *_bucket(bits))
    return Host(namespace, address, _INTERFACE)


def _bucket(bits: int) -> list[str]:
    """A token bucket of one millisecond: a larger one would let whole compressed messages pass at once, and measure no link at all."""
    burst = max(3200, bits // 8 // 1000)
    return ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", _LATENCY]


def _remove(prefix: str, count: int) -> None:
    for number in range(count):
        _run_quietly("ip", "netns", "delete", f"{prefix}w{number}")
        _run_quietly("ip", "link", "delete", f"{prefix}v{number}")
    _run_quietly("ip", "link", "delete", f"{prefix}b")


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _interfaces() -> list[str]:
    return [path.name for path in Path("/sys/class/net").iterdir()]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"cannot shape links here: `{' '.join(command)}` says: {done.stderr.strip() or done.returncode}")


def _run_quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
