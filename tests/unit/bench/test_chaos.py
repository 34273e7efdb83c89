"""The chaos benchmark's own arithmetic: what is dealt, and what is reported."""

import random

import msgspec
import pytest

from potluck.bench.chaos import ChaosSettings, DisturbedRun, _quantile, kind_of, summary
from potluck.testing.chaos import CONFIGURATIONS, Blow, RunOutcome, deal
from tests.support.chaos_runs import DEFAULT_COUNTS, LONG_COUNTS, SEED

SETTINGS = ChaosSettings(model="m", layer_count=8)
KILL, STOP = Blow("decode", 0, "worker", "kill", 0.5), Blow("prefill", 1, "daemon", "stop", 0.1)


def disturbed(pauses: list[float], struck: list[Blow], is_identical: bool = True) -> DisturbedRun:
    outcome = RunOutcome(pauses_ms=pauses, struck=struck, aborted="" if is_identical else "shard_unavailable: gone")
    return DisturbedRun(2, CONFIGURATIONS[0], tuple(struck), outcome, is_identical)


@pytest.mark.parametrize("counts", [DEFAULT_COUNTS, LONG_COUNTS])
@pytest.mark.parametrize("seed", [SEED, *range(20)])
def test_what_is_dealt_to_the_tests_has_everything_that_was_promised(seed: int, counts: dict[int, int]) -> None:
    """Issue 3, what it must show, 1: whatever the seed, and in the short run too."""
    dealt = deal(random.Random(seed), counts)
    assert {shards: len(hands) for shards, hands in dealt.items()} == counts
    hands = [hand for group in dealt.values() for hand in group]
    assert {(blow.how, blow.target, blow.moment) for hand in hands for blow in hand.blows} == {
        (how, target, moment)
        for how in ("kill", "stop")
        for target in ("worker", "daemon")
        for moment in ("prefill", "decode", "recovery")
    }
    assert {(shards, hand.blows[0].place) for shards, group in dealt.items() for hand in group} == {
        (shards, place) for shards in (2, 3, 4) for place in range(shards)
    }
    assert {hand.configuration for hand in hands} == set(CONFIGURATIONS)
    pairs = [hand.blows for hand in hands if len(hand.blows) == 2]
    at_once = [(one, two) for one, two in pairs if two.moment != "recovery"]
    assert len(at_once) >= 4
    assert all((one.moment, one.at) == (two.moment, two.at) for one, two in at_once)
    assert all(one.place != two.place for one, two in pairs)  # who lies down already would not feel it


def test_the_same_seed_deals_the_same_hands() -> None:
    assert deal(random.Random(3), LONG_COUNTS) == deal(random.Random(3), LONG_COUNTS)
    assert deal(random.Random(3), LONG_COUNTS) != deal(random.Random(4), LONG_COUNTS)


def test_an_answer_has_felt_its_blows_where_all_struck_in_time_and_somebody_was_missed() -> None:
    late = msgspec.structs.replace(STOP, moment="decode")
    cases = [([KILL, STOP], ["shard"]), ([STOP], ["shard"]), ([KILL, STOP], []), ([KILL, late], ["shard"]), ([], [])]
    felt = [RunOutcome(struck=struck, lost=lost).has_felt([KILL, STOP]) for struck, lost in cases]
    assert felt == [True, False, False, False, False]


def test_the_report_has_what_was_promised() -> None:
    runs = [disturbed([10.0], [KILL]), disturbed([30.0, 20.0], [KILL, STOP]), disturbed([], [STOP], is_identical=False)]
    report = summary(SETTINGS, runs)
    assert (report.kills, report.identical, report.signals, report.failovers) == (3, 2, 4, 3)
    assert (report.pause_p50_ms, report.pause_p95_ms, report.pause_max_ms) == (20.0, 30.0, 30.0)
    assert [figures.kind for figures in report.kinds] == [
        "kill worker, decode",
        "stop daemon, prefill",
        "two at once, decode",
    ]
    assert [mismatch.aborted for mismatch in report.mismatches] == ["shard_unavailable: gone"]
    keys = msgspec.json.decode(msgspec.json.encode(report))
    assert {"kills", "identical", "pause_p50_ms", "pause_p95_ms", "pause_max_ms"} <= keys.keys()


def test_quantiles_of_few_values() -> None:
    assert [_quantile([], share) for share in (0.5, 1.0)] == [0.0, 0.0]
    assert [_quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.75, 0.95, 1.0)] == [2.0, 3.0, 4.0, 4.0]


def test_kinds_have_names() -> None:
    later = Blow("recovery", 0, "worker", "kill", 0.0)
    assert [kind_of(struck) for struck in ([], [KILL], [KILL, STOP], [KILL, later])] == [
        "missed", "kill worker, decode", "two at once, decode", "two, the second during recovery",
    ]  # fmt: skip
