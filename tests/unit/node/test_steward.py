"""The steward's rounds: what it survives, what it gives up, how several models share a machine. No sockets, no workers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from potluck.core.device_facts import DeviceFacts
from potluck.node import steward as steward_module
from potluck.node.holdings import planned_stages
from potluck.node.own_statement import OwnStatement
from potluck.node.placement import node_offers
from potluck.node.serving import ServingSettings
from potluck.planner.hysteresis import Hysteresis
from potluck.swarm.adverts import MAX_SPEEDS, Advert, LinkFigures, sign_advert
from potluck.swarm.upkeep import ShardPhase
from potluck.wire.messages import Stage
from tests.support.damage import DAMAGES
from tests.support.link_ends import run_test
from tests.support.partial_models import whole_tiny
from tests.support.stewards import GIB, OWN, FakeServer, Roster, duty_of, make, record, turns, view
from tests.support.swarm_records import KEYS, WEIGHTS, advert, shard


def test_a_round_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steward_module, "ROUND_S", 0.0)

    async def main() -> None:
        roster = Roster()
        steward, _ = make(tmp_path, roster, [])
        roster.problem = ValueError("what nobody thought of")
        steward.on_view(view(advert(KEYS[0])))
        steward.start()
        await turns(lambda: roster.problem is None)
        steward.statement.is_leaving = True  # shows in the advert of a later round
        await turns(lambda: steward.statement._told is not None and steward.statement._told.is_draining)
        await steward.stop()

    run_test(main())


def test_a_model_that_the_swarm_serves_no_more_is_given_up_though_nobody_else_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        roster = Roster(record())
        steward, node = make(tmp_path, roster, [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        whole = Stage(0, 8, True, True)
        server: Any = FakeServer(whole, sessions=1)
        duty.shards[server] = ShardPhase.SERVING
        duty.hysteresis = Hysteresis((whole,))
        steward.on_view(view(advert(KEYS[0], allows_serving=True, memory_budget_bytes=GIB)))
        await steward._round()
        assert duty.shards == {server: ShardPhase.SERVING}
        roster.served = ()
        await steward._round()
        assert duty.shards == {server: ShardPhase.DRAINING}, "the session that runs keeps it"
        server.core.session_count = 0
        await steward._round()
        assert steward.duties == {}
        await turns(lambda: node.removed == [server])

    run_test(main())


def test_nobody_drains_for_the_sake_of_one_who_leaves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        other = advert(KEYS[1], shards=(shard(0, 8),), allows_serving=True, memory_budget_bytes=GIB)
        assert planned_stages(duty, view(other), OWN) == [Stage(0, 8, True, True)]
        assert planned_stages(duty, view(msgspec.structs.replace(other, is_draining=True)), OWN) == []

    run_test(main())


def test_a_shard_that_sleeps_is_held_and_one_that_is_being_loaded_or_keeps_dying_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a swarm that nobody asks all shards sleep after a while; whoever leaves it has layers to hand over all the same."""

    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        other, whole = OwnStatement(KEYS[1].node_id, steward.settings, lambda: ()), Stage(0, 8, True, True)
        theirs, server = duty_of(monkeypatch, record()), FakeServer(whole, sessions=0, is_loaded=False)

        def held() -> list[Stage]:
            return planned_stages(duty, view(other.advert([theirs], [], True, 0.0)), OWN)

        theirs.shards = {server: ShardPhase.LOADING}  # type: ignore[dict-item]
        assert held() == []
        theirs.shards = {server: ShardPhase.SERVING}  # type: ignore[dict-item]
        assert held() == [whole]
        server.supervisor.needs_attention = True
        steward._look_after_workers(theirs)
        assert held() == []

    run_test(main())


def test_who_leaves_an_idle_swarm_goes_as_soon_as_somebody_holds_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, node = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record(context_tokens=1))
        server: Any = FakeServer(Stage(0, 8, True, True), sessions=0, is_loaded=False)
        duty.serves(server, 0.0)
        asleep = msgspec.structs.replace(shard(0, 8), is_loaded=False)
        other = advert(KEYS[1], shards=(asleep,), allows_serving=True, memory_budget_bytes=GIB)
        steward.on_view(view(advert(KEYS[0], is_draining=True), other))
        steward.statement.is_leaving = True
        for _ in range(2):
            await steward._round()
        assert duty.shards == {}
        await turns(lambda: node.removed == [server])

    run_test(main())


def test_what_one_model_takes_of_a_machine_another_does_not_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        words = (record("a", "a" * 64, context_tokens=1), record("b", "b" * 64, context_tokens=1))
        steward, _ = make(tmp_path, Roster(*words), [])
        for word in words:
            steward.duties[word.weights_sha256] = duty_of(monkeypatch, word)
        room = 12_000  # for one of the two, and half of the other
        here = view(advert(KEYS[0], allows_serving=True, memory_budget_bytes=room))
        first, second = (steward.duties[word.weights_sha256] for word in words)
        steward._follow(first, here)
        steward._follow(second, here)
        assert first.plan is not None
        assert second.plan is None
        assert "bytes" in second.problem

    run_test(main())


def test_what_a_model_without_a_plan_holds_another_does_not_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        words = (record(), record("next", "b" * 64, context_tokens=1))
        steward, _ = make(tmp_path, Roster(*words), [])
        lacking, following = (duty_of(monkeypatch, word) for word in words)
        steward.duties = {duty.costs.weights_sha256: duty for duty in (lacking, following)}
        offered = advert(KEYS[0], allows_serving=True, memory_budget_bytes=12_000)
        steward._follow(following, view(offered))
        assert following.plan is not None
        steward._follow(lacking, view(offered))
        assert lacking.plan is None
        holding = msgspec.structs.replace(offered, shards=(shard(0, 4),))
        steward._follow(following, view(holding))
        assert following.plan is None, "half of the other model is there still"

    run_test(main())


def test_what_is_held_of_a_withdrawn_model_is_on_offer_again_when_its_sessions_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        roster = Roster(record())
        steward, _ = make(tmp_path, roster, [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        server: Any = FakeServer(Stage(0, 4, True, False), sessions=1)
        duty.serves(server, 0.0)
        steward.on_view(view(advert(KEYS[0])))
        assert steward._own_advert().memory_budget_bytes == 2 * GIB
        roster.served = ()
        await steward._round()
        held = duty.costs.need_bytes(Stage(0, 4, True, False))
        assert steward._own_advert().memory_budget_bytes == 2 * GIB - held
        server.core.session_count = 0
        await steward._round()
        assert steward._own_advert().memory_budget_bytes == 2 * GIB

    run_test(main())


def test_a_changed_record_of_a_model_changes_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    duty = duty_of(monkeypatch, record(context_tokens=100))
    duty.set_record(record(context_tokens=200))
    assert duty.costs.context_tokens == 200


def test_a_node_that_failed_twice_says_so_until_it_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        steward._failed(duty, "the disk is full")
        assert steward._own_advert().unwell == (), "once is no rule"
        steward._failed(duty, "the disk is full")
        assert steward._own_advert().unwell == (WEIGHTS,)
        duty.retry_at_s = 0.0
        assert steward._own_advert().unwell == ()

    run_test(main())


def test_two_names_of_the_same_weights_are_one_model_and_there_is_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        ghosts = [record(f"m{number:03}", f"{number:064x}") for number in range(100)]
        steward, _ = make(tmp_path, Roster(record("a"), record("b"), *ghosts), [])
        assert [each.subject for each in steward._served().values()][:2] == ["a", "m000"]
        duty_of(monkeypatch, record())
        monkeypatch.setattr(steward_module, "decode_manifest", lambda data: None)
        monkeypatch.setattr(steward, "_follow", lambda duty, view: None)
        steward._known._manifests = {ghost.weights_sha256: b"" for ghost in ghosts}
        steward.on_view(view(advert(KEYS[0])))
        await steward._round()
        assert len(steward.duties) == MAX_SPEEDS
        assert sign_advert(KEYS[0], steward._own_advert())

    run_test(main())


def test_a_model_under_a_new_name_is_served_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steward, node = make(tmp_path, Roster(record("new")), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record("old"))
        monkeypatch.setattr(steward_module, "decode_manifest", lambda data: None)
        steward._known._manifests = {WEIGHTS: b""}
        server: Any = FakeServer(Stage(0, 8, True, True), sessions=0)
        duty.shards[server] = ShardPhase.SERVING
        steward.on_view(view(advert(KEYS[0])))
        for _ in range(3):
            await steward._round()
        await turns(lambda: node.removed == [server])
        assert steward.duties[WEIGHTS].record.subject == "new"

    run_test(main())


def test_models_that_nobody_has_take_no_place_from_those_that_somebody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        ghosts = [record(f"ghost{number:03}", f"{number:064x}") for number in range(100)]
        steward, _ = make(tmp_path, Roster(*ghosts, record("real")), [])
        duty_of(monkeypatch, record())
        monkeypatch.setattr(steward_module, "decode_manifest", lambda data: None)
        monkeypatch.setattr(steward, "_follow", lambda duty, view: None)
        steward._known._manifests = {WEIGHTS: b""}
        steward.on_view(view(advert(KEYS[0])))
        await steward._round()
        assert [duty.record.subject for duty in steward.duties.values()] == ["real"]

    run_test(main())


def test_a_change_of_plan_waits_for_three_rounds_of_some_seconds_however_much_news_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record(context_tokens=1))
        half, clock = Stage(0, 4, True, False), [1000.0]
        duty.hysteresis = Hysteresis((half,))
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: clock[0]))
        monkeypatch.setattr(steward, "_act", lambda duty, view: None)
        here = view(
            advert(KEYS[0], allows_serving=True, memory_budget_bytes=GIB),
            advert(KEYS[1], shards=(shard(0, 8),)),  # everything is served, and this node might as well hold all of it
        )
        for _ in range(50):
            steward._follow(duty, here)
            clock[0] += 0.05
        assert duty.wanted == half
        for _ in range(250):
            steward._follow(duty, here)
            clock[0] += 0.05
        assert duty.wanted == Stage(0, 8, True, True)

    run_test(main())


def test_a_node_that_holds_nothing_takes_what_the_plan_gives_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record(context_tokens=1))
        monkeypatch.setattr(steward, "_act", lambda duty, view: None)
        served = advert(KEYS[1], shards=(shard(0, 8),))
        steward._follow(duty, view(served, advert(KEYS[2], allows_serving=True, memory_budget_bytes=GIB)))
        assert duty.wanted is None, "nobody knows yet what this node offers"
        steward._follow(duty, view(served, advert(KEYS[0], allows_serving=True, memory_budget_bytes=GIB)))
        assert duty.wanted == Stage(0, 8, True, True)

    run_test(main())


def test_links_are_told_anew_only_when_they_have_changed_for_good(tmp_path: Path) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(), [])
        measured = [(LinkFigures(KEYS[1].node_id, 300),), (LinkFigures(KEYS[1].node_id, 5000),)]
        steward.statement._link_figures = lambda: measured[0]
        before = steward._own_advert()
        steward.statement._link_figures = lambda: measured[1]
        assert steward._own_advert() == before

    run_test(main())


def test_a_model_that_is_pulled_while_the_node_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        entries: list[Any] = []
        monkeypatch.setattr(steward._known._store, "list", lambda: entries)
        monkeypatch.setattr(steward._known, "_read", lambda weights: "stored")
        await steward._known.look(steward._served())
        assert steward._known._stored == {WEIGHTS: None}
        entries.append(SimpleNamespace(weights_sha256=WEIGHTS))
        await steward._known.look(steward._served())
        assert steward._known._stored == {WEIGHTS: None}, "not at every round"
        steward._known._look_s = 0.0
        await steward._known.look(steward._served())
        assert steward._known._stored == {WEIGHTS: "stored"}

    run_test(main())


def test_a_shard_whose_worker_keeps_dying_is_given_up_and_its_failures_are_not_forgotten_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, node = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        server: Any = FakeServer(Stage(0, 8, True, True), sessions=0)
        for failures in (1, 2):
            duty.shards[server] = ShardPhase.SERVING
            duty.well_at_s = asyncio.get_running_loop().time() + 60.0
            steward._look_after_workers(duty)
            assert duty.shards
            server.supervisor.needs_attention = True
            steward._look_after_workers(duty)
            assert (duty.shards, duty.failures) == ({}, failures)
            server.supervisor.needs_attention = False
        assert steward._own_advert().unwell == (WEIGHTS,)
        await turns(lambda: node.removed == [server, server])
        duty.shards[server], duty.well_at_s = ShardPhase.SERVING, 0.0
        steward._look_after_workers(duty)
        assert duty.failures == 0

    run_test(main())


def test_who_holds_the_output_does_not_look_slower_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    duty = duty_of(monkeypatch, record(), layer_bytes=25)  # so that the output weighs as much as four layers
    first: Any = FakeServer(Stage(0, 4, True, False), sessions=0)
    last: Any = FakeServer(Stage(4, 8, False, True), sessions=0)
    first.step_us, last.step_us = 4 * 256, (4 + 4) * 256
    duty.shards = {first: ShardPhase.SERVING}
    measured = duty.measured_layer_us(8e9)
    duty.shards = {last: ShardPhase.SERVING}
    assert duty.measured_layer_us(8e9) == measured == 256


def test_what_a_swarm_names_and_serves_no_more_is_forgotten_and_few_manifests_are_looked_for_at_once(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(), [])
        known = steward._known
        known._manifests, known._stored = {"old": b"", WEIGHTS: b""}, {"old": None, WEIGHTS: None}
        await known.look({WEIGHTS: None})
        assert (list(known._manifests), list(known._stored)) == ([WEIGHTS], [WEIGHTS])
        begun = [known.begin_looking(f"{number:064x}") for number in range(100)]
        assert 0 < sum(begun) <= 8
        assert not known.begin_looking(f"{0:064x}"), "it is under way"

    run_test(main())


def test_a_model_that_does_not_fit_is_told_once_and_not_in_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record(context_tokens=1))
        said, clock = list[str](), [1000.0]
        monkeypatch.setattr(steward, "_say", said.append)
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: clock[0]))
        monkeypatch.setattr(steward, "_act", lambda duty, view: None)
        for passed_s in (0, 1, 10, 10, 10):
            clock[0] += passed_s
            steward._follow(duty, view(advert(KEYS[0], allows_serving=True, memory_budget_bytes=10)))
            assert len(said) == (clock[0] >= 1010)
        assert "missing" in said[0]
        assert "potluck invite" in said[0]

    run_test(main())


def test_a_device_that_others_use_too_is_measured_again_and_advertised_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        facts = DeviceFacts("cuda", "a GPU", 8 * GIB, 4 * GIB, 1e12)
        serving = ServingSettings(device="cuda")
        steward.settings = msgspec.structs.replace(steward.settings, device=facts, serving=serving)
        steward.statement = OwnStatement(steward._node.id, steward.settings, lambda: ())
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        before = steward._own_advert()
        assert (before.device, before.device_name, before.memory_budget_bytes) == ("cuda", "a GPU", 2 * GIB)
        held: Any = FakeServer(Stage(0, 8, True, True), sessions=0)
        duty.shards[held] = ShardPhase.SERVING
        steward.measure_device = lambda device: msgspec.structs.replace(facts, free_bytes=3 * GIB // 2)
        await steward._measure_again()
        after = steward._own_advert()
        assert after.memory_available_bytes == 3 * GIB // 2
        assert after.memory_budget_bytes == GIB // 2, "a reserve stays free"

    run_test(main())


def test_weights_that_grow_on_a_gpu_leave_less_room_there(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = msgspec.structs.replace(duty_of(monkeypatch, record()).costs, device_growth=1.25)
    here = [
        advert(KEYS[at], allows_serving=True, memory_budget_bytes=GIB, device=device)
        for at, device in enumerate(("cpu", "cuda"))
    ]
    [cpu, gpu] = node_offers(view(*here), costs, lambda node: True)
    assert (cpu.free_bytes, gpu.free_bytes) == (GIB, int(GIB / 1.25))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_told_once_in_one_line_and_what_is_sound_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    async def main() -> None:
        weights = whole_tiny(tmp_path).entry.weights_sha256
        DAMAGES[damage](tmp_path / "models" / "tiny")
        steward, _ = make(tmp_path, Roster(record("tiny", weights), record()), [])
        steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        monkeypatch.setattr(steward_module, "ModelDuty", lambda word, _: duty_of(monkeypatch, word))
        followed, said = list[str](), list[str]()
        monkeypatch.setattr(steward, "_follow", lambda duty, _: followed.append(duty.record.subject))
        monkeypatch.setattr(steward._known, "_say", said.append)
        steward.on_view(view(advert(KEYS[0])))
        for _ in range(3):
            steward._known._look_s = 0.0
            await steward._round()
        assert followed.count("model") == 3
        assert ("tiny" in followed) == ("manifest" not in damage), "what it costs is known from the manifest"
        [line] = said
        assert "potluck remove tiny" in line
        assert "\n" not in line
        assert steward._known.held() == []

    run_test(main())


def test_a_model_that_is_harmed_while_the_node_runs_is_neither_loaded_nor_fetched_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        whole = whole_tiny(tmp_path)
        word = record("tiny", whole.entry.weights_sha256)
        steward, _ = make(tmp_path, Roster(word), [])
        duty = steward.duties[word.weights_sha256] = duty_of(monkeypatch, word)
        said = list[str]()
        monkeypatch.setattr(steward, "_say", said.append)
        monkeypatch.setattr(steward._known, "_say", said.append)
        await steward._known.look(steward._served())
        assert steward._known.has_weights(word.weights_sha256, Stage(0, 2, True, True))
        whole.store.path("tiny").rename(tmp_path / "aside")
        for _ in range(2):
            await steward._load(duty, Stage(0, 2, True, True))
            await steward._fetch(duty, Stage(0, 2, True, True), view())
        assert (len(said), duty.problem, duty.is_busy) == (1, said[0], False)
        assert not steward._known.has_weights(word.weights_sha256, Stage(0, 2, True, True))
        (tmp_path / "aside").rename(whole.store.path("tiny"))
        steward._known._look_s = 0.0
        await steward._known.look(steward._served())
        assert steward._known.damage(word.weights_sha256) == ""
        assert steward._known.has_weights(word.weights_sha256, Stage(0, 2, True, True))

    run_test(main())


@pytest.mark.parametrize(
    ("others", "sessions", "answers", "waits_for"),
    [
        ((), 1, [], ""),
        ((), 1, ["an answer"], "answers"),
        ((advert(KEYS[2]),), 0, [], ""),
        ((advert(KEYS[2]),), 1, [], "answers"),
        ((advert(KEYS[1], allows_serving=True, is_draining=True),), 0, [], ""),
        ((advert(KEYS[1]),), 0, [], ""),  # its owner does not let it serve
        ((advert(KEYS[1], allows_serving=True),), 0, [], "others to take model:0-7"),
    ],
)
def test_who_leaves_waits_only_for_those_who_can_take_over_and_for_answers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[Advert, ...], sessions: int, answers: list[str], waits_for: str
) -> None:  # fmt: skip
    monkeypatch.setattr(steward_module, "_LEAVE_LOOK_S", 0.0)

    async def main() -> None:
        roster = Roster(record())
        steward, node = make(tmp_path, roster, [])
        monkeypatch.setattr(roster, "may_serve", lambda node: node != KEYS[2].node_id)
        node.orchestrator.watched = lambda: answers
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        server: Any = FakeServer(Stage(0, 8, True, True), sessions)
        duty.shards[server] = ShardPhase.SERVING
        said, clock = list[str](), iter(range(10_000))
        monkeypatch.setattr(steward, "_say", said.append)
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: next(clock)))
        steward.on_view(view(advert(KEYS[0]), *others))
        assert not await steward.leave(60.0), "nobody has taken it"
        assert [waits_for in line for line in said] == ([True] if waits_for else [])
        assert (next(clock) > 60) == bool(waits_for)
        duty.shards.clear()
        assert await steward.leave(60.0)

    run_test(main())
