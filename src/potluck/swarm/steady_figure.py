"""A measured figure as it is told to others: the same until it has been quite another for a while. Pure; time is told.

Everybody's plan follows such figures, and layers move after plans: a minute's load on a machine must not move any.
"""

FACTOR = 2.0
PATIENCE_S = 60.0


class SteadyFigure:
    """`told` is 0 until something was measured."""

    def __init__(self) -> None:
        self.told = 0
        self._doubted_s: float | None = None  # since when another figure is measured

    def __repr__(self) -> str:
        return f"<SteadyFigure {self.told}{'' if self._doubted_s is None else ', doubted'}>"

    def after(self, measured: int, now_s: float) -> int:
        """What is to be told now."""
        if not self.told:
            self.told = measured
        elif self.told / FACTOR < measured < self.told * FACTOR:
            self._doubted_s = None
        elif self._doubted_s is None:
            self._doubted_s = now_s
        elif now_s - self._doubted_s >= PATIENCE_S:
            self.told, self._doubted_s = measured, None
        return self.told
