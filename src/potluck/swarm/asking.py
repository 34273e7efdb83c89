"""Which records to ask whom for: what was asked already, who did not deliver, what was refused, what came to its end. No I/O."""

from typing import Any, NamedTuple

from potluck.swarm import exchange
from potluck.swarm.acceptance import Ended
from potluck.swarm.adverts import Stamp
from potluck.swarm.records import Entry

MAX_REMEMBERED = 8192
_WANTED_S = 1.0  # to wait for a record before another node is asked
_REFUSED_S = 30.0


class _Asked(NamedTuple):
    stamp: Stamp
    until_s: float
    sender: bytes


class Asking:
    """All of it bounded: the oldest is forgotten first."""

    def __init__(self) -> None:
        self._asked: dict[bytes, _Asked] = {}
        self._unreliable: dict[bytes, None] = {}  # nodes that announced what they did not deliver
        self._refused: dict[tuple[bytes, bytes], tuple[Stamp, float]] = {}  # by key and sender; until when
        self._ended: dict[bytes, Ended] = {}

    def __repr__(self) -> str:
        return f"<Asking for {len(self._asked)} records, {len(self._refused)} refused>"

    @property
    def remembered(self) -> int:
        """The longest of its tables."""
        return max(len(self._asked), len(self._unreliable), len(self._refused), len(self._ended))

    def wants(self, sender: bytes, key: bytes, stamp: Stamp, check: int, held: Entry | None, now_s: float) -> bool:
        """Whether to ask the sender for this record; if so it is noted as asked for."""
        ended = self._ended.get(key)
        if not exchange.is_news(held, stamp, check, ended.stamp if ended is not None else None):
            return False
        refused = self._refused.get((key, sender))
        if refused is not None and refused[0] >= stamp and refused[1] > now_s:
            return False
        asked = self._asked.get(key)
        if asked is not None and asked.until_s <= now_s:
            self._distrust(asked.sender)
        elif asked is not None and asked.stamp >= stamp and asked.sender not in self._unreliable:
            return False
        self._ask(key, stamp, sender, now_s)
        return True

    def _ask(self, key: bytes, stamp: Stamp, sender: bytes, now_s: float) -> None:
        self._asked[key] = _Asked(stamp, now_s + _WANTED_S, sender)
        _shorten(self._asked)

    def came(self, key: bytes) -> Stamp | None:
        """A record is here; returns what was announced for it, if it was asked for."""
        asked = self._asked.pop(key, None)
        return asked.stamp if asked is not None else None

    def refuse(self, key: bytes, stamp: Stamp, sender: bytes, now_s: float) -> None:
        self._refused[key, sender] = (stamp, now_s + _REFUSED_S)
        _shorten(self._refused)
        self._distrust(sender)

    def _distrust(self, sender: bytes) -> None:
        """Its announcements do not keep us from asking others any more."""
        self._unreliable[sender] = None
        _shorten(self._unreliable)

    def ask_again(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """What was refused may be good now that more is known of who belongs here: keys, and who has them."""
        refused, self._refused = self._refused, {}
        for (key, sender), (stamp, _) in refused.items():
            self._ask(key, stamp, sender, now_s)
        return list(refused)

    def end(self, key: bytes, stamp: Stamp, now_s: float) -> None:
        """A record came to its end here; it is not wanted again."""
        self._ended[key] = Ended(stamp, now_s)
        _shorten(self._ended)

    def ended(self, key: bytes) -> Ended | None:
        return self._ended.get(key)

    def begin(self, key: bytes) -> None:
        """A newer one took its place."""
        self._ended.pop(key, None)

    def slept(self) -> None:
        self._asked.clear()


def _shorten(remembered: dict[Any, Any]) -> None:
    while len(remembered) > MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
