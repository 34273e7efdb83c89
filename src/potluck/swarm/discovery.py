"""Neighbours on the local network, by mDNS. Yields addresses and nothing else: whoever is found still has to prove who it is.

Each interface has a responder of its own, so that one that does not work leaves the others alone. Interfaces that come and go are
followed. Needs no privilege.
"""

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Coroutine, Sequence

import msgspec
from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from potluck.net.addresses import format_address
from potluck.swarm.interfaces import Interface, choose_interfaces, read_interfaces
from potluck.wire.messages import PROTOCOL_VERSION

_LOG = logging.getLogger(__name__)
SERVICE_TYPE = "_potluck._tcp.local."
_PREFIX_CHARACTERS = 16  # of a node's id: enough to tell nodes apart, and nobody is trusted for it
_REFRESH_S = 5.0
_RESOLVE_MS = 3000
_MAX_RESOLVING = 32
_ORDER = (IPVersion.V4Only, IPVersion.V6Only)


class DiscoverySettings(msgspec.Struct, frozen=True):
    """`swarm` None: of whichever swarm (before joining one). `port` None: look, but do not announce.

    `families`: what the node listens on, 4 or 6 or both; only such addresses are announced.
    """

    swarm: bytes | None
    node: bytes
    port: int | None
    named_interfaces: tuple[str, ...] = ()
    families: tuple[int, ...] = (4,)


OnFound = Callable[[str], None]


class Discovery:
    """`start` in a running loop, `stop` before it ends. `on_found` gets each "host:port", perhaps several times."""

    def __init__(
        self,
        settings: DiscoverySettings,
        on_found: OnFound,
        interfaces: Callable[[], Sequence[Interface]] = read_interfaces,
    ) -> None:
        self._settings, self._on_found, self._interfaces = settings, on_found, interfaces
        self._responders: dict[Interface, _Responder] = {}
        self._broken: set[Interface] = set()
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Discovery on {', '.join(each.name for each in self._responders) or 'no interface'}>"

    @property
    def active(self) -> list[Interface]:
        return list(self._responders)

    @property
    def broken(self) -> list[Interface]:
        """Interfaces that were chosen, and on which mDNS cannot be used."""
        return sorted(self._broken)

    async def start(self) -> None:
        await self.refresh()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for interface in list(self._responders):
            await self._close(interface)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Follow the interfaces as they are now."""
        try:
            chosen = choose_interfaces(self._interfaces(), self._settings.named_interfaces)
        except OSError as error:  # an interface vanished while it was being read; the next round sees what is left
            _LOG.warning("network interfaces cannot be read: %s", error)
            return
        for gone in [each for each in self._responders if each not in chosen]:
            await self._close(gone)
        for new in [each for each in chosen if each not in self._responders]:
            await self._open(new)
        self._broken.intersection_update(chosen)

    async def _open(self, interface: Interface) -> None:
        responder = _Responder(interface, self._settings, self._on_found)
        try:
            await responder.start()
        except (OSError, ZeroconfError, RuntimeError, TimeoutError) as error:
            if interface not in self._broken:
                _LOG.warning("mDNS does not work on %s (%s): %s", interface.name, interface.address, error)
            self._broken.add(interface)
            await responder.stop()
        else:
            self._broken.discard(interface)
            self._responders[interface] = responder

    async def _close(self, interface: Interface) -> None:
        await self._responders.pop(interface).stop()


class _Responder:
    """mDNS on one interface."""

    def __init__(self, interface: Interface, settings: DiscoverySettings, on_found: OnFound) -> None:
        self._interface, self._settings, self._on_found = interface, settings, on_found
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises OSError and zeroconf's errors."""
        self._zeroconf = AsyncZeroconf(interfaces=[self._interface.address], ip_version=ip_version(self._interface))
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_change])
        if self._settings.port is not None and self._interface.family in self._settings.families:
            self._info = service_info(self._settings, self._interface.address)
            await self._zeroconf.async_register_service(self._info, allow_name_change=True)

    async def stop(self) -> None:
        """Says goodbye, so that others forget us at once."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._zeroconf is None:
            return
        try:
            if self._browser is not None:
                await self._browser.async_cancel()
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()
        except (OSError, ZeroconfError, RuntimeError) as error:
            _LOG.info("mDNS on %s ended badly: %s", self._interface.name, error)

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed and len(self._tasks) < _MAX_RESOLVING:
            self._own(self._resolve(zeroconf, name))

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if await info.async_request(zeroconf, _RESOLVE_MS):
            for address in found_addresses(info, self._settings):
                self._on_found(address)

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("a neighbour on %s could not be looked up: %s", self._interface.name, error)


def ip_version(interface: Interface) -> IPVersion:
    return IPVersion.V4Only if interface.family == 4 else IPVersion.V6Only


def service_info(settings: DiscoverySettings, address: str) -> AsyncServiceInfo:
    prefix = settings.node.hex()[:_PREFIX_CHARACTERS]
    properties = {"swarm": (settings.swarm or b"").hex(), "node": prefix, "protocol": str(PROTOCOL_VERSION)}
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{prefix}.{SERVICE_TYPE}",
        addresses=[ipaddress.ip_address(address).packed],
        port=settings.port or 0,
        properties=properties,
        server=f"potluck-{prefix}.local.",
    )


def found_addresses(info: AsyncServiceInfo, settings: DiscoverySettings) -> list[str]:
    """Where a neighbour of our swarm can be dialled; nothing for ourselves, other swarms and other protocols."""
    told = {key: value or b"" for key, value in info.properties.items()}
    is_own = told.get(b"node") == settings.node.hex()[:_PREFIX_CHARACTERS].encode()
    is_ours = settings.swarm is None or told.get(b"swarm") == settings.swarm.hex().encode()
    is_understood = told.get(b"protocol") == str(PROTOCOL_VERSION).encode()
    if is_own or not is_ours or not is_understood or not info.port:
        return []
    told_addresses = [address for version in _ORDER for address in info.parsed_addresses(version)]
    usable = [address for address in told_addresses if not ipaddress.ip_address(address).is_link_local]
    return [format_address(address, info.port) for address in usable[:8]]
