"""Whether a client takes its answer fast enough to keep the turn that others wait for. No clock, no I/O.

Only the time counts in which the client holds up what is sent to it. Who waits for a slow answer holds up nothing, however long it takes;
who sips just enough of it that no single wait is long is found out over a whole window of such waits.
"""


class ReaderPace:
    def __init__(self, window_s: float, least_bytes_per_s: float) -> None:
        """`window_s`: of waiting, after which it is judged, and begins anew."""
        self._window_s, self._least_bytes_per_s = window_s, least_bytes_per_s
        self._waited_s, self._taken_bytes = 0.0, 0

    def __repr__(self) -> str:
        return f"<ReaderPace {self._taken_bytes} bytes in {self._waited_s:.1f} s of waiting>"

    def is_kept(self, waited_s: float, sent_bytes: int) -> bool:
        """After each sending: how long the client kept it waiting, and how much it was.

        What a client takes while it is not waited for counts as well: a buffer is between, which empties in one go.
        """
        self._waited_s += waited_s
        self._taken_bytes += sent_bytes
        if self._waited_s < self._window_s:
            return True
        is_enough = self._taken_bytes >= self._least_bytes_per_s * self._waited_s
        self._waited_s, self._taken_bytes = 0.0, 0
        return is_enough
