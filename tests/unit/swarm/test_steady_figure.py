"""Figures that others plan by: calm while a machine is busy for a moment, true in the end."""

from potluck.swarm.steady_figure import PATIENCE_S, SteadyFigure


def test_the_first_measurement_is_told_at_once_and_tremors_are_not() -> None:
    figure = SteadyFigure()
    assert [figure.after(measured, now_s) for now_s, measured in enumerate((100, 150, 60, 199, 51))] == [100] * 5


def test_a_burst_is_forgotten_and_a_lasting_change_is_told() -> None:
    figure = SteadyFigure()
    figure.after(100, 0.0)
    assert figure.after(900, 1.0) == 100
    assert figure.after(120, PATIENCE_S) == 100  # it was a burst
    assert figure.after(900, PATIENCE_S + 1) == 100
    assert figure.after(900, 2 * PATIENCE_S) == 100
    assert figure.after(900, 2 * PATIENCE_S + 1) == 900
