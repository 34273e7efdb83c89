"""One node's part in the swarm's gossip: what comes in, from links and clock, and what it leads to. No I/O; time is told.

News is announced by its digest to a few linked nodes, which ask for what they lack (`spreading.py`); now and then two nodes compare all
they hold (`exchange.py`). What arrives is taken or refused by `intake.py`; who is there is `presence.py`'s business.
"""

import random
from collections import Counter
from collections.abc import Iterable

from potluck.identity.keys import short_id
from potluck.identity.signed import Signed
from potluck.swarm import exchange
from potluck.swarm.acceptance import Trust
from potluck.swarm.adverts import ADVERT, Advert, AdvertReader, Stamp
from potluck.swarm.duplicates import Duplicate
from potluck.swarm.events import Outcome
from potluck.swarm.findings import Findings
from potluck.swarm.intake import Intake
from potluck.swarm.liveness import Liveness, Standing
from potluck.swarm.own_advert import OwnAdvert
from potluck.swarm.presence import Presence
from potluck.swarm.records import Entry, RecordStore, parse_digests, parse_keys, unpacked_digests
from potluck.swarm.spreading import Spreading
from potluck.swarm.view import Seen, View
from potluck.wire.messages import (
    Buckets,
    Digests,
    Ping,
    Pong,
    Records,
    Summary,
    Suspicion,
    SwarmMessage,
    TellMe,
    Wanted,
)

_WELCOME_GAP_S = 0.25
_SLEPT_S = 10.0  # no tick for so long: this machine did not run


class Gossip:
    """Every input returns what is to be done; nothing is called from inside but `trust` and `sign`."""

    def __init__(
        self, own: OwnAdvert, trust: Trust, draw: random.Random, now_s: float, reader: AdvertReader | None = None
    ) -> None:
        self.node = own.node
        self.own = own
        self.store = RecordStore()
        self.linked: dict[bytes, None] = {}
        self.findings = Findings()
        self._trust, self._draw = trust, draw
        self._spreading = Spreading(own.node, self.store, self.linked, draw, self.findings, now_s)
        self.presence = Presence(self.store, self.linked, self._spreading, self.findings, draw, now_s)
        self.intake = Intake(
            own, trust, reader or AdvertReader(), self.store, self.presence, self._spreading, self.findings
        )
        self._exchange_s = self._welcome_s = self._last_tick_s = now_s
        self._view: View | None = None

    def __repr__(self) -> str:
        return f"<Gossip {short_id(self.node)} {self.store!r}, {self.presence!r}>"

    # ------------------------------------------------------------ what others may ask

    @property
    def counters(self) -> Counter[str]:
        """Records and messages that were refused, by reason."""
        return self.intake.counters

    @property
    def changes(self) -> int:
        return self.findings.changes

    @property
    def live(self) -> Liveness:
        return self.presence.live

    def advert(self, node: bytes) -> Advert | None:
        return self.presence.advert(node)

    def is_present(self, node: bytes) -> bool:
        return self.presence.is_present(node)

    def adverts(self) -> list[Advert]:
        """Everybody who would be in a view, this node included."""
        return [entry.advert for entry in self._present() if entry.advert is not None]

    def _present(self) -> list[Entry]:
        return [entry for entry in self.store.adverts() if self.is_present(entry.record.signer)]

    def membership_records(self) -> list[Signed]:
        return [entry.record for entry in self.store if entry.advert is None]

    def view(self, now_s: float) -> View:
        """The same value as last time where nothing changed."""
        if self._view is None or self._view.version != self.changes:
            nodes = {
                entry.record.signer: self._seen(entry, entry.advert)
                for entry in self._present()
                if entry.advert is not None
            }
            twins = self._twins(nodes, now_s)
            self._view = View(self.node, now_s, self.changes, nodes, self._spreading.is_sparse, twins)
        return self._view

    def _twins(self, nodes: Iterable[bytes], now_s: float) -> tuple[Duplicate, ...]:
        found = [*(self.intake.duplicates.duplicate(node, now_s) for node in nodes), self.own.twin(now_s)]
        return tuple(twin for twin in found if twin is not None)

    def _seen(self, entry: Entry, advert: Advert) -> Seen:
        node, live = advert.node, self.presence.live
        return Seen(
            advert, entry.born_s, entry.expires_s, node == self.node, node in self.linked,
            live.standing(node) is Standing.SUSPECT, live.rtt_us(node),
        )  # fmt: skip

    # ------------------------------------------------------------ inputs

    def publish(self, advert: Advert | None, now_s: float) -> Outcome:
        """What this node states from now on; None: nothing (its research switch is off, or it leaves)."""
        self.own.set_facts(advert)
        self.intake.publish_if_due(now_s)
        return self._end_of_input(now_s)

    def add_records(self, records: Iterable[Signed], now_s: float) -> Outcome:
        """Membership records made here, or known from before."""
        self.intake.take_membership(records, self.node, now_s)
        return self._end_of_input(now_s)

    def drop_strangers(self, now_s: float) -> Outcome:
        """The roster changed by other means than a gossiped record."""
        self.intake.drop_strangers(now_s)
        return self._end_of_input(now_s)

    def link_up(self, node: bytes, now_s: float) -> Outcome:
        if node not in self.linked and node != self.node:
            self._welcome(node, now_s)
            self._hear_from(node, now_s)
            self.presence.ping(node, now_s)
        return self._end_of_input(now_s)

    def link_lost(self, node: bytes, now_s: float, reason: str = "the link broke") -> Outcome:
        self.presence.link_lost(node, now_s, reason)
        return self._end_of_input(now_s)

    def unreachable(self, node: bytes, dialled_s: float, now_s: float, reason: str) -> Outcome:
        """This node dialled it, in vain."""
        self.presence.unreachable(node, dialled_s, now_s, reason)
        return self._end_of_input(now_s)

    def on_message(self, sender: bytes, message: SwarmMessage, now_s: float) -> Outcome:
        if sender not in self.linked:
            self._welcome(sender, now_s)  # who speaks to us is linked
        self._hear_from(sender, now_s)
        try:
            self._handle(sender, message, now_s)
        except ValueError:
            self.counters["malformed"] += 1
        return self._end_of_input(now_s)

    def tick(self, now_s: float) -> Outcome:
        """To be called about four times a second."""
        if now_s - self._last_tick_s > _SLEPT_S:
            self.presence.live.slept()
            self.intake.asking.slept()
            self._exchange_s = now_s
        self._last_tick_s = now_s
        self.intake.forget_expired(now_s)
        self._forget_twins(now_s)
        self.intake.publish_if_due(now_s)
        self.presence.tick(now_s)
        if now_s >= self._exchange_s:
            self._exchange_s = now_s + (1.0 + len(self.store) / 250) * self._draw.uniform(0.8, 1.2)
            for node in self._spreading.some_linked(1):
                self.findings.send(node, exchange.summary(self.store))
        self._spreading.tick(now_s)
        return self._end_of_input(now_s)

    def _forget_twins(self, now_s: float) -> None:
        """That a clone is silent changes nothing else, so nothing else would make a view without it."""
        view = self._view
        if view is not None and view.duplicates and len(self._twins(view.nodes, now_s)) < len(view.duplicates):
            self.findings.changes += 1

    def _welcome(self, node: bytes, now_s: float) -> None:
        """Comparing what both hold follows: with one at a time, or a newcomer would be given everything by each of its first links."""
        self.presence.link_up(node)
        if now_s >= self._welcome_s:
            self._welcome_s = now_s + _WELCOME_GAP_S
            self.findings.send(node, exchange.summary(self.store))
        else:
            self._exchange_s = min(self._exchange_s, self._welcome_s)

    def _hear_from(self, node: bytes, now_s: float) -> None:
        if self.presence.is_alive(node):
            self.intake.note_return(now_s)

    def _end_of_input(self, now_s: float) -> Outcome:
        self._spreading.end_of_input(now_s)
        return self.findings.take()

    # ------------------------------------------------------------ messages

    def _handle(self, sender: bytes, message: SwarmMessage, now_s: float) -> None:
        match message:
            case Digests():
                self._on_digests(sender, message, now_s)
            case Ping():
                self.findings.send(sender, Pong(message.nonce))
            case Pong():
                self.presence.live.pong(sender, message.nonce, now_s)
            case Suspicion():
                self._on_suspicion(sender, message, now_s)
            case Wanted():
                held = (self.store.get(key) for key in parse_keys(message.keys))
                self._give(sender, [entry for entry in held if entry is not None], now_s)
            case Records():
                self._on_records(sender, message, now_s)
            case Summary():
                if (answer := exchange.answer_summary(self.store, message)) is not None:
                    self.findings.send(sender, answer)
            case Buckets():
                self._on_buckets(sender, message, now_s)
            case TellMe():
                self._spreading.backbone.is_chosen_by(sender, message.is_wanted)

    def _on_digests(self, sender: bytes, message: Digests, now_s: float) -> None:
        if message.buckets:
            return self._on_compared(sender, message, now_s)
        wanted = []
        for key, incarnation, version, check in unpacked_digests(message.entries):
            held = self.store.get(key)
            if held is not None and held.check == check and held.stamp == (incarnation, version):
                self._spreading.is_known_around(key, sender)
            elif self.intake.asking.wants(sender, key, Stamp(incarnation, version), check, held, now_s):
                wanted.append(key)
        return self._ask_for(wanted, sender)

    def _on_compared(self, sender: bytes, message: Digests, now_s: float) -> None:
        """Everything that the other side holds in some buckets."""
        digests, asking = list(parse_digests(message.entries)), self.intake.asking
        self._ask_for(
            [
                each.key
                for each in digests
                if asking.wants(sender, each.key, each.stamp, each.check, self.store.get(each.key), now_s)
            ],
            sender,
        )
        self._give(sender, exchange.lacking(self.store, message.buckets, digests), now_s)

    def _ask_for(self, keys: list[bytes], node: bytes) -> None:
        for request in exchange.requests(keys):
            self.findings.send(node, request)

    def _on_buckets(self, sender: bytes, message: Buckets, now_s: float) -> None:
        digests, is_all = exchange.answer_buckets(self.store, message)
        if digests is not None:
            self.findings.send(sender, digests)
        if not is_all:
            self._exchange_s = min(self._exchange_s, now_s + 0.2)

    def _give(self, node: bytes, entries: list[Entry], now_s: float) -> None:
        if not self._trust.is_member(node):
            self.counters["asked_by_stranger"] += 1
            return
        for message in exchange.replies(entries, now_s):
            self.findings.send(node, message)

    def _on_records(self, sender: bytes, message: Records, now_s: float) -> None:
        stated = [aged.record for aged in message.records if aged.record.kind != ADVERT]
        if stated:
            self.intake.take_membership(stated, sender, now_s)
        if len(stated) < len(message.records):
            self.intake.take_adverts(message.records, sender, now_s)

    def _on_suspicion(self, sender: bytes, message: Suspicion, now_s: float) -> None:
        if message.node == self.node:
            self.own.refute(Stamp(message.incarnation, message.version))
            self.intake.publish_if_due(now_s)
        else:
            self.presence.on_suspicion(sender, message, now_s)
