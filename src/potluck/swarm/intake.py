"""Records that arrive: which are taken into the store, which are refused and why, and which come to their end. No I/O; time is told."""

import logging
from collections import Counter
from collections.abc import Iterable

from potluck.core.errors import RecordRefused
from potluck.identity.keys import short_id
from potluck.identity.signed import Signed
from potluck.swarm.acceptance import (
    EXPULSION,
    SUPERSEDED,
    Known,
    Trust,
    accept_all,
    check_signer,
    new_advert,
    read_entry,
)
from potluck.swarm.adverts import ADVERT, AdvertReader, Stamp, advert_key
from potluck.swarm.asking import Asking
from potluck.swarm.duplicates import Duplicate, DuplicateWatch
from potluck.swarm.findings import Findings
from potluck.swarm.liveness import Standing
from potluck.swarm.own_advert import OwnAdvert
from potluck.swarm.presence import Presence
from potluck.swarm.records import Entry, RecordStore, entry_of
from potluck.swarm.spreading import Spreading
from potluck.wire.messages import AgedRecord, Wanted

_LOG = logging.getLogger(__name__)
MAX_ADVERTS = 4096
MAX_MEMBERSHIP_RECORDS = 16384
_LOGGED = 8  # refusals of one reason that are logged; afterwards they are only counted


class Intake:
    """The only one that writes into the store."""

    def __init__(
        self, own: OwnAdvert, trust: Trust, reader: AdvertReader, store: RecordStore, presence: Presence,
        spreading: Spreading, findings: Findings,
    ) -> None:  # fmt: skip
        self.own = own
        self.counters: Counter[str] = Counter()
        self.asking = Asking()
        self.duplicates = DuplicateWatch()
        self._trust, self._reader, self._store = trust, reader, store
        self._presence, self._spreading, self._findings = presence, spreading, findings

    def __repr__(self) -> str:
        return f"<Intake {self._store!r}, {self.asking!r}, refused {dict(self.counters)}>"

    @property
    def _membership_count(self) -> int:
        return len(self._store) - self._store.advert_count

    # ------------------------------------------------------------ membership records

    def take_membership(self, records: Iterable[Signed], sender: bytes, now_s: float) -> None:
        fresh = {entry.key: entry for entry in (entry_of(record, now_s, None) for record in records)}
        fresh = {key: entry for key, entry in fresh.items() if self._store.get(key) is None}
        if not fresh:
            return
        room = MAX_MEMBERSHIP_RECORDS - self._membership_count
        for entry in list(fresh.values())[room:]:
            self._refuse(entry.record, entry.key, entry.stamp, "too_many", sender, now_s)
        by_record = {entry.record: entry for entry in list(fresh.values())[:room]}
        taken, refused = accept_all(list(by_record), self._trust)
        for record in taken:
            self._keep(by_record[record], sender)
        for record, reason in refused:
            entry = by_record[record]
            self.asking.came(entry.key)
            if reason == SUPERSEDED:
                self.asking.end(entry.key, entry.stamp, now_s)
                continue
            self._refuse(record, entry.key, entry.stamp, reason, sender, now_s)
        if taken:
            self._forget_superseded(now_s)
            self._ask_again(now_s)
        if any(record.kind == EXPULSION for record in taken):
            self.drop_strangers(now_s)

    def _keep(self, entry: Entry, sender: bytes) -> None:
        self.asking.came(entry.key)
        self._store.put(entry)
        if sender == self.own.node or entry.record.kind == EXPULSION:
            self._spreading.at_once(entry.key)
        else:
            self._spreading.news(entry.key, sender)

    def _forget_superseded(self, now_s: float) -> None:
        """Otherwise whoever may state anything could fill the store with it, one serial after another."""
        for entry in [entry for entry in self._store if entry.advert is None and not self._trust.holds(entry.record)]:
            self._store.remove(entry.key)
            self.asking.end(entry.key, entry.stamp, now_s)

    def _ask_again(self, now_s: float) -> None:
        for key, node in self.asking.ask_again(now_s):
            if node in self._presence.linked:
                self._findings.send(node, Wanted(key))

    def drop_strangers(self, now_s: float) -> None:
        """Forget, and cut off, whoever is no member any more."""
        for entry in list(self._store.adverts()):
            node = entry.record.signer
            if not self._trust.is_member(node) and node != self.own.node:
                self._store.remove(entry.key)
                self._forgotten(entry, now_s)
                self._findings.tell("expelled", node)
        for node in [node for node in self._presence.linked if not self._trust.is_member(node)]:
            self._findings.drop(node, "expelled")

    # ------------------------------------------------------------ adverts

    def take_adverts(self, records: tuple[AgedRecord, ...], sender: bytes, now_s: float) -> None:
        for aged in records:
            if aged.record.kind != ADVERT:
                continue
            held = self._store.advert_of(aged.record.signer)
            key = held.key if held is not None else advert_key(aged.record.signer)
            announced = self.asking.came(key)
            try:
                self._take_advert(aged, held, Known(held, self.asking.ended(key), announced), sender, now_s)
            except RecordRefused as refusal:
                self._refuse(aged.record, key, announced or Stamp(0, 0), refusal.reason, sender, now_s)

    def _take_advert(self, aged: AgedRecord, held: Entry | None, known: Known, sender: bytes, now_s: float) -> None:
        """Raises RecordRefused."""
        record = aged.record
        check_signer(record, self._trust)
        entry = read_entry(record, self._reader, now_s - aged.age_ms / 1000)
        entry.taken_s = now_s
        assert entry.advert is not None
        if record.signer == self.own.node:
            return self._hear_of_myself(entry, now_s)
        if (twin := self.duplicates.note(entry.advert, entry.born_s)) is not None:
            self._tell_of_twin(twin, now_s)
        if not new_advert(entry, known, now_s):
            if held is not None and entry.hash == held.hash and entry.born_s < held.born_s:
                held.expires_s -= held.born_s - entry.born_s
                held.born_s = entry.born_s
                self._store.will_expire(held)
            return None
        if held is None and self._store.advert_count >= MAX_ADVERTS:
            raise RecordRefused("too_many", "more adverts than a swarm may have")
        self.asking.begin(entry.key)
        self._store.put(entry)
        if self._presence.note_advert(entry, held, sender, now_s):
            self.note_return(now_s)
        return None

    def note_return(self, now_s: float) -> None:
        """Somebody is back. Where a partition ends, those on the other side took this node for lost too."""
        if self._presence.does_partition_end:
            self.own.repeat(now_s)
            self.publish_if_due(now_s)

    def _refuse(self, record: Signed, key: bytes, stamp: Stamp, reason: str, sender: bytes, now_s: float) -> None:
        self.counters[reason] += 1
        if self.counters[reason] <= _LOGGED:
            _LOG.warning(
                "refused a record of kind %s, signed by %s, from %s: %s",
                record.kind, short_id(record.signer), short_id(sender), reason,
            )  # fmt: skip
        self.asking.refuse(key, stamp, sender, now_s)
        self._findings.tell("refused", record.signer, reason)

    # ------------------------------------------------------------ this node's own

    def publish_if_due(self, now_s: float) -> None:
        is_forced = self.own.is_forced(now_s)
        record = self.own.due(now_s)
        if record is None:
            return
        entry = read_entry(record, self._reader, now_s)
        held = self._store.get(entry.key)
        is_refresh = held is not None and held.content == entry.content
        self._store.put(entry)
        if entry.advert is not None and entry.advert.is_leaving:
            self._spreading.goodbye(entry.key)
        elif is_refresh and not is_forced:
            self._spreading.refreshed(entry.key)
        else:
            self._spreading.at_once(entry.key)
        self._findings.changes += not is_refresh

    def _hear_of_myself(self, entry: Entry, now_s: float) -> None:
        assert entry.advert is not None
        twin = self.own.hear(entry.advert, entry.born_s, now_s)
        if twin is not None:
            self._findings.changes += 1
            self._tell_of_twin(twin, now_s)
        if self._store.get(entry.key) is None:
            self.asking.end(entry.key, entry.stamp, now_s)
        self.publish_if_due(now_s)

    def _tell_of_twin(self, twin: Duplicate, now_s: float) -> None:
        if self._presence.live.is_new_report(b"twin" + twin.node, (0, 0), now_s):
            self._findings.changes += 1
            places = " and ".join(", ".join(addresses) or "an unknown address" for addresses in twin.addresses)
            self._findings.tell("duplicate", twin.node, places)

    # ------------------------------------------------------------ what comes to its end

    def forget_expired(self, now_s: float) -> None:
        for entry in self._store.expire(now_s):
            advert, node = entry.advert, entry.record.signer
            standing = self._presence.live.standing(node)
            was_there = advert is not None and not advert.is_leaving and standing is not Standing.LOST
            self._forgotten(entry, now_s)
            if was_there and node != self.own.node:
                self._findings.tell("lost", node, "its advert expired")

    def _forgotten(self, entry: Entry, now_s: float) -> None:
        self.asking.end(entry.key, entry.stamp, now_s)
        self.duplicates.forget(entry.record.signer)
        self._presence.forget(entry.record.signer)
