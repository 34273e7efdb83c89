"""Keeps an event loop awake for a moment after it was last needed: going to sleep and being woken costs tens of microseconds, and a token
meets six such places on its way over a hop. Takes a processor's core while it lasts, so it is for nodes whose steps are short.
"""

import asyncio
import time

from potluck.core.processors import give_way_where_few


class Spinner:
    """`touch` it whenever something happened after which more is likely to come soon; `stay_awake` where it is known how soon."""

    def __init__(self, loop: asyncio.AbstractEventLoop, spin_s: float) -> None:
        self._loop, self._spin_s = loop, spin_s
        self._until_s = 0.0
        self._is_turning = False

    def __repr__(self) -> str:
        return f"<Spinner {'turning' if self._is_turning else 'still'}>"

    def touch(self) -> None:
        if self._spin_s > 0:
            self.stay_awake(self._spin_s)

    def stay_awake(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds
        if not self._is_turning:
            self._is_turning = True
            self._loop.call_soon(self._turn)

    def rest(self) -> None:
        """What `stay_awake` was for has come; from here on it is as if touched."""
        self.stop()
        self.touch()

    def stop(self) -> None:
        self._until_s = 0.0

    def _turn(self) -> None:
        """A loop that has something to call looks at its sockets without waiting."""
        self._is_turning = time.monotonic() < self._until_s
        if self._is_turning:
            give_way_where_few()  # to whoever is about to bring it, or is looking as well
            self._loop.call_soon(self._turn)
