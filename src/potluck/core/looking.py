"""Whether what is waited for comes soon enough to look for it instead of going to sleep, which costs tens of microseconds; and for how
long to leave such things alone where they turned out badly (ADR 17).
"""

import time
from collections.abc import Callable

_FIRST_S, _LONGEST_S, _SOON_S = 0.5, 8.0, 1.0


class Pace:
    """Of one kind of thing that is waited for again and again: it is taken to come as soon as it came the last time.

    All times are on one monotonic clock.
    """

    def __init__(self, soon_s: float) -> None:
        """`soon_s`: what takes longer is better slept for."""
        self.soon_s = soon_s
        self.is_soon = False
        self._since_s: float | None = None

    def __repr__(self) -> str:
        return f"<Pace {'soon' if self.is_soon else 'slow'}{', waiting' if self._since_s is not None else ''}>"

    def begin(self, now_s: float) -> None:
        self._since_s = now_s

    def end(self, now_s: float) -> None:
        """It has come. Nothing where nobody waited."""
        if self._since_s is not None:
            self.is_soon = 0 < self.soon_s >= now_s - self._since_s
            self._since_s = None


class Avoidance:
    """Something is left alone for a while; each time that it has to be again soon after that, for twice as long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._for_s = self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<Avoidance for {self._for_s:g} s{', now' if self.is_on else ''}>"

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until_s

    def begin(self) -> None:
        now_s = self._clock()
        is_again = self._for_s > 0 and now_s < self._until_s + _SOON_S
        self._for_s = min(2 * self._for_s, _LONGEST_S) if is_again else _FIRST_S
        self._until_s = now_s + self._for_s
