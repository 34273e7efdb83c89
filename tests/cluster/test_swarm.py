"""A swarm of real processes on loopback: founded, joined by invite, layers shared out, weights from neighbours, left, restarted."""

import signal
from pathlib import Path

import pytest

from potluck.core.errors import PotluckError
from potluck.testing.real_swarm import RealSwarm, layers_of, real_swarm

QUESTION = "Name three things that people bring to a potluck dinner."
HERE = ("--listen", "127.0.0.1:0")
HALF = (*HERE, "--max-layers", "16")


@pytest.fixture
def swarm(tmp_path: Path, models_home: Path):
    with real_swarm(tmp_path, models_home) as made:
        yield made


def invite_of(founder, *options: str) -> str:
    return founder.command("invite", *options)["invite"]


def test_a_friend_joins_with_one_line_gets_its_weights_from_the_first_and_both_answer(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HALF)
    second = swarm.join("second", invite_of(first), *HALF)
    second.wait(lambda: second.can_answer() and first.can_answer(), 60)
    assert second.serving_s() is not None
    assert second.serving_s() <= 15, "from `join` to serving"
    state = second.state()
    held = sorted(layers_of(state, first.node) + layers_of(state, second.node))
    assert held[0][0] == 0
    assert held[-1][1] == 29
    assert first.ask(QUESTION) == second.ask(QUESTION)
    assert first.request("POST", "/potluck/measure", {"node": second.node})["mbit_s"] > 0
    # Nothing but the manifest's own chunks came from the neighbour, and no file of the model was there before.
    assert [entry["format"] for entry in second.command("models")["models"]] == ["partial"]


def test_an_invite_is_good_once_and_not_when_it_was_altered(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HERE)
    invite = invite_of(first)
    swarm.join("second", invite, *HERE)
    with pytest.raises(PotluckError, match="refused"):
        swarm.join("third", invite, *HERE)
    altered = invite[:20] + ("a" if invite[20] != "a" else "b") + invite[21:]
    with pytest.raises(PotluckError, match="invite"):
        swarm.join("fourth", altered, *HERE)


def test_an_expelled_member_is_refused_at_once_and_after_its_restart(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HERE)
    second = swarm.join("second", invite_of(first), *HERE)
    second.wait(lambda: len(first.state()["nodes"]) == 2, 30)
    first.command("expel", second.node[:12])
    first.wait(lambda: len(first.state()["nodes"]) == 1, 60)
    listed = first.command("members")
    assert second.node in listed["expelled"]
    told = f"this node was expelled from swarm first by {first.node[:8]}"
    second.wait(lambda: told in second.request("GET", "/potluck/details")["expulsion"], 30)
    second.wait(
        lambda: not layers_of(second.state(), second.node), 120
    )  # what it was loading is given up when it is loaded
    second.end()
    again = swarm.up("second", *HERE, has_model=False)
    assert told in again.request("GET", "/potluck/details")["expulsion"]
    again.wait(lambda: all(node["is_self"] or node["state"] == "lost" for node in again.state()["nodes"]), 30)
    assert len(first.state()["nodes"]) == 1


def test_a_node_that_leaves_hands_its_layers_over_first(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HALF)
    second = swarm.join("second", invite_of(first), *HALF)
    third = swarm.join("third", invite_of(first), *HALF)
    first.wait(lambda: first.can_answer() and len(first.state()["nodes"]) == 3, 60)
    before = first.ask(QUESTION)
    answer = first.stream(QUESTION, 96)
    answer.wait_for_pieces(3)
    assert second.command("leave", "--patience", "40")["drained"] in (True, False)
    assert second.process.wait(20) == 0
    undisturbed = answer.finish()
    assert undisturbed.startswith(before[:20])
    first.wait(first.can_answer, 30)
    assert first.ask(QUESTION) == before
    assert third.ask(QUESTION) == before


def test_restarting_any_node_loses_nothing(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HALF)
    second = swarm.join("second", invite_of(first), *HALF)
    second.wait(lambda: second.can_answer() and first.can_answer(), 60)
    before, ids = first.ask(QUESTION), (first.node, second.node)
    members = first.command("members")["members"]
    for old, name in ((first, "first"), (second, "second")):
        address = old.wait_until_up()["address"]
        old.signal(signal.SIGKILL)
        old.process.wait(10)
        again = swarm.up(name, "--max-layers", "16", "--listen", address, has_model=False)
        again.wait(again.can_answer, 60)
        assert again.ask(QUESTION) == before
        assert again.node in ids
        assert [m["id"] for m in again.command("members")["members"]] == [m["id"] for m in members]


def test_a_founder_that_is_killed_soon_and_comes_back_elsewhere_finds_the_others(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HERE, "--no-serve")
    second = swarm.join("second", invite_of(first), *HERE, "--no-serve")
    first.wait(lambda: len(first.state()["nodes"]) == 2 and (first.home / "peers").exists(), 30)
    first.signal(signal.SIGKILL)
    first.process.wait(10)
    again = swarm.up("first", *HERE, "--no-serve", has_model=False)  # on another port, which nobody has been told
    again.wait(lambda: sum(node["state"] == "online" for node in again.state()["nodes"]) == 2, 30)
    with pytest.raises(PotluckError, match="running already"):
        swarm.up("second", *HERE, has_model=False)
    assert second.process.poll() is None


def test_when_the_only_holder_dies_a_survivor_loads_the_layers_and_the_answer_goes_on(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HERE, "--max-layers", "20")
    second = swarm.join("second", invite_of(first), *HERE, "--max-layers", "15")
    third = swarm.join("third", invite_of(first), *HERE, "--no-serve")
    third.wait(third.can_answer, 60)
    expected = third.ask(QUESTION, 64)
    # `third` only asks. With both others there, some layers are with one of them alone.
    answer = third.stream(QUESTION, 64)
    answer.wait_for_pieces(4)
    fourth_invite = invite_of(first)
    second.signal(signal.SIGKILL)
    second.process.wait(10)
    swarm.join("fourth", fourth_invite, *HERE, "--max-layers", "20")
    assert answer.finish() == expected


def test_the_founder_delegates_inviting_and_a_model_is_withdrawn_and_brought_back(swarm: RealSwarm) -> None:
    first = swarm.up("first", *HERE)
    second = swarm.join("second", invite_of(first), *HERE)
    second.wait(lambda: len(second.state()["nodes"]) == 2, 30)
    with pytest.raises(PotluckError, match="may not invite"):
        second.command("invite")
    assert first.command("trust", second.node[:10], "--may-invite")["may_invite"] is True
    second.wait(
        lambda: any(each["may_invite"] and each["id"] == second.node for each in second.command("members")["members"]),
        30,
    )
    third = swarm.join("third", invite_of(second), *HERE)
    first.wait(lambda: len(first.state()["nodes"]) == 3, 30)
    assert third.command("members")["swarm"] == first.command("members")["swarm"]
    first.wait(first.can_answer, 60)
    first.command("withdraw", "smollm2-135m")
    first.wait(lambda: all(not node["shards"] for node in first.state()["nodes"]), 60)
