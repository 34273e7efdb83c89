"""A node of a swarm, put together: links that admit members only, gossip, and the steward that follows the plan.

What the roster says decides who is spoken to; what gossip says decides where requests go.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck.core.errors import NotEntitled
from potluck.core.exactness import KNOWN_ARITHMETICS
from potluck.identity.keys import NodeKey, short_id
from potluck.identity.signed import Signed
from potluck.net.addresses import format_address, parse_address
from potluck.net.tls import TlsTransport
from potluck.node.identity_file import PEERS_FILE
from potluck.node.node import Node
from potluck.node.own_addresses import ANY_IPV4, ANY_IPV6, OwnAddresses, ReadInterfaces, listening_families
from potluck.node.own_statement import StewardSettings
from potluck.node.placement import links_of
from potluck.node.steward import Steward
from potluck.swarm.acceptance import Trust
from potluck.swarm.adverts import Advert, LinkFigures
from potluck.swarm.discovery import DiscoverySettings
from potluck.swarm.events import Event
from potluck.swarm.interfaces import read_interfaces
from potluck.swarm.service import SwarmService, SwarmSettings
from potluck.swarm.view import Served, View
from potluck.trust.admission import Admission
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.roster import Roster
from potluck.weights.progress import Progress
from potluck.weights.store import ModelStore

_LOG = logging.getLogger(__name__)
_NEWS_KEPT = 200


class News(msgspec.Struct, frozen=True):
    """Something that happened in the swarm, for people."""

    at_s: float  # of the epoch
    kind: str
    node: bytes
    text: str


class SwarmNodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`listen`: "0.0.0.0:port" is every interface, and the advert names those that others may reach."""

    listen: str
    folder: Path  # where what is known of the swarm is kept
    steward: StewardSettings
    bootstrap: tuple[str, ...] = ()
    uses_discovery: bool = True
    interfaces: tuple[str, ...] = ()


class SwarmNode:
    """`start` it inside a running loop, `stop` it before the loop ends."""

    def __init__(
        self, key: NodeKey, keeper: SwarmKeeper, store: ModelStore, settings: SwarmNodeSettings,
        progress: Callable[[], Progress | None] = lambda: None, say: Callable[[str], None] = _LOG.info,
        interfaces: ReadInterfaces = read_interfaces,
    ) -> None:  # fmt: skip
        self.keeper, self.settings = keeper, settings
        admission = Admission(keeper, time.time)
        self.node = Node(key, TlsTransport(key, admission), admission)
        self.address = ""
        self.view: View | None = None
        self.news: deque[News] = deque(maxlen=_NEWS_KEPT)
        self.on_news: list[Callable[[News], None]] = []
        self.on_changed: list[Callable[[], None]] = []
        self.on_addresses: list[Callable[[tuple[str, ...]], None]] = []
        self.service: SwarmService | None = None
        self.addresses: OwnAddresses | None = None
        self._key, self._say, self._interfaces = key, say, interfaces
        self._has_told_expulsion = False
        self.steward = Steward(
            self.node, store, settings.steward, lambda: keeper.roster, self._publish, self._link_figures, progress, self._note
        )  # fmt: skip
        self.steward.on_changed = self._changed
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<SwarmNode {self.node!r} {self.service!r} {self.steward!r}>"

    async def start(self) -> None:
        self.address = await self._listen()
        self.addresses = OwnAddresses(self.address, self.settings.interfaces, self._on_addresses, self._interfaces)
        self.steward.statement.addresses = self.addresses.current
        trust = Trust(self._accept, self.keeper.may_link, self._is_expelled, self._holds)
        self.service = SwarmService(
            self._key, self.node.links, trust, self._service_settings(), self._on_view, self._on_event,
            interfaces=self._interfaces,
        )  # fmt: skip
        self.node.on_swarm_message = self.service.on_message
        self.node.on_peer_lost = self.service.on_lost
        self.keeper.on_change.append(self._on_roster)
        await self.service.start(self.keeper.roster.records())
        if self.keeper.roster.is_expelled(self.node.id):
            self._on_expelled(self.service)
        self.steward.start()
        self.addresses.start()

    async def _listen(self) -> str:
        """On "[::]:port" both families are heard: a system gives an IPv6 listener IPv6 only."""
        address = await self.node.listen(self.settings.listen)
        host, port = parse_address(address)
        if host == ANY_IPV6:
            await self.node.listen(format_address(ANY_IPV4, port))
        return address

    async def stop(self) -> None:
        if self.addresses is not None:
            await self.addresses.stop()
        await self.steward.stop()
        if self.service is not None:
            self.keeper.on_change.remove(self._on_roster)
            await self.service.stop()
        await self.node.stop()

    def _service_settings(self) -> SwarmSettings:
        host, port = parse_address(self.address)
        discovery = DiscoverySettings(
            self.keeper.roster.swarm, self.node.id, port, self.settings.interfaces, listening_families(host)
        )
        is_only_here = host in ("127.0.0.1", "::1", "localhost") and not self.settings.interfaces
        return SwarmSettings(
            peers_file=self.settings.folder / PEERS_FILE, incarnation_file=self.settings.folder / "incarnation",
            bootstrap=(*self.settings.bootstrap, *self.keeper.introducer_addresses),
            discovery=discovery if self.settings.uses_discovery and not is_only_here else None,
        )  # fmt: skip

    # ------------------------------------------------------------ what the parts tell each other

    def _accept(self, signed: Signed) -> None:
        self.keeper.take(signed)

    def _is_expelled(self, node: bytes) -> bool:
        return self.keeper.roster.is_expelled(node)

    def _holds(self, signed: Signed) -> bool:
        return self.keeper.roster.holds(signed)

    def _publish(self, advert: Advert) -> None:
        if self.service is not None:
            self.service.publish(advert)

    def _link_figures(self) -> tuple[LinkFigures, ...]:
        return () if self.service is None else self.service.link_figures()

    def _on_view(self, seen: View) -> None:
        roster = self.keeper.roster
        served = frozenset(Served(m.subject, m.weights_sha256, a) for m in roster.models() for a in KNOWN_ARITHMETICS)
        self.view = view = seen.trusting(roster.may_serve, served)
        self.node.orchestrator.links_are(links_of(view))
        self.node.orchestrator.offer([(o.node, o.address, o.described, o.is_own) for o in view.offers()])
        self.steward.on_view(view)
        self._changed()

    def _on_event(self, event: Event) -> None:
        if event.kind != "refused":
            self._tell(event.kind, event.node, event.reason)

    def _on_addresses(self, addresses: tuple[str, ...]) -> None:
        self.steward.statement.addresses = addresses
        self.steward.wake()  # its next round tells the others
        for listener in self.on_addresses:
            listener(addresses)
        self._say(f"reachable at {', '.join(addresses)} now")

    def _on_roster(self, before: Roster, after: Roster) -> None:
        # Later: gossip may be in the middle of handing us the very record that made the change.
        self._loop.call_soon(self._spread)

    def _spread(self) -> None:
        """What this node's own commands stated goes to the others; whoever is no member any more goes."""
        if self.service is None:
            return
        known = set(self.service.membership.gossip.membership_records())
        fresh = [record for record in self.keeper.roster.records() if record not in known]
        if fresh:
            self.service.add_records(fresh)
        self.service.drop_strangers()
        if self.keeper.roster.is_expelled(self.node.id):
            self._on_expelled(self.service)
        self._on_view(self.service.view)  # who may serve, and what, may have changed with it

    def _on_expelled(self, service: SwarmService) -> None:
        service.expelled()
        if not self._has_told_expulsion:
            self._has_told_expulsion = True
            _LOG.warning("%s", self.expulsion)
            self._note(self.expulsion)
        # Each time: nobody answers it any more, and waiting for somebody who does would be in vain.
        self.node.orchestrator.abort_all(NotEntitled.code, self.expulsion)

    @property
    def expulsion(self) -> str:
        """What its user should know where this node was thrown out; empty where it was not."""
        roster = self.keeper.roster
        swarm = roster.name or roster.swarm.hex()[:8]
        advice = "ask for a new invite, then type here: potluck leave --forget --new-key, and potluck join"
        if (signer := roster.expelled_by(self.node.id)) is not None:
            return f"this node was expelled from swarm {swarm} by {short_id(signer)}; {advice}"
        if self.service is not None and (teller := self.service.refused_as_expelled_by) is not None:
            return f"{short_id(teller)} says that this node was expelled from swarm {swarm}; if that is so, {advice}"
        return ""

    def _note(self, text: str) -> None:
        self._say(text)
        self._tell("plan", self.node.id, text)

    def _tell(self, kind: str, node: bytes, text: str) -> None:
        news = News(time.time(), kind, node, text)
        self.news.append(news)
        for listener in self.on_news:
            listener(news)

    def _changed(self) -> None:
        for listener in self.on_changed:
            listener()
