"""Which network interfaces discovery uses: the ones that lead to other machines, as far as names and flags tell."""

import ipaddress
import re
import socket
from collections.abc import Sequence

import msgspec
import psutil

# Bridges of containers and virtual machines, tunnels, and the ends of both: nobody's neighbours are found there.
_VIRTUAL = re.compile(
    r"(docker|br-|veth|virbr|vmnet|vboxnet|vethernet|tun|tap|utun|wg|tailscale|zt|ppp|ipsec|cni|flannel|cali|lxc|lxd|podman|ifb|dummy)",
    re.IGNORECASE,
)


class Interface(msgspec.Struct, frozen=True, order=True):
    """One IPv4 address of an interface."""

    name: str
    address: str
    is_up: bool = True

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def looks_virtual(self) -> bool:
        return _VIRTUAL.match(self.name) is not None


def choose_interfaces(interfaces: Sequence[Interface], named: Sequence[str] = ()) -> list[Interface]:
    """`named` (names or addresses) where any are given; otherwise real ones, else virtual ones, else loopback."""
    if named:
        return sorted(each for each in interfaces if each.name in named or each.address in named)
    up = [each for each in interfaces if each.is_up]
    outside = [each for each in up if not each.is_loopback]
    real = [each for each in outside if not each.looks_virtual]
    return sorted(real or outside or up)


def read_interfaces() -> list[Interface]:
    """Every IPv4 address of this machine."""
    states = psutil.net_if_stats()
    return [
        Interface(name, each.address, name in states and states[name].isup)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    ]
