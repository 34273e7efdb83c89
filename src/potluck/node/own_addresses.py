"""Where others reach this node, followed while it runs: a network may come after it, and a machine may get another address.

Knows nothing of adverts and files; whoever must hear of a change is told.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from potluck.core.errors import BadRequest
from potluck.net.addresses import format_address, parse_address
from potluck.swarm.interfaces import Interface, choose_interfaces, read_interfaces

_LOG = logging.getLogger(__name__)
LOOK_S = 5.0
ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"  # noqa: S104 - only where the user says so
_MAX_ADDRESSES = 8

ReadInterfaces = Callable[[], Sequence[Interface]]


class OwnAddresses:
    """`start` in a running loop, `stop` before it ends. `on_change` is told the addresses when they are others than before."""

    def __init__(
        self, bound: str, named: tuple[str, ...], on_change: Callable[[tuple[str, ...]], None],
        interfaces: ReadInterfaces = read_interfaces,
    ) -> None:  # fmt: skip
        """Raises BadRequest where there is no interface that could be told."""
        self._bound, self._named, self._on_change, self._interfaces = bound, named, on_change, interfaces
        self.current = reachable_addresses(bound, named, interfaces)
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<OwnAddresses {', '.join(self.current)}{' watched' if self._watching is not None else ''}>"

    def start(self) -> None:
        if parse_address(self._bound)[0] in (ANY_IPV4, ANY_IPV6):  # any other listener has one address for good
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:  # whatever it was: a node that looks no more would be lost with its next address
                _LOG.exception("this node's addresses could not be followed; the next look is in %s s", LOOK_S)

    def look(self) -> None:
        """Follow the interfaces as they are now."""
        try:
            found = reachable_addresses(self._bound, self._named, self._interfaces)
        except (BadRequest, OSError) as error:  # the network is away, or an interface vanished while it was being read
            _LOG.debug("this node's addresses stay as they were: %s", error)
            return
        # One that is away for a moment mostly comes back, and a loopback address leads whoever is told it to itself.
        if found != self.current and not _is_only_here(found):
            self.current = found
            self._on_change(found)


def reachable_addresses(
    bound: str, named: tuple[str, ...] = (), interfaces: ReadInterfaces = read_interfaces
) -> tuple[str, ...]:
    """Where others can reach a listener: its own address, or that of each sensible interface."""
    host, port = parse_address(bound)
    if host not in (ANY_IPV4, ANY_IPV6):
        return (bound,)
    families = listening_families(host)
    there = [each for each in interfaces() if each.family in families]
    chosen = choose_interfaces(there, named)
    if named and not chosen:
        names = ", ".join(dict.fromkeys(each.name for each in there))
        raise BadRequest(f"this machine has no interface {' or '.join(named)}; there are {names or 'none'}")
    found = tuple(dict.fromkeys(format_address(interface.address, port) for interface in chosen))
    if not found:
        raise BadRequest("no network interface is up; listen on 127.0.0.1 to try things out on this machine alone")
    return found[:_MAX_ADDRESSES]


def listening_families(host: str) -> tuple[int, ...]:
    """4, 6 or both: what a listener on this host hears."""
    return (4, 6) if host == ANY_IPV6 else (6,) if ":" in host else (4,)


def _is_only_here(addresses: tuple[str, ...]) -> bool:
    return all(Interface("", parse_address(address)[0]).is_loopback for address in addresses)
