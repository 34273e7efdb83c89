"""Where the computing thread runs while one answer is on its way: off the core that daemons keep to (ADR 17).

A worker that looks for its next message would otherwise draw others to the daemons' core: whoever is woken while it looks is put there.
"""

from potluck.core.processors import CoreHold, all_but_the_last

_WINDOW_S = 0.02
_MOST = 1.6  # times as long as the processor was had for: another one that computes makes it twice as long, a busy host less


class Place:
    """`keep` while told to; `note` how each batch went. Not for the rest of an answer under which somebody else computes there as well:
    another node on this machine, say, with an answer of its own.
    """

    def __init__(self, hold: CoreHold | None = None) -> None:
        self._hold = hold or CoreHold(chosen=all_but_the_last)
        self._took_s = self._computed_s = 0.0
        self._is_kept = False

    def __repr__(self) -> str:
        return f"<Place {self._hold!r}>"

    def keep(self, is_wanted: bool) -> None:
        self._took_s = self._computed_s = 0.0
        self._is_kept = is_wanted
        self._hold.keep_while(is_wanted)

    def note(self, took_s: float, computed_s: float) -> None:
        """A batch took so long, and the thread had a core for so much of that."""
        if not self._is_kept:
            return
        self._took_s += took_s
        self._computed_s += computed_s
        if self._took_s > _WINDOW_S:
            self.keep(self._took_s <= _MOST * self._computed_s)
