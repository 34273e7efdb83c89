"""How much each remote host may try at the door: failed handshakes per time, connections that are half open. No I/O, no clock.

Counts hosts, because strangers have no other name yet; an IPv6 host is its /64, of which anybody has all addresses.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_HOSTS = 1024


@dataclass
class HostLimits:
    """`failures` handshakes may fail at once, and `forgiven_per_s` a second for ever; then the host waits at the door."""

    failures: int = 32
    forgiven_per_s: float = 1.0
    half_open: int = 16
    _levels: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # by host: failures, as of when

    def __repr__(self) -> str:
        return f"<HostLimits {len(self._levels)} hosts with failures>"

    @property
    def hosts(self) -> int:
        return len(self._levels)

    def may_try(self, host: str, now_s: float) -> bool:
        """Whether a connection from this host is worth a handshake."""
        return self._level(host_group(host), now_s) <= self.failures - 1

    def failed(self, host: str, now_s: float) -> None:
        """A handshake with this host came to nothing."""
        group = host_group(host)
        level = self._level(group, now_s)
        self._levels[group] = (min(level + 1.0, float(self.failures)), now_s)
        self._levels.move_to_end(group)
        while len(self._levels) > MAX_HOSTS:
            self._levels.popitem(last=False)

    def _level(self, group: str, now_s: float) -> float:
        level, at_s = self._levels.get(group, (0.0, now_s))
        level -= (now_s - at_s) * self.forgiven_per_s
        if level <= 0.0:
            self._levels.pop(group, None)
            return 0.0
        return level


def host_group(host: str) -> str:
    """What is counted as one host. Text that is no address counts as itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
