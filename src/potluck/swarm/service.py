"""The membership of a running node: carries out what it decides, over the node's links, and tells it what happens there.

Owns the clock's ticks, dials, the discovery and the files; decides nothing.
"""

import asyncio
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path

import msgspec

from potluck.core.errors import DialFailed, PeerRefused, PotluckError
from potluck.identity.keys import NodeKey, short_id
from potluck.identity.signed import Signed
from potluck.net.peers import PeerLinks
from potluck.swarm.acceptance import Trust
from potluck.swarm.adverts import MAX_LINKS, Advert, LinkFigures, sign_advert
from potluck.swarm.dialling import DIAL_TIMEOUT_S
from potluck.swarm.discovery import Discovery, DiscoverySettings
from potluck.swarm.events import Dial, Drop, Event, Outcome
from potluck.swarm.incarnation_file import next_incarnation, store_incarnation
from potluck.swarm.interfaces import Interface, read_interfaces
from potluck.swarm.membership import Membership
from potluck.swarm.peers_file import PeersFile
from potluck.swarm.view import View
from potluck.wire.effects import SendTo
from potluck.wire.messages import SwarmMessage

_LOG = logging.getLogger(__name__)
TICK_S = 0.25
_VIEW_DELAY_S = 0.05  # so that a burst of changes makes one view
_SAVE_LOOK_S = 2.0  # a node may be killed at any moment, and find nobody again where they were not written down
_MAX_DIALS = 32
_FAREWELL_S = 0.2
EXPELLED = "expelled"  # what a door says to whoever was thrown out
_EXPELLED_PAUSE_S = 60.0  # before others are tried that may say something else


class SwarmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`bootstrap`: addresses from an invite. `discovery` None: mDNS is not used."""

    peers_file: Path
    incarnation_file: Path
    bootstrap: tuple[str, ...] = ()
    discovery: DiscoverySettings | None = None


def steady_clock_s() -> float:
    """Monotonic, and where the system can tell it goes on while the machine sleeps: adverts grow old meanwhile."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SwarmService:
    """`start` inside a running loop, `stop` before the links close. Hand it what the links report."""

    def __init__(
        self,
        key: NodeKey,
        links: PeerLinks,
        trust: Trust,
        settings: SwarmSettings,
        on_view: Callable[[View], None],
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = steady_clock_s,
        interfaces: Callable[[], Sequence[Interface]] = read_interfaces,
    ) -> None:
        self._node, self._links, self._trust, self._settings = key.node_id, links, trust, settings
        self._on_view, self._on_event, self._clock = on_view, on_event, clock
        self._peers_file = PeersFile(settings.peers_file)
        self._stored_incarnation = next_incarnation(settings.incarnation_file)
        self.membership = Membership(
            self._node, lambda advert: sign_advert(key, advert), trust, random.SystemRandom(), clock(), self._stored_incarnation
        )  # fmt: skip
        self.discovery: Discovery | None = None
        if settings.discovery is not None:
            self.discovery = Discovery(settings.discovery, self.found, interfaces)
        self._dials = asyncio.Semaphore(_MAX_DIALS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_changes = -1
        self._view_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self.refused_as_expelled_by: bytes | None = None  # the last member that said so, while nobody says otherwise
        self.failure: BaseException | None = None  # of a task that should never end

    def __repr__(self) -> str:
        return f"<SwarmService {self.membership!r}, {len(self._tasks)} tasks>"

    # ------------------------------------------------------------ life

    async def start(self, records: Iterable[Signed] = ()) -> None:
        """`records`: the membership records known so far."""
        now_s = self._clock()
        for peer in await asyncio.to_thread(self._peers_file.load):
            self.membership.remember(peer.id, peer.addresses)
        for address in self._settings.bootstrap:
            self.membership.found(address, now_s)
        self._apply(self.membership.add_records(records, now_s))
        self._own(self._tick())
        self._own(self._keep_files())
        if self.discovery is not None:
            await self.discovery.start()

    async def stop(self) -> None:
        """Says goodbye, and keeps what should be found again."""
        self.publish(None)
        await asyncio.sleep(_FAREWELL_S if self._links.linked() else 0)
        self._is_stopping = True
        if self.discovery is not None:
            await self.discovery.stop()
        if self._view_timer is not None:
            self._view_timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._save, self._known_peers())

    # ------------------------------------------------------------ from the node

    @property
    def view(self) -> View:
        return self.membership.view(self._clock())

    def publish(self, advert: Advert | None) -> None:
        """What this node states about itself from now on; None: nothing."""
        self._apply(self.membership.publish(advert, self._clock()))

    def add_records(self, records: Iterable[Signed]) -> None:
        """Membership records made or received here; they are accepted as if they had come from a peer, and spread."""
        self._apply(self.membership.add_records(records, self._clock()))

    def drop_strangers(self) -> None:
        self._apply(self.membership.drop_strangers(self._clock()))

    def expelled(self) -> None:
        """This node was thrown out, by a signed record: it lets everybody be."""
        self.membership.dialler.pause(math.inf)
        for node in self._links.linked():
            self._links.drop(node, "this node was expelled")

    def found(self, address: str) -> None:
        self.membership.found(address, self._clock())

    def link_figures(self, limit: int = 16) -> tuple[LinkFigures, ...]:
        """Round trips as measured, the nearest first, coarse enough not to change with every ping."""
        nearest = sorted((rtt_us, node) for node, rtt_us in self.membership.gossip.live.rtts_us().items())
        return tuple(LinkFigures(node, _coarse(rtt_us)) for rtt_us, node in nearest[: min(limit, MAX_LINKS)])

    def on_message(self, sender: bytes, message: SwarmMessage) -> None:
        if not self._is_stopping:
            self._apply(self.membership.on_message(sender, message, self._clock()))

    def on_lost(self, node: bytes, reason: str) -> None:
        if not self._links.is_linked(node) and not self._is_stopping:
            self._apply(self.membership.link_lost(node, reason, self._clock()))

    # ------------------------------------------------------------ carrying out

    def _apply(self, outcome: Outcome) -> None:
        for event in outcome.events:
            _LOG.info("%s %s %s", short_id(event.node), event.kind, event.reason)
            if self._on_event is not None:
                self._on_event(event)
        for effect in outcome.effects:
            if isinstance(effect, SendTo):
                if self._links.is_linked(effect.node):
                    self._links.send(effect.node, None, effect.message, effect.body)
            elif isinstance(effect, Dial):
                self._own(self._dial(effect))
            elif isinstance(effect, Drop):
                self._links.drop(effect.node, effect.reason)
        if self.membership.gossip.changes != self._told_changes and self._view_timer is None and not self._is_stopping:
            self._view_timer = asyncio.get_running_loop().call_later(_VIEW_DELAY_S, self._tell_view)

    def _tell_view(self) -> None:
        self._view_timer = None
        self._told_changes = self.membership.gossip.changes
        self._on_view(self.view)

    async def _dial(self, dial: Dial) -> None:
        error: Exception = DialFailed("no address")
        async with self._dials:
            for address in dial.addresses:
                try:
                    peer = dial.node if dial.node and self._links.is_linked(dial.node) else None
                    peer = peer or await self._links.connect(address, dial.node, timeout_s=DIAL_TIMEOUT_S)
                except (PotluckError, OSError) as failure:
                    error = failure
                    continue
                return self._dialled(dial, peer)
        if isinstance(error, PeerRefused) and error.reason == EXPELLED and dial.node is not None:
            self._turned_away(dial.node)
        return self._apply(self.membership.dial_failed(dial, str(error), self._clock()))

    def _turned_away(self, node: bytes) -> None:
        """One member's word is no proof, so it is only heeded while nobody else speaks to this node."""
        if not self._links.linked() and not self._trust.is_expelled(self._node):
            if self.refused_as_expelled_by is None:
                _LOG.warning("node %s says that this node was expelled from the swarm", short_id(node))
            self.refused_as_expelled_by = node
            self.membership.dialler.pause(self._clock() + _EXPELLED_PAUSE_S)

    def _dialled(self, dial: Dial, peer: bytes) -> None:
        if peer == self._node or not self._trust.is_member(peer):
            # Discovery and old addresses lead to whoever answers there; only members are spoken to.
            self._apply(self.membership.dial_failed(dial, "not a member of this swarm", self._clock()))
            self._links.drop(peer, "not a member of this swarm")
        else:
            self.refused_as_expelled_by = None
            self._apply(self.membership.dialled(dial, peer, self._clock()))

    async def _tick(self) -> None:
        while True:
            try:
                self._apply(self.membership.tick(self._clock()))
            except Exception as error:  # a node that no longer pings would look well to itself, and dead to the others
                if repr(error) != repr(self.failure):
                    _LOG.exception("a tick of the swarm service failed")
                self.failure = error
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------ files

    async def _keep_files(self) -> None:
        kept: list[tuple[bytes, tuple[str, ...]]] = []
        while True:
            await asyncio.sleep(_SAVE_LOOK_S)
            known = self._known_peers()
            if known != kept or self.membership.incarnation != self._stored_incarnation:
                kept = known
                await asyncio.to_thread(self._save, known)

    def _known_peers(self) -> list[tuple[bytes, tuple[str, ...]]]:
        adverts = self.membership.gossip.adverts()
        return sorted((advert.node, advert.addresses) for advert in adverts if advert.node != self._node)

    def _save(self, peers: list[tuple[bytes, tuple[str, ...]]]) -> None:
        try:
            self._peers_file.save(peers)
            if self.membership.incarnation != self._stored_incarnation:
                store_incarnation(self._settings.incarnation_file, self.membership.incarnation)
                self._stored_incarnation = self.membership.incarnation
        except OSError as error:  # a full disk must not end a node that runs well
            _LOG.warning("what is known of the swarm cannot be kept: %s", error)

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            _LOG.error("the swarm service failed", exc_info=error)


def _coarse(rtt_us: int) -> int:
    """Rounded to one of four steps per doubling."""
    step = 1 << max(0, rtt_us.bit_length() - 3)
    return (rtt_us + step // 2) // step * step
