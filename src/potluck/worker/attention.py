"""While one answer is on its way the computing thread keeps off the core that daemons keep to, and looks for what comes (ADR 17).

It looks only where it keeps off: whoever is woken while a worker looks is put beside the daemons, unless he keeps off that core as well.
"""

from typing import Protocol

from potluck.core.looking import Avoidance
from potluck.core.processors import CoreHold, all_but_the_last

_WINDOW_S = 0.1
_MOST = 1.6  # times as long as the processor was had for: another one that computes makes it twice as long, a busy host less


class Looking(Protocol):
    """Whoever receives messages."""

    def look_for(self, look_s: float) -> None:
        """From now on the next message is looked for so long before it is slept for."""


class Attention:
    """`attend` when told to; `note` how each batch went. Not while somebody else computes where this thread keeps to: another node on this
    machine, say, with an answer of its own.
    """

    def __init__(self, channel: Looking, hold: CoreHold | None = None, avoidance: Avoidance | None = None) -> None:
        self._channel, self._hold = channel, hold or CoreHold(chosen=all_but_the_last)
        self._avoidance = avoidance or Avoidance()
        self._look_s = 0.0
        self._is_paid = False
        self._took_s = self._computed_s = 0.0

    def __repr__(self) -> str:
        return f"<Attention {'paid' if self._is_paid else 'not paid'}, {self._hold!r}>"

    def attend(self, look_s: float) -> None:
        """0: no more of it."""
        self._look_s = look_s
        self._pay(look_s > 0 and not self._avoidance.is_on)

    def note(self, took_s: float, computed_s: float) -> None:
        """A batch took so long, and the thread had a core for so much of that."""
        if not self._look_s:
            return
        if not self._is_paid:
            if not self._avoidance.is_on:
                self._pay(True)
            return
        self._took_s += took_s
        self._computed_s += computed_s
        if self._took_s > _WINDOW_S:
            is_crowded = self._took_s > _MOST * self._computed_s
            self._took_s = self._computed_s = 0.0
            if is_crowded:
                self._avoidance.begin()
                self._pay(False)

    def _pay(self, is_wanted: bool) -> None:
        self._took_s = self._computed_s = 0.0
        self._is_paid = is_wanted
        is_held = self._hold.keep_while(is_wanted)
        self._channel.look_for(self._look_s if is_held else 0.0)
