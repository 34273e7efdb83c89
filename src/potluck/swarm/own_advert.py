"""What a node says about itself: when it says it anew, and what it does when somebody else speaks under its id. No I/O."""

import random
from collections.abc import Callable

import msgspec

from potluck.identity.signed import Signed
from potluck.swarm.adverts import Advert, Stamp
from potluck.swarm.duplicates import FORGET_S, Duplicate

_REFRESH_SHARE = 2 / 3  # of the lifetime: the rest is for the news to travel, also past lost messages
_CHANGE_GAP_S = 1.0  # between statements that differ
_REFUTE_GAP_S = 0.5
_REPEAT_GAP_S = 3.0
_TWIN_MARGIN_S = 2.0
_OUTBID_GAP_S = 30.0  # two clones would otherwise outbid each other without end


class OwnAdvert:
    """What is to be stated is set by `set_facts`; numbers and instance are filled in here."""

    def __init__(
        self, node: bytes, sign: Callable[[Advert], Signed], draw: random.Random, now_s: float, incarnation: int
    ) -> None:
        self.node, self.incarnation, self.version = node, incarnation, 0
        self._facts: Advert | None = None
        self._wanted: Advert | None = None
        self._twin: Duplicate | None = None
        self._twin_s = now_s  # when it spoke last
        self._sign, self._draw = sign, draw
        self._instance = draw.randbytes(8)
        self._started_s = self._next_outbid_s = now_s
        self._stated: Advert | None = None
        self._stated_s = self._refresh_s = now_s - _CHANGE_GAP_S
        self._is_changed = self._is_forced = self._is_doubted = False

    def __repr__(self) -> str:
        return f"<OwnAdvert {tuple(self.stamp)}{'' if self._facts is not None else ' silent'}>"

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.incarnation, self.version)

    def set_facts(self, facts: Advert | None) -> None:
        """What to state from now on; None: nothing."""
        self._facts = facts
        if facts is not None:
            self._wanted = msgspec.structs.replace(
                facts, node=self.node, incarnation=0, version=0, instance=self._instance
            )
        elif self._stated is not None:
            lifetime_s = self._stated.lifetime_s
            self._wanted = Advert(node=self.node, instance=self._instance, lifetime_s=lifetime_s, is_leaving=True)
        else:
            self._wanted = None
        self._is_changed = self._wanted != self._stated

    def due(self, now_s: float) -> Signed | None:
        """The statement to make now, if one is due."""
        wanted = self._wanted
        if wanted is None:
            return None
        is_refresh_due = now_s >= self._refresh_s and not wanted.is_leaving
        if not (self.is_forced(now_s) or is_refresh_due or (self._is_changed and self._may_change(now_s, wanted))):
            return None
        self._is_forced = self._is_doubted = self._is_changed = False
        self._stated, self._stated_s = wanted, now_s
        self._refresh_s = now_s + wanted.lifetime_s * _REFRESH_SHARE * self._draw.uniform(0.9, 1.0)
        self.version += 1
        return self._sign(msgspec.structs.replace(wanted, incarnation=self.incarnation, version=self.version))

    def is_forced(self, now_s: float) -> bool:
        """Whether it is to be said again although nothing changed."""
        return self._is_forced or (self._is_doubted and now_s - self._stated_s >= _REFUTE_GAP_S)

    def _may_change(self, now_s: float, wanted: Advert) -> bool:
        return wanted.is_leaving or now_s - self._stated_s >= _CHANGE_GAP_S

    def refute(self, stamp: Stamp) -> None:
        """Somebody takes this node for dead, after the statement with this number. Where that was made just now: in a while."""
        if stamp >= self.stamp and self._stated is not None:
            self._is_doubted = True

    def repeat(self, now_s: float) -> None:
        """Others may have missed what was said; not more often than they can stand."""
        if self._stated is not None and now_s - self._stated_s >= _REPEAT_GAP_S:
            self._is_forced = True

    def hear(self, advert: Advert, born_s: float, now_s: float) -> Duplicate | None:
        """An authentic advert of this very id. Returns the twin where another machine must have made it just now."""
        if advert.instance == self._instance:
            return None
        is_twin = not advert.is_leaving and born_s > self._started_s + _TWIN_MARGIN_S
        own = self._facts.addresses if self._facts is not None else ()
        if is_twin:
            self._twin, self._twin_s = Duplicate(self.node, (own, advert.addresses)), max(self._twin_s, born_s)
        if advert.stamp >= self.stamp and now_s >= self._next_outbid_s:
            self._next_outbid_s = now_s + (_OUTBID_GAP_S if is_twin else 0.0)
            # A higher number from before this start: the count on disk was lost.
            self.incarnation = advert.incarnation + (0 if is_twin else 1)
            self.version = advert.version if is_twin else 0
            self._is_forced = self._stated is not None
        return self._twin if is_twin else None

    def twin(self, now_s: float) -> Duplicate | None:
        """The other machine that uses this key; None once it has been silent for so long that others have forgotten it too."""
        return self._twin if now_s - self._twin_s < FORGET_S else None
