"""One node's place in the swarm: gossip and dialling behind one set of inputs. No I/O; the service and the simulation drive it."""

import random
from collections.abc import Callable, Iterable

from potluck.identity.signed import Signed
from potluck.swarm.acceptance import Trust
from potluck.swarm.adverts import Advert, AdvertReader
from potluck.swarm.dialling import Dialler
from potluck.swarm.events import Dial, Event, Outcome
from potluck.swarm.gossip import Gossip
from potluck.swarm.own_advert import OwnAdvert
from potluck.swarm.view import View
from potluck.wire.messages import SwarmMessage


class Membership:
    """Inputs return what is to be done, in order: SendTo (to linked nodes only), Dial, Drop; and what happened."""

    def __init__(
        self,
        node: bytes,
        sign: Callable[[Advert], Signed],
        trust: Trust,
        draw: random.Random,
        now_s: float,
        incarnation: int,
        reader: AdvertReader | None = None,
    ) -> None:
        """`incarnation`: higher than at any start before. `sign`: with this node's key, see sign_advert."""
        self.gossip = Gossip(OwnAdvert(node, sign, draw, now_s, incarnation), trust, draw, now_s, reader)
        self.dialler = Dialler(node, draw)
        self._trust = trust

    def __repr__(self) -> str:
        return f"<Membership {self.gossip!r} {self.dialler!r}>"

    def view(self, now_s: float) -> View:
        return self.gossip.view(now_s)

    @property
    def incarnation(self) -> int:
        return self.gossip.own.incarnation

    # ------------------------------------------------------------ from this node

    def publish(self, advert: Advert | None, now_s: float) -> Outcome:
        return self._settled(self.gossip.publish(advert, now_s), now_s)

    def add_records(self, records: Iterable[Signed], now_s: float) -> Outcome:
        return self._settled(self.gossip.add_records(records, now_s), now_s)

    def remember(self, node: bytes, addresses: tuple[str, ...]) -> None:
        """A node known from before this start."""
        self.dialler.remember(node, addresses)

    def found(self, address: str, now_s: float) -> None:
        """An address from an invite or from discovery."""
        self.dialler.found(address, now_s)

    def drop_strangers(self, now_s: float) -> Outcome:
        """The roster changed by other means than a gossiped record."""
        return self._settled(self.gossip.drop_strangers(now_s), now_s)

    def tick(self, now_s: float) -> Outcome:
        outcome = self._settled(self.gossip.tick(now_s), now_s)
        outcome.effects += self.dialler.decide(self.gossip.linked, now_s)
        return outcome

    # ------------------------------------------------------------ from the network

    def on_message(self, sender: bytes, message: SwarmMessage, now_s: float) -> Outcome:
        return self._settled(self.gossip.on_message(sender, message, now_s), now_s)

    def dialled(self, dial: Dial, node: bytes, now_s: float) -> Outcome:
        """There is a link now, to `node`."""
        self.dialler.succeeded(dial, node)
        return self.link_up(node, now_s)

    def link_up(self, node: bytes, now_s: float) -> Outcome:
        return self._settled(self.gossip.link_up(node, now_s), now_s)

    def dial_failed(self, dial: Dial, reason: str, now_s: float) -> Outcome:
        dialled_s = self.dialler.failed(dial, now_s)
        if dial.node is None:
            return Outcome()
        return self._settled(self.gossip.unreachable(dial.node, dialled_s, now_s, reason), now_s)

    def link_lost(self, node: bytes, reason: str, now_s: float) -> Outcome:
        return self._settled(self.gossip.link_lost(node, now_s, reason), now_s)

    # ------------------------------------------------------------ keeping the dialler informed

    def _settled(self, outcome: Outcome, now_s: float) -> Outcome:
        for event in outcome.events:
            self._note(event)
        if self.gossip.findings.has_heard:
            self._note_heard(now_s)
        if outcome.has_dials:
            outcome.effects = [
                effect
                for effect in outcome.effects
                if not isinstance(effect, Dial) or self.dialler.begin(effect, now_s)
            ]
        return outcome

    def _note_heard(self, now_s: float) -> None:
        for node in self.gossip.findings.take_heard():
            advert = self.gossip.advert(node)
            if advert is not None and self.gossip.is_present(node):
                self.dialler.is_there(node, advert.addresses, now_s)

    def _note(self, event: Event) -> None:
        if event.kind == "lost":
            self.dialler.is_gone(event.node)
        elif event.kind in ("left", "expelled"):
            self.dialler.forget(event.node)
        elif event.kind == "returned":
            self.dialler.somebody_returned()
