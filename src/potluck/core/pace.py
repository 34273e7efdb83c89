"""Whether what is waited for comes soon enough to look for it instead of going to sleep: as soon as it came the last time."""


class Pace:
    """Of one kind of thing that is waited for again and again. All times are on one monotonic clock."""

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
            self.is_soon = now_s - self._since_s <= self.soon_s
            self._since_s = None
