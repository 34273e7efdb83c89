"""From the first sign of trouble to the next token: what the reader will be told of it, and how long a holder is waited for. Pure.

Knows times, names and refusals; not who is to blame (`blame.py`) nor how a pipeline is put together again (`recovery.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from potluck.orchestrator.request import GenerationSettings

_NO_HOLDER = ("shard_unavailable", "no shard covers some layers")
Method = Literal["replay", "re-prefill", "none"]


@dataclass
class Outage:
    """What the failover frame will report."""

    began_s: float
    lost: list[str] = field(default_factory=list)
    replayed: int = 0
    method: Method = "none"

    def fed(self, positions: int, *, is_from_tokens: bool) -> None:
        """A new stage is fed so many positions; `is_from_tokens`: by the head, which makes every stage compute them again."""
        self.replayed = max(self.replayed, positions)
        self.method = "re-prefill" if is_from_tokens and positions else "replay"


class Troubles:
    """One outage at most, however much of it there is; and the clock of waiting, which only a token stops."""

    def __init__(self, settings: GenerationSettings) -> None:
        self._settings = settings
        self.current: Outage | None = None
        self.last_refusal = _NO_HOLDER  # code and words, for the case that nothing helps
        self._fruitless = 0  # losses since the last token
        self.without_outbox: set[bytes] = set()  # sessions that have said since the last token that theirs is gone
        self._waiting_since_s: float | None = None  # for a holder, without a token since
        self._tried_s = 0.0

    def __repr__(self) -> str:
        return f"<Troubles {self._fruitless} fruitless, {self.current}>"

    def lost(self, names: Iterable[str], last_progress_s: float) -> None:
        if self.current is None:
            self.current = Outage(last_progress_s)
        self.current.lost += names
        self._fruitless += 1

    @property
    def prefers_local(self) -> bool:
        """Others have failed so often that the head's own layers may be taken, whoever else there is."""
        return self._fruitless > self._settings.fallback_after

    def over(self) -> Outage | None:
        """A token came. Gives what it ended, if anything."""
        self._fruitless = 0
        self.without_outbox.clear()
        self._waiting_since_s = None
        self.last_refusal = _NO_HOLDER
        outage, self.current = self.current, None
        return outage

    # ------------------------------------------------------------ waiting for a holder

    def wait(self, now_s: float) -> None:
        """Nobody holds some layers, as one has just found."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        self._tried_s = now_s

    def is_hopeless(self, now_s: float) -> bool:
        return now_s >= self._ends_s()

    def is_retry_due(self, now_s: float) -> bool:
        return now_s >= self._tried_s + self._settings.holder_retry_s

    def next_try_s(self) -> float:
        return min(self._ends_s(), self._tried_s + self._settings.holder_retry_s)

    def _ends_s(self) -> float:
        assert self._waiting_since_s is not None
        return self._waiting_since_s + self._settings.holder_wait_s

    def slept(self, late_s: float) -> None:
        """This process did not run for so long, which is not waiting."""
        if self._waiting_since_s is not None:
            self._waiting_since_s += late_s
