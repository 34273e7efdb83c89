"""Two machines under one id: a home folder that was copied. Pure.

Each start draws an instance number that its adverts carry. One instance after another is a restart; two that speak during the same
time are two machines.
"""

import msgspec

from potluck.swarm.adverts import Advert

_OVERLAP_S = 2.0  # hearing of both may be off by what a record takes from hand to hand
FORGET_S = 600.0  # after the last word of the one that is gone
_MAX_INSTANCES = 8


class Instance(msgspec.Struct):
    instance: bytes
    addresses: tuple[str, ...]
    first_s: float
    last_s: float

    def note(self, advert: Advert, born_s: float) -> None:
        if born_s > self.last_s:
            self.last_s, self.addresses = born_s, advert.addresses


class Duplicate(msgspec.Struct, frozen=True):
    """One id at several places: the addresses that each of the two gives, and its name."""

    node: bytes
    addresses: tuple[tuple[str, ...], ...]


class DuplicateWatch:
    """Told of every authentic advert, also of stale ones; answers who is there twice."""

    def __init__(self) -> None:
        self._instances: dict[bytes, list[Instance]] = {}

    def __repr__(self) -> str:
        return f"<DuplicateWatch {len(self._instances)} nodes>"

    def note(self, advert: Advert, born_s: float) -> Duplicate | None:
        """The duplicate that this advert shows, if any."""
        known = self._instances.setdefault(advert.node, [])
        if len(known) == 1 and known[0].instance == advert.instance:  # nearly always
            known[0].note(advert, born_s)
            return None
        mine = next((each for each in known if each.instance == advert.instance), None)
        if mine is None:
            mine = Instance(advert.instance, advert.addresses, born_s, born_s)
            known.append(mine)
            del known[:-_MAX_INSTANCES]
        else:
            mine.note(advert, born_s)
        return self.duplicate(advert.node, born_s) if len(known) > 1 else None

    def duplicate(self, node: bytes, now_s: float) -> Duplicate | None:
        known = [each for each in self._instances.get(node, ()) if now_s - each.last_s < FORGET_S]
        latest = max(known, key=lambda each: each.last_s, default=None)
        twins = [
            each
            for each in known
            if latest is not None and each is not latest and _overlap_s(each, latest) >= _OVERLAP_S
        ]
        return (
            Duplicate(node, tuple(each.addresses for each in (latest, *twins) if each is not None)) if twins else None
        )

    def forget(self, node: bytes) -> None:
        self._instances.pop(node, None)


def _overlap_s(a: Instance, b: Instance) -> float:
    return min(a.last_s, b.last_s) - max(a.first_s, b.first_s)
