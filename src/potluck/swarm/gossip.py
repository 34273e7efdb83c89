"""How records reach everybody, and who is there: announcements at once, comparisons on a timer, pings, doubts. No I/O; time is told.

News is announced by its digest to a few linked nodes, which ask for what they lack; now and then two nodes compare all they hold. A
word about another node only makes its hearer look for himself. What one node thinks of another never travels in records, so that
all hold the same ones.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Iterable

from potluck.core.errors import RecordRefused
from potluck.identity.keys import short_id
from potluck.identity.signed import Signed
from potluck.swarm import exchange
from potluck.swarm.acceptance import EXPULSION, Known, Trust, accept_all, check_signer, new_advert, read_entry
from potluck.swarm.adverts import ADVERT, Advert, AdvertReader, Stamp
from potluck.swarm.asking import Asking
from potluck.swarm.dialling import MESH_UP_TO
from potluck.swarm.duplicates import Duplicate, DuplicateWatch
from potluck.swarm.events import Dial, Drop, Event, EventKind, Outcome
from potluck.swarm.liveness import Liveness, Standing, own_report
from potluck.swarm.own_advert import OwnAdvert
from potluck.swarm.records import Entry, RecordStore, advert_key, entry_of, parse_digests, parse_keys
from potluck.swarm.view import Seen, View
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    AgedRecord,
    Buckets,
    Digests,
    Message,
    Ping,
    Pong,
    Records,
    Summary,
    Suspicion,
    SwarmMessage,
    Wanted,
)

_LOG = logging.getLogger(__name__)

FAN_OUT = 3
MAX_ADVERTS = 4096
MAX_MEMBERSHIP_RECORDS = 16384
_MAX_EVENTS = 256  # in one outcome
_REFRESH_BATCH_S = 1.0  # mere refreshes are announced together
_PARTITION_SHARE = 0.05
_SLEPT_S = 10.0  # no tick for so long: this machine did not run
_LOGGED = 8  # refusals of one reason that are logged; afterwards they are only counted


class Gossip:
    """One node's part. Every input returns what is to be done; nothing is called from inside but `trust` and `sign`."""

    def __init__(
        self,
        own: OwnAdvert,
        trust: Trust,
        draw: random.Random,
        now_s: float,
        reader: AdvertReader | None = None,
    ) -> None:
        self.node = own.node
        self.own = own
        self.counters: Counter[str] = Counter()
        self.changes = 0  # goes up whenever a view would look different
        self.store = RecordStore()
        self.linked: dict[bytes, None] = {}
        self.live = Liveness(draw, now_s)
        self._trust, self._draw, self._reader = trust, draw, reader or AdvertReader()
        self._duplicates = DuplicateWatch()
        self._membership_count = 0
        self.asking = Asking()
        self._urgent: dict[bytes, None] = {}
        self._refreshed: dict[bytes, None] = {}
        self._announce_s = self._exchange_s = self._last_tick_s = now_s
        self._heard: set[bytes] = set()  # nodes with new statements, or that are back
        self._outcome = Outcome()
        self._view: View | None = None

    def __repr__(self) -> str:
        return f"<Gossip {short_id(self.node)} {self.store!r}, {len(self.linked)} links, {self.live!r}>"

    # ------------------------------------------------------------ what others may ask

    @property
    def is_sparse(self) -> bool:
        return self.advert_count > MESH_UP_TO

    @property
    def advert_count(self) -> int:
        return len(self.store) - self._membership_count

    def advert(self, node: bytes) -> Advert | None:
        entry = self.store.get(advert_key(node))
        return entry.advert if entry is not None else None

    def is_present(self, node: bytes) -> bool:
        """Whether a view would show it."""
        advert = self.advert(node)
        return advert is not None and not advert.is_leaving and self.live.standing(node) is not Standing.LOST

    def adverts(self) -> list[Advert]:
        """Everybody who would be in a view, this node included."""
        return [entry.advert for entry in self.store if entry.advert is not None and self.is_present(entry.advert.node)]

    def take_heard(self) -> set[bytes]:
        """Nodes about which there is something new since the last call, for whoever keeps their addresses."""
        heard, self._heard = self._heard, set()
        return heard

    def membership_records(self) -> list[Signed]:
        return [entry.record for entry in self.store if entry.advert is None]

    def view(self, now_s: float) -> View:
        """The same value as last time where nothing changed."""
        if self._view is None or self._view.version != self.changes:
            entries = [entry for entry in self.store if entry.advert is not None and self.is_present(entry.advert.node)]
            nodes = {
                entry.record.signer: self._seen(entry, entry.advert) for entry in entries if entry.advert is not None
            }
            twins = [twin for node in nodes if (twin := self._duplicates.duplicate(node, now_s)) is not None]
            if self.own.twin is not None:
                twins.append(self.own.twin)
            self._view = View(self.node, now_s, self.changes, nodes, self.is_sparse, tuple(twins))
        return self._view

    def _seen(self, entry: Entry, advert: Advert) -> Seen:
        node = advert.node
        return Seen(
            advert, entry.born_s, entry.expires_s, node == self.node, node in self.linked,
            self.live.standing(node) is Standing.SUSPECT, self.live.rtt_us(node),
        )  # fmt: skip

    # ------------------------------------------------------------ inputs

    def publish(self, advert: Advert | None, now_s: float) -> Outcome:
        """What this node states from now on; None: nothing (its research switch is off, or it leaves)."""
        self.own.facts = advert
        self._publish_if_due(now_s)
        return self._end_of_input(now_s)

    def add_records(self, records: Iterable[Signed], now_s: float) -> Outcome:
        """Membership records made here, or known from before."""
        self._take_membership(list(records), self.node, now_s)
        return self._end_of_input(now_s)

    def link_up(self, node: bytes, now_s: float) -> Outcome:
        if node not in self.linked and node != self.node:
            self.linked[node] = None
            self.changes += 1
            self._is_alive(node, now_s)
            self._send(node, exchange.summary(self.store))
            self._ping(node, now_s)
        return self._end_of_input(now_s)

    def link_lost(self, node: bytes, now_s: float, reason: str = "the link broke") -> Outcome:
        if node in self.linked:
            del self.linked[node]
            self.live.forget([node])
            self.changes += 1
            if self.is_present(node):
                self.live.set_standing(node, Standing.SUSPECT)
                self._look(node, now_s, reason)
        return self._end_of_input(now_s)

    def unreachable(self, node: bytes, dialled_s: float, now_s: float, reason: str) -> Outcome:
        """This node dialled it, in vain. What it said since then weighs more."""
        held = self.store.get(advert_key(node))
        if node not in self.linked and held is not None and held.born_s <= dialled_s:
            self._lose(node, now_s, reason)
        return self._end_of_input(now_s)

    def on_message(self, sender: bytes, message: SwarmMessage, now_s: float) -> Outcome:
        if sender not in self.linked:
            self.link_up_quietly(sender, now_s)
        self._is_alive(sender, now_s)
        try:
            self._handle(sender, message, now_s)
        except ValueError:
            self.counters["malformed"] += 1
        return self._end_of_input(now_s)

    def link_up_quietly(self, node: bytes, now_s: float) -> None:
        """Who speaks to us is linked; comparing what we hold follows."""
        self.linked[node] = None
        self.changes += 1
        self._send(node, exchange.summary(self.store))

    def tick(self, now_s: float) -> Outcome:
        """To be called about four times a second."""
        if now_s - self._last_tick_s > _SLEPT_S:
            self.live.slept()
            self.asking.slept()
            self._exchange_s = now_s
        self._last_tick_s = now_s
        self._forget_expired(now_s)
        self._publish_if_due(now_s)
        self._watch(now_s)
        if now_s >= self._exchange_s:
            self._exchange_s = now_s + self._exchange_every_s * self._draw.uniform(0.8, 1.2)
            for node in self._some_linked(1):
                self._send(node, exchange.summary(self.store))
        if now_s >= self._announce_s and self._refreshed:
            self._announce_s = now_s + _REFRESH_BATCH_S
            self._announce(self._refreshed, FAN_OUT)
        return self._end_of_input(now_s)

    @property
    def _exchange_every_s(self) -> float:
        return 1.0 + len(self.store) / 250

    # ------------------------------------------------------------ messages

    def _handle(self, sender: bytes, message: SwarmMessage, now_s: float) -> None:
        if isinstance(message, Ping):
            self._send(sender, Pong(message.nonce))
        elif isinstance(message, Pong):
            self.live.pong(sender, message.nonce, now_s)
        elif isinstance(message, Summary):
            if (answer := exchange.answer_summary(self.store, message)) is not None:
                self._send(sender, answer)
        elif isinstance(message, Buckets):
            digests, is_all = exchange.answer_buckets(self.store, message)
            if digests is not None:
                self._send(sender, digests)
            if not is_all:
                self._exchange_s = min(self._exchange_s, now_s + 0.2)
        elif isinstance(message, Digests):
            self._on_digests(sender, message, now_s)
        elif isinstance(message, Wanted):
            held = (self.store.get(key) for key in parse_keys(message.keys))
            self._give(sender, [entry for entry in held if entry is not None], now_s)
        elif isinstance(message, Records):
            self._on_records(sender, message.records, now_s)
        else:
            self._on_suspicion(message, now_s)

    def _on_digests(self, sender: bytes, message: Digests, now_s: float) -> None:
        digests = list(parse_digests(message.entries))
        wanted = [each.key for each in digests if self.asking.wants(sender, each, self.store.get(each.key), now_s)]
        for request in exchange.requests(wanted):
            self._send(sender, request)
        if message.buckets:
            self._give(sender, exchange.lacking(self.store, message.buckets, digests), now_s)

    def _give(self, node: bytes, entries: list[Entry], now_s: float) -> None:
        if not self._trust.is_member(node):
            self.counters["asked_by_stranger"] += 1
            return
        for message in exchange.replies(entries, now_s):
            self._send(node, message)

    def _on_records(self, sender: bytes, records: tuple[AgedRecord, ...], now_s: float) -> None:
        self._take_membership([aged.record for aged in records if aged.record.kind != ADVERT], sender, now_s)
        for aged in records:
            if aged.record.kind == ADVERT:
                key = advert_key(aged.record.signer)
                announced = self.asking.came(key)
                try:
                    self._take_advert(aged.record, key, announced, aged.age_ms / 1000, now_s)
                except RecordRefused as refusal:
                    self._refuse(aged.record, key, announced or Stamp(0, 0), refusal.reason, sender, now_s)

    # ------------------------------------------------------------ records

    def _take_membership(self, records: list[Signed], sender: bytes, now_s: float) -> None:
        fresh = {entry.key: entry for entry in (entry_of(record, now_s, None) for record in records)}
        fresh = {key: entry for key, entry in fresh.items() if self.store.get(key) is None}
        room = MAX_MEMBERSHIP_RECORDS - self._membership_count
        for entry in list(fresh.values())[room:]:
            self._refuse(entry.record, entry.key, entry.stamp, "too_many", sender, now_s)
        by_record = {entry.record: entry for entry in list(fresh.values())[:room]}
        taken, refused = accept_all(list(by_record), self._trust)
        for record in taken:
            entry = by_record[record]
            self.asking.came(entry.key)
            self.store.put(entry)
            self._membership_count += 1
            self._urgent[entry.key] = None
        for record, reason in refused:
            entry = by_record[record]
            self.asking.came(entry.key)
            self._refuse(record, entry.key, entry.stamp, reason, sender, now_s)
        if taken:
            for key, node in self.asking.ask_again(now_s):
                if node in self.linked:
                    self._send(node, Wanted(key))
            if any(record.kind == EXPULSION for record in taken):
                self.drop_strangers(now_s)

    def drop_strangers(self, now_s: float) -> None:
        """Forget, and cut off, whoever is no member any more."""
        for entry in [entry for entry in self.store if entry.advert is not None]:
            node = entry.record.signer
            if not self._trust.is_member(node) and node != self.node:
                self._forget(entry, now_s)
                self._tell("expelled", node)
        for node in [node for node in self.linked if not self._trust.is_member(node)]:
            self._outcome.effects.append(Drop(node, "expelled"))

    def _take_advert(self, record: Signed, key: bytes, announced: Stamp | None, age_s: float, now_s: float) -> None:
        """Raises RecordRefused."""
        check_signer(record, self._trust)
        entry = read_entry(record, self._reader, now_s - age_s)
        entry.taken_s = now_s
        assert entry.advert is not None
        if record.signer == self.node:
            return self._hear_of_myself(entry, entry.advert, now_s)
        if (twin := self._duplicates.note(entry.advert, entry.born_s)) is not None:
            self._tell_of_twin(twin, now_s)
        held = self.store.get(key)
        if not new_advert(entry, Known(held, self.asking.ended(key), announced), now_s):
            if held is not None and entry.hash == held.hash and entry.born_s < held.born_s:
                held.expires_s -= held.born_s - entry.born_s
                held.born_s = entry.born_s
                self.store.will_expire(held)
            return None
        if held is None and self.advert_count >= MAX_ADVERTS:
            raise RecordRefused("too_many", "more adverts than a swarm may have")
        self.asking.begin(key)
        self.store.put(entry)
        return self._note_advert(entry, entry.advert, held, now_s)

    def _note_advert(self, entry: Entry, advert: Advert, held: Entry | None, now_s: float) -> None:
        node, standing = advert.node, self.live.standing(advert.node)
        is_doubted = self.live.refuted(node) or standing is not Standing.ALIVE
        is_same = held is not None and (held.content, held.stamp.incarnation) == (
            entry.content,
            entry.stamp.incarnation,
        )
        if is_same and not is_doubted:
            self._refreshed[entry.key] = None
        else:
            self._urgent[entry.key] = None
            self._heard.add(node)
            self.changes += 1
        if standing is Standing.LOST:
            self._hear_of_lost(entry, node, now_s)
        elif standing is Standing.SUSPECT and node not in self.linked:
            self._is_alive(node, now_s)
        was_there = held is not None and held.advert is not None and not held.advert.is_leaving
        if advert.is_leaving and was_there:
            self._tell("left", node)
        elif not advert.is_leaving and not was_there:
            self._tell("joined", node)

    def _hear_of_lost(self, entry: Entry, node: bytes, now_s: float) -> None:
        """Only a statement made after the loss tells anything; an older one was still on its way."""
        if entry.born_s < self.live.lost_s(node):
            return
        if self.is_sparse:
            self._is_alive(node, now_s)
        else:
            self.live.check_later(node, now_s + self._draw.random() * self._jitter_s)

    def _refuse(self, record: Signed, key: bytes, stamp: Stamp, reason: str, sender: bytes, now_s: float) -> None:
        self.counters[reason] += 1
        if self.counters[reason] <= _LOGGED:
            _LOG.warning(
                "refused a record of kind %s, signed by %s, from %s: %s",
                record.kind, short_id(record.signer), short_id(sender), reason,
            )  # fmt: skip
        self.asking.refuse(key, stamp, sender, now_s)
        self._tell("refused", record.signer, reason)

    def _forget_expired(self, now_s: float) -> None:
        for entry in self.store.expire(now_s):
            advert, node = entry.advert, entry.record.signer
            was_there = advert is not None and not advert.is_leaving and self.live.standing(node) is not Standing.LOST
            self._forget(entry, now_s, is_removed=True)
            if was_there and node != self.node:
                self._tell("lost", node, "its advert expired")

    def _forget(self, entry: Entry, now_s: float, is_removed: bool = False) -> None:
        node = entry.record.signer
        if not is_removed:
            self.store.remove(entry.key)
        self.asking.end(entry.key, entry.stamp, now_s)
        self._duplicates.forget(node)
        if node not in self.linked:
            self.live.forget([node])
        self.changes += 1

    # ------------------------------------------------------------ this node's own advert

    def _publish_if_due(self, now_s: float) -> None:
        is_forced = self.own.is_forced
        record = self.own.due(now_s)
        if record is not None:
            entry = read_entry(record, self._reader, now_s)
            held = self.store.get(entry.key)
            is_refresh = held is not None and held.content == entry.content
            self.store.put(entry)
            (self._refreshed if is_refresh and not is_forced else self._urgent)[entry.key] = None
            self.changes += not is_refresh

    def _hear_of_myself(self, entry: Entry, advert: Advert, now_s: float) -> None:
        twin = self.own.hear(advert, entry.born_s, now_s)
        if twin is not None:
            self.changes += 1
            self._tell_of_twin(twin, now_s)
        if self.store.get(entry.key) is None:
            self.asking.end(entry.key, entry.stamp, now_s)
        self._publish_if_due(now_s)

    def _tell_of_twin(self, twin: Duplicate, now_s: float) -> None:
        if self.live.is_new_report(b"twin" + twin.node, (0, 0), now_s):
            self.changes += 1
            places = " and ".join(", ".join(addresses) or "an unknown address" for addresses in twin.addresses)
            self._tell("duplicate", twin.node, places)

    # ------------------------------------------------------------ who is there

    def _watch(self, now_s: float) -> None:
        if (node := self.live.due(self.linked, now_s)) is not None:
            self._ping(node, now_s)
        for node, attempts in self.live.unanswered(now_s):
            if attempts > 0 and node in self.linked:
                self.changes += self.live.set_standing(node, Standing.SUSPECT)
                self._send(node, Ping(self.live.ping(node, now_s, attempts)))
            else:
                self._lose(node, now_s, "it does not answer")
        for node in self.live.checks_due(now_s):
            if node in self.linked:
                if not self.live.is_waiting(node):
                    self._send(node, Ping(self.live.ping(node, now_s, 1)))
            elif self.advert(node) is not None:
                self._look(node, now_s, "it was reported, and no address is known")

    def _ping(self, node: bytes, now_s: float) -> None:
        self._send(node, Ping(self.live.ping(node, now_s)))

    def _look(self, node: bytes, now_s: float, reason: str) -> None:
        """Dial a node that may be gone; `unreachable` or `link_up` is the answer."""
        advert = self.advert(node)
        if advert is not None and advert.addresses:
            self._outcome.effects.append(Dial(node, advert.addresses))
        else:
            self._lose(node, now_s, reason)

    def _lose(self, node: bytes, now_s: float, reason: str) -> None:
        was_present = self.is_present(node)
        if node in self.linked:
            del self.linked[node]
            self.live.forget([node])
            self._outcome.effects.append(Drop(node, reason))
            self.changes += 1
        if not was_present:
            return
        self.live.lose(node, now_s)
        self.changes += 1
        self._tell("lost", node, reason)
        advert = self.advert(node)
        # Also where it was heard from others: one more voice, for those whom the first did not reach.
        if advert is not None and self.live.is_new_report(own_report(node), advert.stamp, now_s):
            self.live.is_new_report(node, advert.stamp, now_s)
            self._spread(Suspicion(node, *advert.stamp))

    def _on_suspicion(self, message: Suspicion, now_s: float) -> None:
        """Nobody is lost by another's word: it is passed on once, and looked into after a while."""
        if message.node == self.node:
            self.own.refute(Stamp(message.incarnation, message.version), now_s)
            return self._publish_if_due(now_s)
        advert = self.advert(message.node)
        stamp = Stamp(message.incarnation, message.version)
        if advert is None or advert.stamp != stamp or not self.is_present(message.node):
            return None
        if self.live.is_new_report(message.node, stamp, now_s):
            self.live.check_later(message.node, now_s + self._draw.random() * self._jitter_s)
            self._spread(message)
        return None

    @property
    def _jitter_s(self) -> float:
        """So that a thousand nodes do not all dial one at the same moment."""
        return min(5.0, 0.2 + len(self.store) / 500)

    def _is_alive(self, node: bytes, now_s: float) -> None:
        was = self.live.standing(node)
        if self.live.set_standing(node, Standing.ALIVE):
            self._heard.add(node)
            self.changes += 1
            self.live.is_back(node)
            if was is Standing.LOST and self.is_present(node):
                self._tell("returned", node)
                # Many are away: a partition ends, and those on the other side took us for lost too.
                if self.is_sparse and self.live.lost_count > self.advert_count * _PARTITION_SHARE:
                    self.own.repeat(now_s)
                    self._publish_if_due(now_s)

    # ------------------------------------------------------------ sending

    def _send(self, node: bytes, message: Message) -> None:
        self._outcome.effects.append(SendTo(node, None, message))

    def _spread(self, message: Message) -> None:
        for node in self._some_linked(self._wide_fan_out):
            self._send(node, message)

    @property
    def _wide_fan_out(self) -> int:
        """For what all should know soon: so many that hardly anybody is left out."""
        return max(FAN_OUT, math.ceil(math.log(len(self.store) + 1)))

    def _announce(self, keys: dict[bytes, None], fan_out: int) -> None:
        entries = [entry for entry in map(self.store.get, keys) if entry is not None]
        keys.clear()
        messages = list(exchange.announcements(entries))
        for node in self._some_linked(fan_out):
            for message in messages:
                self._send(node, message)

    def _some_linked(self, count: int) -> list[bytes]:
        linked = list(self.linked)
        return self._draw.sample(linked, min(count, len(linked)))

    def _tell(self, kind: EventKind, node: bytes, reason: str = "") -> None:
        if len(self._outcome.events) < _MAX_EVENTS:
            self._outcome.events.append(Event(kind, node, reason))

    def _end_of_input(self, now_s: float) -> Outcome:
        if self._urgent:
            self._announce(self._urgent, self._wide_fan_out)
        outcome, self._outcome = self._outcome, Outcome()
        return outcome
