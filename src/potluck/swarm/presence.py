"""Who is there: links, pings, doubts, and what is made of others' reports. No I/O; time is told.

A word about another node only makes its hearer look for himself: nobody is lost but by one's own pings or dials. What one node thinks
of another never travels in records, so that all hold the same ones.
"""

import random

from potluck.swarm.adverts import Advert, Stamp
from potluck.swarm.findings import Findings
from potluck.swarm.liveness import Liveness, Standing, own_report
from potluck.swarm.records import Entry, RecordStore
from potluck.swarm.spreading import Spreading
from potluck.wire.messages import Ping, Suspicion

_PARTITION_SHARE = 0.05


class Presence:
    """The nodes that this one is linked to, and its opinion of everybody that it has an advert of."""

    def __init__(
        self, store: RecordStore, linked: dict[bytes, None], spreading: Spreading, findings: Findings, draw: random.Random,
        now_s: float,
    ) -> None:  # fmt: skip
        self.linked = linked
        self.live = Liveness(draw, now_s)
        self._store, self._spreading, self._findings, self._draw = store, spreading, findings, draw

    def __repr__(self) -> str:
        return f"<Presence {len(self.linked)} links, {self.live!r}>"

    def advert(self, node: bytes) -> Advert | None:
        entry = self._store.advert_of(node)
        return entry.advert if entry is not None else None

    def is_present(self, node: bytes) -> bool:
        """Whether a view would show it."""
        advert = self.advert(node)
        return advert is not None and not advert.is_leaving and self.live.standing(node) is not Standing.LOST

    @property
    def does_partition_end(self) -> bool:
        """Many are away: where one of them is back, those on the other side took us for lost too."""
        return self._spreading.is_sparse and self.live.lost_count > self._store.advert_count * _PARTITION_SHARE

    # ------------------------------------------------------------ links

    def link_up(self, node: bytes) -> None:
        self.linked[node] = None
        self._spreading.backbone.link_up(node)
        self._findings.changes += 1

    def link_lost(self, node: bytes, now_s: float, reason: str) -> None:
        if node in self.linked:
            self._unlink(node)
            if self.is_present(node):
                self.live.set_standing(node, Standing.SUSPECT)
                self._look(node, now_s, reason)

    def _unlink(self, node: bytes) -> None:
        del self.linked[node]
        self._spreading.backbone.link_lost(node)
        self.live.forget([node])
        self._findings.changes += 1

    def unreachable(self, node: bytes, dialled_s: float, now_s: float, reason: str) -> None:
        """This node dialled it, in vain. What it said since then weighs more."""
        held = self._store.advert_of(node)
        if node not in self.linked and held is not None and held.born_s <= dialled_s:
            self._lose(node, now_s, reason)

    # ------------------------------------------------------------ looking

    def tick(self, now_s: float) -> None:
        if (node := self.live.due(self.linked, now_s)) is not None:
            self.ping(node, now_s)
        for node, attempts in self.live.unanswered(now_s):
            if attempts > 0 and node in self.linked:
                self._findings.changes += self.live.set_standing(node, Standing.SUSPECT)
                self._findings.send(node, Ping(self.live.ping(node, now_s, attempts)))
            else:
                self._lose(node, now_s, "it does not answer")
        for node in self.live.checks_due(now_s):
            if node in self.linked:
                if not self.live.is_waiting(node):
                    self._findings.send(node, Ping(self.live.ping(node, now_s, 1)))
            elif self.advert(node) is not None:
                self._look(node, now_s, "it was reported, and no address is known")

    def ping(self, node: bytes, now_s: float) -> None:
        self._findings.send(node, Ping(self.live.ping(node, now_s)))

    def _look(self, node: bytes, now_s: float, reason: str) -> None:
        """Dial a node that may be gone; `unreachable` or `link_up` is the answer."""
        advert = self.advert(node)
        if advert is not None and advert.addresses:
            self._findings.dial(node, advert.addresses)
        else:
            self._lose(node, now_s, reason)

    # ------------------------------------------------------------ finding out

    def is_alive(self, node: bytes) -> bool:
        """It spoke. Whether it is back after having been lost."""
        if not self.live.is_doubted(node):
            return False
        was = self.live.standing(node)
        self.live.set_standing(node, Standing.ALIVE)
        self._findings.heard_of(node)
        self._findings.changes += 1
        self.live.is_back(node)
        is_back = was is Standing.LOST and self.is_present(node)
        if is_back:
            self._findings.tell("returned", node)
        return is_back

    def note_advert(self, entry: Entry, held: Entry | None, sender: bytes, now_s: float) -> bool:
        """A node's new statement, in place of `held`. Whether it is back with it."""
        node, advert, standing = entry.record.signer, entry.advert, self.live.standing(entry.record.signer)
        assert advert is not None
        is_doubted = self.live.refuted(node, entry.stamp) or standing is not Standing.ALIVE
        if is_doubted or not _is_refresh(entry, held):
            self._spreading.news(entry.key, sender)
            self._findings.heard_of(node)
            self._findings.changes += 1
        else:
            self._spreading.refreshed(entry.key)
        is_back = standing is not Standing.ALIVE and self._is_back_by_word(entry, node, standing, now_s)
        if held is None and self.live.was_reported(node, entry.stamp, now_s):
            self._check_later(node, entry.stamp, now_s)
        was_there = held is not None and held.advert is not None and not held.advert.is_leaving
        if advert.is_leaving and was_there:
            self._findings.tell("left", node)
        elif not advert.is_leaving and not was_there:
            self._findings.tell("joined", node)
        return is_back

    def _is_back_by_word(self, entry: Entry, node: bytes, standing: Standing, now_s: float) -> bool:
        """Only a statement made after the loss tells anything; an older one was still on its way."""
        if standing is Standing.SUSPECT:
            return node not in self.linked and self.is_alive(node)
        if entry.advert is not None and entry.advert.is_leaving:
            return False  # nobody is missed who said goodbye
        if entry.born_s < self.live.lost_s(node):
            self._report(node, entry.stamp, now_s)  # those who know this statement do not heed a report of an older one
            return False
        if self._spreading.is_sparse:
            return self.is_alive(node)
        self._check_later(node, entry.stamp, now_s)
        return False

    def forget(self, node: bytes) -> None:
        """Its advert is gone."""
        if node not in self.linked:
            self.live.forget([node])
        self._findings.changes += 1

    # ------------------------------------------------------------ losing

    def _lose(self, node: bytes, now_s: float, reason: str) -> None:
        was_present = self.is_present(node)
        if node in self.linked:
            self._unlink(node)
            self._findings.drop(node, reason)
        if not was_present:
            return
        self.live.lose(node, now_s)
        self._findings.changes += 1
        self._findings.tell("lost", node, reason)
        if (held := self._store.advert_of(node)) is not None:
            self._report(node, held.stamp, now_s)

    def _report(self, node: bytes, stamp: Stamp, now_s: float) -> None:
        if not self.live.is_new_report(own_report(node), stamp, now_s):
            return
        is_first = self.live.is_new_report(node, stamp, now_s)
        message, informed = Suspicion(node, *stamp), self.live.informed(node)
        if is_first and not self._spreading.is_sparse:  # whoever is linked to it, and that is everybody, finds out too
            self._spreading.tell_some(message, informed)
        else:
            self._spreading.tell_others(message, informed)

    def on_suspicion(self, sender: bytes, message: Suspicion, now_s: float) -> None:
        """Nobody is lost by another's word: it is passed on once, and looked into after a while."""
        node, stamp = message.node, Stamp(message.incarnation, message.version)
        if self.live.is_known_report(node, stamp, sender, now_s):
            return  # most are: a report comes from several sides
        advert = self.advert(node)
        if advert is None:
            self.live.is_new_report(node, stamp, now_s)  # for when its advert comes, from somebody who knows less
        elif stamp >= advert.stamp and self.is_present(node):
            self.live.is_new_report(node, stamp, now_s)
            self._check_later(node, stamp, now_s)
            informed = self.live.informed(node)
            informed.add(sender)
            self._spreading.tell_some(message, informed)

    def _check_later(self, node: bytes, stamp: Stamp, now_s: float) -> None:
        """Within a while, so that a thousand nodes do not all dial one at the same moment."""
        wait_s = self._draw.random() * min(5.0, 0.2 + self._store.advert_count / 350)
        self.live.check_later(node, stamp, now_s + wait_s)


def _is_refresh(entry: Entry, held: Entry | None) -> bool:
    return held is not None and held.content == entry.content and held.stamp.incarnation == entry.stamp.incarnation
