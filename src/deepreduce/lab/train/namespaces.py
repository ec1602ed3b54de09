"""Network namespaces that live as long as a process that waits in them: nothing is left behind, however the launcher ends.

Root makes them as they are. Anybody else makes them inside a user namespace, in which a user may set up networks, where the system allows
that: most Linux systems do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from .failures import LinkError


@dataclass(frozen=True)
class Namespace:
    """A network namespace, held open by a process that ends when its standard input does: with the launcher, at the latest."""

    holder: subprocess.Popen[str]
    in_user_namespace: bool

    @classmethod
    def open(cls) -> Namespace:
        """Return a new namespace: of root's, or in a user namespace of its own."""
        as_user = os.geteuid() != 0
        return cls(_held(["unshare", *(["--user", "--map-root-user"] if as_user else []), "--net"]), as_user)

    def sibling(self) -> Namespace:
        """Return another network namespace, in the same user namespace."""
        return Namespace(_held(self.command(["unshare", "--net"])), self.in_user_namespace)

    @property
    def pid(self) -> str:
        """The process that holds it."""
        return str(self.holder.pid)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs in this namespace, in place of the process that starts it."""
        user = ["--user", "--preserve-credentials"] if self.in_user_namespace else []
        return ["nsenter", "--target", self.pid, *user, "--net", *arguments]

    def run(self, *command: str) -> None:
        """Run a command that sets up the network."""
        done = subprocess.run(self.command(command), capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkError(f"cannot shape links here: `{' '.join(command)}` says: {_last_line(done.stderr) or done.returncode}")

    def close(self) -> None:
        """Let it go; it is gone when the last process in it has ended."""
        self.holder.kill()
        self.holder.communicate()


def _held(make: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process in what `make` makes: `cat` returns the first line when it is there."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen([*make, "cat"], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write("\n")
        holder.stdin.flush()
        answer = holder.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        _, problem = holder.communicate()
        raise LinkError(f"cannot make network namespaces here: `{' '.join(make)}` says: {_last_line(problem) or holder.returncode}")
    return holder


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
