"""Which network interfaces discovery uses: the ones that lead to other machines, as far as names and flags tell."""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

import msgspec
import psutil

# Bridges of containers and virtual machines, tunnels, and the ends of both: nobody's neighbours are found there.
_VIRTUAL = re.compile(
    r"(docker|br-|veth|virbr|vmnet|vboxnet|vethernet|tun|tap|utun|wg|tailscale|zt|ppp|ipsec|cni|flannel|cali|lxc|lxd|podman|ifb|dummy)",
    re.IGNORECASE,
)


class Interface(msgspec.Struct, frozen=True, order=True):
    """One address of an interface."""

    name: str
    address: str
    is_up: bool = True

    @property
    def family(self) -> int:
        """4 or 6."""
        return ipaddress.ip_address(self.address).version

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def looks_virtual(self) -> bool:
        return _VIRTUAL.match(self.name) is not None


def choose_interfaces(interfaces: Sequence[Interface], named: Sequence[str] = ()) -> list[Interface]:
    """`named` (names or addresses) where any are given; otherwise real ones, else virtual ones, else loopback."""
    if named:
        return _ordered(each for each in interfaces if each.name in named or each.address in named)
    up = [each for each in interfaces if each.is_up]
    outside = [each for each in up if not each.is_loopback]
    real = [each for each in outside if not each.looks_virtual]
    return _ordered(real or outside or up)


def _ordered(interfaces: Iterable[Interface]) -> list[Interface]:
    """IPv4 first: that is what every node of a home listens on."""
    return sorted(interfaces, key=lambda each: (each.family, each))


def read_interfaces() -> list[Interface]:
    """Every IPv4 address of this machine, and for each interface the IPv6 one that lasts longest."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        is_up = name in states and states[name].isup
        found += [Interface(name, each.address, is_up) for each in addresses if each.family == socket.AF_INET]
        lasting = lasting_ipv6(each.address for each in addresses if each.family == socket.AF_INET6)
        found += [Interface(name, lasting, is_up)] if lasting is not None else []
    return found


def lasting_ipv6(addresses: Iterable[str]) -> str | None:
    """One that others can dial: of the site where there is one, else a global one.

    Link-local ones are left out: they mean something only together with the name of an interface on the machine that dials.
    """
    parsed = [ipaddress.IPv6Address(address.partition("%")[0]) for address in addresses]
    usable = [each for each in parsed if not each.is_link_local and not each.is_multicast and not each.is_unspecified]
    return str(min(usable, key=lambda each: (each.is_global, each))) if usable else None
