"""What a steward makes of layers that cannot be loaded: it tries ever more rarely, and others get them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from potluck.core.device_facts import DeviceFacts
from potluck.core.errors import OutOfDeviceMemory, PotluckError, ShardUnavailable
from potluck.node import steward as steward_module
from potluck.node.own_statement import OwnStatement
from potluck.node.placement import node_offers
from potluck.node.serving import ServingSettings
from potluck.node.steward import Steward
from potluck.swarm.adverts import MAX_SPEEDS, MAX_UNWELL, read_advert, sign_advert
from potluck.swarm.upkeep import ShardPhase
from potluck.wire.messages import Stage
from tests.support.link_ends import run_test
from tests.support.partial_models import whole_tiny
from tests.support.stewards import GIB, FakeServer, Roster, duty_of, make, record, turns, view
from tests.support.swarm_records import KEYS, WEIGHTS


@pytest.mark.parametrize("has_old_range", [False, True])
def test_a_range_that_cannot_be_loaded_is_tried_ever_more_rarely_and_then_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_old_range: bool
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        clock = [1000.0]
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: clock[0]))
        old: Any = FakeServer(Stage(0, 4, True, False), sessions=0)
        new: Any = FakeServer(Stage(4, 8, False, True), sessions=0)
        if has_old_range:
            duty.shards[old] = ShardPhase.SERVING
        pauses_s = []
        for _ in range(5):
            duty.shards[new], duty.is_loading = ShardPhase.LOADING, True
            for _ in range(100):  # longer than what is well is watched
                steward._look_after_workers(duty)
                clock[0] += 1.0
            del duty.shards[new]
            duty.is_loading = False
            steward._failed(duty, "there is no memory")
            pauses_s.append(duty.retry_at_s - clock[0])
            assert duty.is_unwell(clock[0]) == (len(pauses_s) > 1)
            while clock[0] < duty.retry_at_s:
                steward._look_after_workers(duty)
                clock[0] += 1.0
        assert pauses_s == [2.0, 10.0, 30.0, 60.0, 60.0]

    run_test(main())


def test_failures_are_forgotten_when_something_has_been_served_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        clock = [1000.0]
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: clock[0]))
        steward._failed(duty, "there is no memory")
        clock[0] = 2000.0
        server: Any = FakeServer(Stage(0, 8, True, True), sessions=0)
        duty.serves(server, clock[0])
        for clock[0], failures in ((2001.0, 1), (2059.0, 1), (2060.0, 0)):
            steward._look_after_workers(duty)
            assert duty.failures == failures

    run_test(main())


def test_a_model_that_fails_on_a_machine_takes_no_other_model_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        words = (record("well", "a" * 64), record("sick", "b" * 64))
        steward, _ = make(tmp_path, Roster(*words), [])
        well, sick = (duty_of(monkeypatch, word) for word in words)
        steward.duties = {duty.costs.weights_sha256: duty for duty in (well, sick)}
        for _ in range(2):
            steward._failed(sick, "the disk is full")
        here = view(steward._own_advert())
        assert [offer.node for offer in node_offers(here, well.costs, lambda node: True)] == [KEYS[0].node_id]
        assert node_offers(here, sick.costs, lambda node: True) == []
        sick.retry_at_s = 0.0
        assert node_offers(view(steward._own_advert()), sick.costs, lambda node: True)

    run_test(main())


def test_of_many_models_that_fail_so_many_are_told_as_an_advert_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(), [])
        for number in range(MAX_SPEEDS):
            duty = duty_of(monkeypatch, record(f"m{number}", f"{number:064x}"))
            steward.duties[duty.costs.weights_sha256] = duty
            duty.failures, duty.retry_at_s = 2, float("inf")
        told = steward._own_advert()
        assert len(told.unwell) == MAX_UNWELL
        assert read_advert(sign_advert(KEYS[0], told)).advert == told

    run_test(main())


@pytest.mark.parametrize("failure", [ShardUnavailable("the file is gone"), OutOfDeviceMemory("others took it")])
def test_a_shard_that_cannot_be_loaded_again_after_it_slept_is_offered_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: PotluckError
) -> None:
    async def main() -> None:
        steward, node = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        measured, said = list[str](), list[str]()
        steward.measure_device = lambda device: measured.append(device) or facts(3 * GIB)  # type: ignore[func-returns-value]
        monkeypatch.setattr(steward, "_say", said.append)
        server: Any = FakeServer(Stage(0, 8, True, True), sessions=0, is_loaded=False)
        duty.serves(server, 0.0)
        steward._look_after_workers(duty)
        assert steward._own_advert().shards, "it sleeps, and loads at the next question"
        server.load_failure = failure
        steward._look_after_workers(duty)
        assert (steward._own_advert().shards, duty.failures, duty.problem) == ((), 1, str(failure))
        assert [str(failure) in line for line in said] == [True]
        await turns(lambda: node.removed == [server])
        await asyncio.gather(*steward._tasks)
        assert bool(measured) == isinstance(failure, OutOfDeviceMemory)

    run_test(main())


def facts(free_bytes: int) -> DeviceFacts:
    return DeviceFacts("cuda", "a GPU", 8 * GIB, free_bytes, 1e12)


def on_a_gpu(steward: Steward) -> None:
    serving = ServingSettings(device="cuda")
    settings = msgspec.structs.replace(
        steward.settings, device=facts(8 * GIB), serving=serving, memory_budget_bytes=8 * GIB
    )
    steward.settings, steward.statement = settings, OwnStatement(steward._node.id, settings, lambda: ())
    steward.measure_device = lambda device: facts(3 * GIB)


def test_what_did_not_fit_on_a_device_and_what_sleeps_is_not_counted_as_memory_of_ours_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        word = record("tiny", whole_tiny(tmp_path).entry.weights_sha256)
        steward, node = make(tmp_path, Roster(word), [])
        on_a_gpu(steward)
        await steward._known.look(steward._served())
        duty = steward.duties[word.weights_sha256] = duty_of(monkeypatch, word)
        awake, asleep = (FakeServer(Stage(0, 1, True, False), 0, is_loaded) for is_loaded in (True, False))
        new: Any = FakeServer(Stage(1, 2, False, True), sessions=0, is_loaded=False)
        awake.vram_mb = asleep.vram_mb = new.vram_mb = 1000
        duty.shards = {awake: ShardPhase.SERVING, asleep: ShardPhase.SERVING}  # type: ignore[dict-item]
        monkeypatch.setattr(steward_module, "serve", lambda *given: new)
        monkeypatch.setattr(steward_module, "started", has_no_room)
        await steward._load(duty, new.settings.stage)
        assert node.removed == [new]
        assert steward.statement.budget_bytes == 2 * GIB + 1_000_000_000

    run_test(main())


async def has_no_room(server: object) -> None:
    raise OutOfDeviceMemory("there is no room")
