"""Whether the worker has the weights: loaded, being loaded, or unloaded because nobody has used them for long.

Keeps those who came while it was loading; does not know what else a session needs.
"""

from potluck.shard.effects import Effects
from potluck.shard.sessions import ShardSession
from potluck.wire.messages import Stage
from potluck.wire.work import Load, Unload


class Residency:
    """`step_us`: how long the worker takes for one token, smoothed."""

    def __init__(self, stage: Stage, effects: Effects, eviction_idle_s: float) -> None:
        self._stage, self._effects, self._eviction_idle_s = stage, effects, eviction_idle_s
        self.is_loaded = self.is_loading = False
        self.step_us = 0
        self.idle_since_s = 0.0
        self._postponed: list[ShardSession] = []  # opened while the shard was being loaded

    def __repr__(self) -> str:
        return f"<Residency {'loaded' if self.is_loaded else 'loading' if self.is_loading else 'unloaded'}>"

    def load(self) -> None:
        """Whoever carries out the effect starts a worker where there is none."""
        if not self.is_loaded and not self.is_loading:
            self.is_loading = True
            self._effects.work(Load(self._stage))

    def unload(self) -> None:
        self.is_loaded = False
        self._effects.work(Unload(self._stage))

    def is_unused(self, now_s: float) -> bool:
        return self.is_loaded and now_s - self.idle_since_s >= self._eviction_idle_s

    def note_step(self, compute_us: int) -> None:
        self.step_us = compute_us if self.step_us == 0 else (7 * self.step_us + compute_us) // 8

    # ------------------------------------------------------------ what the worker says

    def loaded(self, step_us: int, now_s: float) -> list[ShardSession]:
        """Gives those who have waited for it."""
        self.is_loaded, self.is_loading, self.step_us = True, False, step_us
        self.idle_since_s = now_s
        return self._take_postponed()

    def failed(self) -> list[ShardSession]:
        """Gives those who have waited in vain. A worker without weights would only take memory."""
        self.is_loading = False
        self._effects.work(Unload(self._stage))
        return self._take_postponed()

    def lost(self) -> None:
        """The worker's supervisor starts another one and loads again what was loaded."""
        self.is_loaded, self.is_loading = False, True
        self._postponed = []

    # ------------------------------------------------------------ who waits for it

    def postpone(self, session: ShardSession) -> None:
        self._postponed.append(session)
        self.load()

    def withdraw(self, session: ShardSession) -> bool:
        """Whether the session was waiting still, so that the worker has never heard of it."""
        if session not in self._postponed:
            return False
        self._postponed.remove(session)
        return True

    def _take_postponed(self) -> list[ShardSession]:
        postponed, self._postponed = self._postponed, []
        return postponed
