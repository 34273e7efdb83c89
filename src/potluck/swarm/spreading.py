"""How news travels from node to node: what is still to be told, to how many, and when. No I/O; time is told.

News is announced by its digest; whoever lacks the record asks for it. In a small swarm everything is passed on at once. In a large one
what others said is passed on in rounds of a few nodes each, the first at once and the next not before a while: so the number of messages
is bounded however much happens.
"""

import math
import random
from collections.abc import Collection, Iterable

from potluck.swarm import exchange
from potluck.swarm.dialling import MESH_UP_TO
from potluck.swarm.findings import Findings
from potluck.swarm.records import RecordStore
from potluck.wire.messages import Message

FAN_OUT = 3  # for a mere refresh: whoever is left out hears of it in the next comparison
ROUND_FAN_OUT = 3
ROUND_GAP_S = 0.2
REFRESH_BATCH_S = 1.0  # refreshes are announced together


class Spreading:
    """`linked`: as its owner keeps it."""

    def __init__(
        self, store: RecordStore, linked: dict[bytes, None], draw: random.Random, findings: Findings, now_s: float
    ) -> None:
        self._store, self._linked, self._draw, self._findings = store, linked, draw, findings
        self._at_once: dict[bytes, None] = {}
        self._in_rounds: dict[bytes, int] = {}  # by key: how many more are to be told
        self._refreshed: dict[bytes, None] = {}
        self._refresh_s = self._round_s = now_s

    def __repr__(self) -> str:
        return f"<Spreading {len(self._in_rounds)} news, {len(self._refreshed)} refreshes>"

    @property
    def is_sparse(self) -> bool:
        """Whether the swarm is too large for a link to everybody."""
        return self._store.advert_count > MESH_UP_TO

    # ------------------------------------------------------------ what there is to tell

    def at_once(self, key: bytes) -> None:
        """This node's own word, which nobody else can tell, or what must not wait: to many, at the end of this input."""
        self._at_once[key] = None

    def news(self, key: bytes) -> None:
        """Something that others said."""
        if self.is_sparse:
            self._in_rounds[key] = self._wide_fan_out
        else:
            self._at_once[key] = None

    def refreshed(self, key: bytes) -> None:
        self._refreshed[key] = None

    def is_known_around(self, key: bytes) -> None:
        """Another node announced what this one holds too: a refresh need not be told once more."""
        self._refreshed.pop(key, None)

    def broadcast(self, message: Message, but: bytes = b"") -> list[bytes]:
        """To so many that hardly anybody is left out when each of them does the same; returns to whom."""
        nodes = [node for node in self.some_linked(self._wide_fan_out) if node != but]
        for node in nodes:
            self._findings.send(node, message)
        return nodes

    def tell_others(self, message: Message, informed: Collection[bytes]) -> list[bytes]:
        """To every linked node but these; returns to whom."""
        nodes = [node for node in self._linked if node not in informed]
        for node in nodes:
            self._findings.send(node, message)
        return nodes

    # ------------------------------------------------------------ telling it

    def end_of_input(self, now_s: float) -> None:
        if self._at_once:
            at_once, self._at_once = self._at_once, {}
            self._announce(at_once, self._wide_fan_out)
        if self._in_rounds and now_s >= self._round_s:
            self._round_s = now_s + ROUND_GAP_S
            self._announce(self._in_rounds, ROUND_FAN_OUT)
            left = self._in_rounds.items()
            self._in_rounds = {key: count - ROUND_FAN_OUT for key, count in left if count > ROUND_FAN_OUT}

    def tick(self, now_s: float) -> None:
        if now_s >= self._refresh_s and self._refreshed:
            self._refresh_s = now_s + REFRESH_BATCH_S
            refreshed, self._refreshed = self._refreshed, {}
            self._announce(refreshed, FAN_OUT)

    @property
    def _wide_fan_out(self) -> int:
        return max(FAN_OUT, 1 + math.ceil(math.log(self._store.advert_count + 1)))

    def _announce(self, keys: Iterable[bytes], fan_out: int) -> None:
        if not self._linked:
            return
        entries = [entry for entry in map(self._store.get, keys) if entry is not None]
        nodes = self.some_linked(fan_out)
        for message in exchange.announcements(entries):
            for node in nodes:
                self._findings.send(node, message)

    def some_linked(self, count: int) -> list[bytes]:
        linked = list(self._linked)
        return self._draw.sample(linked, count) if count < len(linked) else linked
