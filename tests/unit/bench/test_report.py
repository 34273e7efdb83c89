"""Ratios, bars and the JSON object, from made-up figures."""

import msgspec
import pytest

from potluck.bench.report import BARS, Bar, BusyCoreFigures, Contest, as_json, lines, missed
from tests.support.bench_reports import figures, report


def test_ratios_are_of_medians() -> None:
    assert Contest((1.0, 100.0, 3.0), (2.0, 0.0, 1.0)).ratio == 3.0
    assert Contest((1.0,)).ratio is None
    assert figures().verify_ratio == pytest.approx(1.5)
    assert figures().batch_ratio == 4.0


def test_bars_in_both_directions() -> None:
    at_least, at_most = Bar("a", "a", 1.2, limits={2: 1.1}), Bar("b", "b", 1.9, is_at_most=True)
    assert at_least.is_met(1.15, 2)
    assert not at_least.is_met(1.15, 1)
    assert at_least.shown(2) == "≥ 1.1"
    assert at_most.is_met(1.9, 1)
    assert not at_most.is_met(1.91, 1)


def test_every_bar_has_its_lines_in_order() -> None:
    found = lines(report())
    assert list(dict.fromkeys(line.bar.key for line in found)) == list(BARS)
    assert [line.threads for line in found if line.bar.key == "prefill"] == [1, 2]
    assert missed(report()) == []


def test_what_is_missed_is_named() -> None:
    slow = report({1: figures(decode=150.0), 2: figures()}, two_threads=40.0)
    assert [(line.bar.key, line.threads) for line in missed(slow)] == [
        ("decode", 1),
        ("q4_k_1_5b_decode", 1),
        ("busy_core", None),
    ]


@pytest.mark.parametrize(("two_threads", "is_met"), [(1.0, True), (0.99, True), (0.93, False)])
def test_beside_a_busy_core_as_fast_to_within_the_noise_is_not_slower(two_threads: float, is_met: bool) -> None:
    one = tuple(80.0 + step for step in range(40))  # the machine drifts by far more than what is looked for
    noise = [0.96, 1.04, 0.98, 1.02, 1.0] * 8
    two = tuple(speed * two_threads * factor for speed, factor in zip(one, noise, strict=True))
    busy = BusyCoreFigures(
        one_thread=one, two_threads=two, one_thread_started_beside=one, two_threads_started_beside=one
    )
    line = lines(msgspec.structs.replace(report(), busy_core=busy))[-1]
    assert line.ratio == pytest.approx(min(two_threads, 1.0))
    assert line.uncertainty < 0.03
    assert line.is_met is is_met


def test_the_object_has_the_worst_ratio_and_all_of_them() -> None:
    found = as_json(report())
    assert found["decode_ratio"] == 1.8
    assert found["decode_ratio_by_threads"] == {"1": 2.0, "2": 1.8}
    assert found["verify4_ratio"] == pytest.approx(1.5)
    assert found["busy_core_ratio"] == 1.2
    assert found["read_bandwidth"] == {"1": 12e9, "2": 12e9}
    assert found["processor"] == "a processor"
    assert found["missed"] == []
    for key in BARS:
        assert f"{key}_ratio" in found
    decoded = msgspec.json.decode(msgspec.json.encode(found))
    assert decoded["figures"]["2"]["large"]["Q4_0"]["bytes_per_second"] == pytest.approx(13 * 8e8)
    assert decoded["figures"]["1"]["decode"]["llama_cpp"] == 100.0


def test_without_llama_cpp_its_ratios_are_empty_and_miss_nothing() -> None:
    alone = report({1: figures(theirs=False)})
    found = as_json(alone)
    assert found["decode_ratio"] is None
    assert found["decode_ratio_by_threads"] == {}
    assert found["batch8_ratio"] == 4.0
    assert missed(alone) == []
