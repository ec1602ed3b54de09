"""Every worker on its own shaped link: a network namespace, a veth pair and a token bucket in both directions, joined by a bridge.

::

    worker 0 [namespace] eth0 ── tbf ──┐
    worker 1 [namespace] eth0 ── tbf ──┤ bridge [namespace]
    worker 2 [namespace] eth0 ── tbf ──┘

Linux only. Needs no root where users may make user namespaces; the network of the host is not touched.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .failures import LinkError
from .namespaces import Namespace

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_INTERFACE = "eth0"
_BRIDGE = "bridge0"
_SUBNET = "10.83.0"
_LATENCY = "400ms"
_CONGESTION = "cubic"  # the default of Linux; bbr, which some hosts have, holds short messages back below the rate of the link


@dataclass(frozen=True)
class Host:
    """One end of the network: where a worker is started, and under which address others find it."""

    address: str
    interface: str
    namespace: Namespace
    switch: Namespace
    port: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return `arguments` as a command that runs on this host."""
        return self.namespace.command(arguments)

    def limit(self, rate: str | None) -> None:
        """Set the rate of its link in both directions, also while it is in use; None for no limit."""
        bucket = None if rate is None else _bucket(parse_rate(rate))
        for namespace, device in ((self.switch, self.port), (self.namespace, self.interface)):
            if bucket is not None:
                namespace.run("tc", "qdisc", "replace", "dev", device, "root", *bucket)
            else:
                with suppress(LinkError):  # it had no limit
                    namespace.run("tc", "qdisc", "delete", "dev", device, "root")


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
    with shaped_links(1, "1gbit"):
        pass


def _check_tools() -> None:
    if sys.platform != "linux":
        raise LinkError(f"shaped links need the network namespaces of Linux; this is {sys.platform}")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_TOOLS[tool] for tool in missing))
        raise LinkError(f"shaped links need the command(s) {', '.join(missing)}: install {packages} (apt-get install {packages})")


@contextmanager
def shaped_links(count: int, rate: str | None) -> Iterator[list[Host]]:
    """Give `count` hosts on links of `rate` to a common bridge; None for no limit. All is gone at the end, whatever happens inside."""
    if rate is not None:
        parse_rate(rate)
    if not 1 <= count <= 250:
        raise ConfigError(f"1 to 250 hosts on shaped links, got {count}")
    _check_tools()
    with ExitStack() as stack:
        switch = Namespace.open()
        stack.callback(switch.close)
        switch.run("ip", "link", "add", _BRIDGE, "type", "bridge")
        switch.run("ip", "link", "set", _BRIDGE, "up")
        hosts = []
        for number in range(count):
            namespace = switch.sibling()
            stack.callback(namespace.close)
            hosts.append(_attached(switch, namespace, number))
            hosts[-1].limit(rate)
        yield hosts


def _attached(switch: Namespace, namespace: Namespace, number: int) -> Host:
    port, address = f"port{number}", f"{_SUBNET}.{number + 1}"
    switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", namespace.pid)
    switch.run("ip", "link", "set", port, "master", _BRIDGE, "up")
    namespace.run("ip", "address", "add", f"{address}/24", "dev", _INTERFACE)
    namespace.run("ip", "link", "set", "lo", "up")
    namespace.run("ip", "link", "set", _INTERFACE, "up")
    if _CONGESTION in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        namespace.run("ip", "route", "change", f"{_SUBNET}.0/24", "dev", _INTERFACE, "src", address, "congctl", _CONGESTION)
    return Host(address, _INTERFACE, namespace, switch, port)


def _bucket(bits: int) -> list[str]:
    """A token bucket of one millisecond: a larger one would let whole compressed messages pass at once, and measure no link at all."""
    burst = max(3200, bits // 8 // 1000)
    return ["tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", _LATENCY]
