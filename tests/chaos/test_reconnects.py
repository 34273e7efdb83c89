"""Seeds of answers whose head dies, with faults of shards before and after: another head goes on, and no token changes."""

import os

from potluck.orchestrator.generation import Generation
from potluck.shard.core import ShardCore
from potluck.shard.sessions import ShardSession
from potluck.testing.simulated_reconnects import run_many_reconnects, run_reconnects
from potluck.testing.simulation import Parts
from potluck.wire.messages import Rewire, Sampler

SEEDS = 20_000 if os.environ.get("POTLUCK_LONG") else 300


def test_another_head_goes_on_with_the_undisturbed_text() -> None:
    outcomes = run_many_reconnects(range(SEEDS))
    bad = [f"seed {outcome.seed}: {outcome.problem[:300]}" for outcome in outcomes if outcome.problem]
    taken_up = sum(outcome.taken_up for outcome in outcomes)
    remembered = sum(outcome.remembered for outcome in outcomes)
    print(f"\n{SEEDS} seeds, {taken_up} answers taken up, {remembered} of them remembered by a shard")
    assert not bad, "\n".join(bad[:10])
    assert SEEDS // 4 < remembered < taken_up


# ---------------------------------------------------------------- the simulation can fail


class RemembersTheOldEpoch(ShardCore):
    """Appends what it chooses in a new epoch to what it had chosen before."""

    def _on_rewire(self, session: ShardSession, message: Rewire) -> None:
        before = list(session.chosen)
        super()._on_rewire(session, message)
        session.chosen = before


class ForgetsWhereThePromptEnds(Generation):
    """Takes the begun answer for a part of the prompt."""

    @property
    def generated(self) -> list[int]:
        return super().generated[len(self.request.begun) :]


class SamplesAsIfNothingHadBegun(Generation):
    def _form(self, now_s: float) -> None:
        sampler = self._journal.sampler

        def forgetful() -> Sampler:
            told = sampler()
            length = len(told.history)
            return Sampler(told.params, told.choice, length, told.history, told.eos, told.limit, told.grammar)

        self._journal.sampler = forgetful  # type: ignore[method-assign]
        super()._form(now_s)


def problems_of(parts: Parts, seeds: int = 60) -> int:
    return sum(bool(run_reconnects(seed, parts=parts).problem) for seed in range(seeds))


def test_broken_code_does_not_get_through() -> None:
    assert problems_of(Parts(core=RemembersTheOldEpoch)) > 0
    assert problems_of(Parts(generation=ForgetsWhereThePromptEnds)) > 0
    assert problems_of(Parts(generation=SamplesAsIfNothingHadBegun)) > 0
