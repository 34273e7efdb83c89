"""What a shard may take of a machine's memory: what its weights leave of the budget is for KV."""

from types import SimpleNamespace

import pytest

from potluck.core.errors import BadRequest
from potluck.node.machine import computing_threads, reading_bytes_per_s
from potluck.node.serving import (
    ServingSettings,
    awake_s,
    look_s,
    parse_stage,
    rehearsal_lead_s,
    rehearsal_reaches_worker,
    rehearsal_shortest_s,
    rehearsal_watch_s,
    spin_s,
    within_memory,
)
from tests.support.stored_models import MEGABYTE, stored_model


@pytest.mark.parametrize(
    ("layers", "is_tied", "kv_megabytes"),
    [(None, False, 50), ("0-1", False, 75), ("2-output", False, 75), ("1-2", False, 80), (None, True, 55), ("3-output", True, 85)],
)  # fmt: skip
def test_kv_gets_what_the_weights_leave(layers: str | None, is_tied: bool, kv_megabytes: int) -> None:
    settings = within_memory(stored_model(is_tied=is_tied), parse_stage(layers, 4), ServingSettings(), 100 * MEGABYTE)
    assert settings.kv_budget_bytes == kv_megabytes * MEGABYTE


def test_a_large_budget_changes_nothing() -> None:
    assert within_memory(stored_model(), parse_stage(None, 4), ServingSettings(), 1 << 40) == ServingSettings()


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    with pytest.raises(BadRequest, match=r"layers 0-1, the embedding of m take 25.0 MB, and shards may have 25.0 MB"):
        within_memory(stored_model(), parse_stage("0-1", 4), ServingSettings(), 25 * MEGABYTE)


@pytest.mark.parametrize(
    ("cores", "device", "threads", "rehearses", "looks", "watches", "spins"),
    [
        (1, "cpu", 1, False, False, False, False), (2, "cpu", 1, True, False, False, False),
        (4, "cpu", 1, True, True, False, False), (6, "cpu", 1, True, True, True, False),
        (8, "cpu", 7, True, True, True, False), (8, "cpu", 8, True, True, False, False), (4, "cuda", 1, True, True, False, False),
        (8, "cuda", 1, False, False, False, True), (8, "cuda:torch-cpu", 1, True, True, True, False),
    ],
)  # fmt: skip
def test_who_stays_awake_has_cores_to_spare(
    cores: int, device: str, threads: int, rehearses: bool, looks: bool, watches: bool, spins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("potluck.node.serving.usable_cores", lambda: cores)
    monkeypatch.setattr("potluck.node.serving.whole_cores", lambda: cores)
    assert (rehearsal_lead_s(device) > 0, awake_s(device) > 0) == (rehearses, looks)
    assert (rehearsal_watch_s(device, threads) > 0, spin_s(device) > 0) == (watches, spins)
    assert (rehearsal_shortest_s() < 0.001, rehearsal_reaches_worker()) == (cores >= 4, cores >= 4)


@pytest.mark.parametrize(
    ("cores", "whole", "device", "threads", "looks"),
    [
        (2, 2, "cpu", 1, True), (3, 3, "cpu", 1, True), (3, 3, "cpu", 2, False),
        (1, 1, "cpu", 1, False), (4, 4, "cpu", 1, False),  # too few; enough for rehearsals
        (2, 1, "cpu", 1, False),  # two threads of one core, or a quota: whoever looks takes it from who computes
        (2, 2, "cpu", 2, False), (2, 2, "cuda", 1, False),
    ],
)  # fmt: skip
def test_on_few_cores_daemon_and_worker_look_for_what_comes_soon(
    cores: int, whole: int, device: str, threads: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.node.serving.own_cores", lambda: cores)
    monkeypatch.setattr("potluck.node.serving.whole_cores", lambda: whole)
    monkeypatch.setattr("potluck.node.serving.OWN_GROUPS", SimpleNamespace(cores=lambda: None))
    assert (look_s(device, threads) > 0) == looks
    monkeypatch.setattr("potluck.node.serving.OWN_GROUPS", SimpleNamespace(cores=lambda: 2))
    assert look_s(device, threads) == 0, "whoever looks would spend what others are to compute with"


@pytest.mark.parametrize(
    ("usable", "physical", "threads"),
    [(1, 1, 1), (2, 2, 1), (4, 4, 3), (16, 8, 7), (2, 8, 1), (6, None, 5), (64, 32, 8)],
)
def test_a_core_stays_for_the_owner(
    usable: int, physical: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.node.machine.usable_cores", lambda: usable)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: physical)
    assert computing_threads() == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_how_fast_memory_is_read_is_a_plausible_number(threads: int) -> None:
    assert 1e8 < reading_bytes_per_s(threads) < 1e13
