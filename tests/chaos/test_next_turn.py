"""Seeds of conversations in two turns, with faults in both and between them: what shards have kept never changes a token."""

import os

import msgspec

from potluck.orchestrator.generation import Generation
from potluck.orchestrator.recovery import HeadStage
from potluck.testing.simulated_turns import run_many_turns, run_turns
from potluck.testing.simulation import Parts
from potluck.wire.messages import Opened, Rewired

SEEDS = 20_000 if os.environ.get("POTLUCK_LONG") else 300


def test_the_next_turn_is_the_undisturbed_one_whatever_happened_to_what_was_kept() -> None:
    outcomes = run_many_turns(range(SEEDS))
    bad = [f"seed {outcome.seed}: {outcome.problem[:300]}" for outcome in outcomes if outcome.problem]
    resumed, reused = sum(outcome.resumed for outcome in outcomes), sum(outcome.reused for outcome in outcomes)
    print(f"\n{SEEDS} seeds, {resumed} next turns, {reused} of them without computing anything again")
    assert not bad, "\n".join(bad[:10])
    assert SEEDS // 4 < reused < resumed  # often it was all there, and often not


# ---------------------------------------------------------------- the simulation can fail


class BelievesThatAllIsThere(Generation):
    def _on_answer(self, stage: HeadStage, message: Opened | Rewired, now_s: float) -> None:
        super()._on_answer(stage, msgspec.structs.replace(message, length=self._journal.confirmed), now_s)


def problems_of(parts: Parts) -> int:
    """Few: a shard that is fed what it lacks the beginning of says so, and after its second complaint another takes its place."""
    return sum(bool(run_turns(seed, parts=parts).problem) for seed in range(100))


def test_a_head_that_does_not_look_what_is_left_does_not_get_through() -> None:
    assert problems_of(Parts(generation=BelievesThatAllIsThere)) > 0
