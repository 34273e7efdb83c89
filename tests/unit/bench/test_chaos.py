"""The chaos benchmark's own arithmetic: what is drawn, and what is reported."""

import random

import msgspec

from potluck.bench.chaos import ChaosSettings, DisturbedRun, _quantile, kind_of, summary
from potluck.testing.chaos import CONFIGURATIONS, Blow, RunOutcome, draw_blows

SETTINGS = ChaosSettings(model="m", layer_count=8)
KILL, STOP = Blow("decode", 0, "worker", "kill", 0.5), Blow("prefill", 1, "daemon", "stop", 0.1)


def disturbed(pauses: list[float], struck: list[Blow], is_identical: bool = True) -> DisturbedRun:
    outcome = RunOutcome(pauses_ms=pauses, struck=struck, aborted="" if is_identical else "shard_unavailable: gone")
    return DisturbedRun(2, CONFIGURATIONS[0], tuple(struck), outcome, is_identical)


def test_every_kind_of_blow_is_drawn() -> None:
    draw = random.Random(1)
    drawn = [draw_blows(draw, 3) for _ in range(300)]
    blows = [blow for group in drawn for blow in group]
    assert {blow.moment for blow in blows} == {"prefill", "decode", "recovery"}
    assert {(blow.target, blow.how) for blow in blows} == {
        (t, h) for t in ("worker", "daemon") for h in ("kill", "stop")
    }
    assert {blow.place for blow in blows} == {0, 1, 2}
    assert {len(group) for group in drawn} == {1, 2}
    at_once = [group for group in drawn if len(group) == 2 and group[1].moment != "recovery"]
    assert all(a.place != b.place and a.at == b.at for a, b in at_once)
    assert len(CONFIGURATIONS) == 8


def test_the_same_seed_draws_the_same_blows() -> None:
    first, second = ([draw_blows(draw, 4) for _ in range(50)] for draw in (random.Random(5), random.Random(5)))
    assert first == second


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
