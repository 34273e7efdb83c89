"""Several hosts on one machine: Linux network namespaces joined by a bridge that has no way out. Needs the right to make them.

Everything lies in namespaces of its own, also the bridge, so nothing of the real network is touched; all of it goes with `close`.
A host can be unplugged (its link goes down, nobody is told) and the hosts can be parted into groups that do not hear each other.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

_NETWORK = "10.77.0"
_BRIDGES = ("lan0", "lan1", "lan2")
_COMMAND_TIMEOUT_S = 10.0


def why_not() -> str | None:
    """The reason why this machine cannot do it; None where it can."""
    if not hasattr(os, "geteuid") or shutil.which("ip") is None:
        return "network namespaces need Linux and the `ip` command (Debian: iproute2)"
    name = f"plk-{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


def _ip(*arguments: str) -> None:
    command = [shutil.which("ip") or "ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Hosts:
    """`count` hosts with the addresses 10.77.0.1, 10.77.0.2, … on one link. Use with `with`."""

    def __init__(self, count: int) -> None:
        self._name = f"plk-{secrets.token_hex(3)}"
        self._switch = f"{self._name}-switch"
        self.names = [f"{self._name}-{number}" for number in range(1, count + 1)]
        self.addresses = [f"{_NETWORK}.{number}" for number in range(1, count + 1)]

    def __repr__(self) -> str:
        return f"<Hosts {self._name} {len(self.names)}>"

    def __enter__(self) -> Self:
        try:
            self._make_switch()
            for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
                self._make_host(number, name, address)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes everything away; processes inside must have been ended by whoever started them."""
        for name in [*self.names, self._switch]:
            with contextlib.suppress(OSError):  # not made yet
                _ip("netns", "del", name)

    def _make_switch(self) -> None:
        _ip("netns", "add", self._switch)
        for bridge in _BRIDGES:
            # Without snooping, multicast reaches every port: there is no router here to ask who listens.
            _ip("-n", self._switch, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
            _ip("-n", self._switch, "link", "set", bridge, "up")

    def _make_host(self, number: int, name: str, address: str) -> None:
        port = f"port{number}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self._switch, "link", "set", port, "master", _BRIDGES[0], "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "brd", "+", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "dev", "eth0")

    def command(self, number: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on a host."""
        return ["ip", "netns", "exec", self.names[number], *arguments]

    def unplug(self, number: int) -> None:
        """The cable is out: no packet passes, and no connection is told so."""
        _ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{number}", "up")

    def part(self, groups: Iterable[Iterable[int]]) -> None:
        """Hosts of different groups (three at most) no longer hear each other. One group of all heals it."""
        for bridge, group in zip(_BRIDGES, groups, strict=False):
            for number in group:
                _ip("-n", self._switch, "link", "set", f"port{number}", "master", bridge)
