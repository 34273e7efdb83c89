"""How news travels from node to node: what is still to be told, to how many, and when. No I/O; time is told.

News is announced by its digest; whoever lacks the record asks for it. In a small swarm everything is passed on at once. In a large one
what others said is passed on over the backbone (`backbone.py`), in rounds of a few nodes each, the first at once and the next not before
a while: so the number of messages is bounded however much happens. Each link of the backbone carries it once, in one direction.
"""

import math
import random
from collections.abc import Collection, Iterable

from potluck.swarm import exchange
from potluck.swarm.backbone import Backbone
from potluck.swarm.dialling import MESH_UP_TO
from potluck.swarm.findings import Findings
from potluck.swarm.records import RecordStore
from potluck.wire.messages import Message

FAN_OUT = 3  # for a mere refresh: whoever is left out hears of it in the next comparison
ROUND_FAN_OUT = 3
ROUND_GAP_S = 0.2
REPORT_FAN_OUT = 5  # of about eight: whoever is left out hears of a loss only when others have looked for themselves
REFRESH_BATCH_S = 2.0  # refreshes are announced together


class Spreading:
    """`linked`: as its owner keeps it."""

    def __init__(
        self, node: bytes, store: RecordStore, linked: dict[bytes, None], draw: random.Random, findings: Findings,
        now_s: float,
    ) -> None:  # fmt: skip
        self.backbone = Backbone(node, findings)
        self._store, self._linked, self._draw, self._findings = store, linked, draw, findings
        self._at_once: dict[bytes, None] = {}
        self._in_rounds: dict[bytes, set[bytes]] = {}  # by key: who is known to know it
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

    def goodbye(self, key: bytes) -> None:
        """This node's last word: to everybody who would notice that its link breaks, and report that."""
        self._announce([key], list(self._linked))

    def news(self, key: bytes, sender: bytes) -> None:
        """Something that others said."""
        if self.is_sparse:
            self._in_rounds[key] = {sender}
        else:
            self._at_once[key] = None

    def refreshed(self, key: bytes) -> None:
        self._refreshed[key] = None

    def is_known_around(self, key: bytes, sender: bytes) -> None:
        """Another node announced what this one holds too: it need not be told, and a refresh need not be told to anybody."""
        self._refreshed.pop(key, None)
        if (informed := self._in_rounds.get(key)) is not None:
            informed.add(sender)

    def tell_some(self, message: Message, informed: set[bytes]) -> None:
        """To so many that hardly anybody is left out when each of them does the same."""
        if self.is_sparse:
            lacking = [node for node in self.backbone.carriers if node not in informed]
            self._tell(message, self._some(lacking, REPORT_FAN_OUT), informed)
        else:
            self._tell(
                message, [node for node in self.some_linked(self._wide_fan_out) if node not in informed], informed
            )

    def tell_others(self, message: Message, informed: set[bytes]) -> None:
        """To everybody else who should hear it from this node: when all do the same, nobody is left out."""
        nodes = self.backbone.carriers if self.is_sparse else self._linked
        self._tell(message, [node for node in nodes if node not in informed], informed)

    def _tell(self, message: Message, nodes: list[bytes], informed: set[bytes]) -> None:
        informed.update(nodes)
        for node in nodes:
            self._findings.send(node, message)

    # ------------------------------------------------------------ telling it

    def end_of_input(self, now_s: float) -> None:
        if self._at_once:
            at_once, self._at_once = self._at_once, {}
            nodes = self.some_linked(self._wide_fan_out)
            self._announce(at_once, list(dict.fromkeys((*self.backbone.carriers, *nodes))) if self.is_sparse else nodes)
        if self._in_rounds and now_s >= self._round_s:
            self._round_s = now_s + ROUND_GAP_S
            self._round()

    def _round(self) -> None:
        """A few nodes are told what they are not known to know. What all of them know is done with."""
        carriers = self.backbone.carriers
        told = 0
        first = int(self._draw.random() * len(carriers))
        for node in (*carriers[first:], *carriers[:first]):
            lacking = [key for key, informed in self._in_rounds.items() if node not in informed]
            if not lacking:
                continue
            if told == ROUND_FAN_OUT:
                return
            told += 1
            self._announce(lacking, [node])
            for key in lacking:
                self._in_rounds[key].add(node)
        self._in_rounds = {}

    def tick(self, now_s: float) -> None:
        if self.is_sparse:
            self.backbone.tell_choice()
        if now_s >= self._refresh_s and self._refreshed:
            self._refresh_s = now_s + REFRESH_BATCH_S
            refreshed, self._refreshed = self._refreshed, {}
            self._announce(refreshed, self.some_linked(FAN_OUT))

    @property
    def _wide_fan_out(self) -> int:
        return max(FAN_OUT, 1 + math.ceil(math.log(self._store.advert_count + 1)))

    def _announce(self, keys: Iterable[bytes], nodes: Collection[bytes]) -> None:
        if not nodes:
            return
        entries = [entry for entry in map(self._store.get, keys) if entry is not None]
        for message in exchange.announcements(entries):
            for node in nodes:
                self._findings.send(node, message)

    def some_linked(self, count: int) -> list[bytes]:
        return self._some(list(self._linked), count)

    def _some(self, nodes: list[bytes], count: int) -> list[bytes]:
        return self._draw.sample(nodes, count) if count < len(nodes) else nodes
