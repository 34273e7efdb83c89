"""How much memory a machine gives for layers: what its owner asked for, or a share of what is free."""

import pytest

from potluck.node import machine
from potluck.node.machine import memory_budget_bytes

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("asked", "budget"),
    [(64 * GB, 64 * GB), (500 * GB, 128 * GB), (1 * GB, 1 * GB), (0, 0), (None, 20 * GB)],
)
def test_what_was_asked_for_is_given_beyond_the_usual_most_but_not_beyond_the_machine(
    asked: int | None, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_total_bytes", lambda: 128 * GB)
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 100 * GB)
    assert memory_budget_bytes(asked, usual_most_bytes=20 * GB) == budget


def test_unasked_a_quarter_of_what_is_free_stays_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 8 * GB)
    assert memory_budget_bytes(None, usual_most_bytes=20 * GB) == 6 * GB
