"""How long a question is worth holding back while a swarm gets ready, and what a command says of a node that is slow or gone."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from potluck.cli import running
from potluck.cli.api_options import api_options, gateway_settings
from potluck.cli.main import run
from potluck.cli.running import call, worth_waiting_s
from potluck.cli.swarm_up import SwarmOptions, _Session
from potluck.core.errors import PotluckError
from potluck.gateway.page_state import PageState
from potluck.gateway.server import GatewayServer
from potluck.node.identity_file import own_key, own_run_file, own_swarm_file
from potluck.node.run_file import RunningNode
from potluck.testing.memory_answering import MemoryAnswering
from potluck.testing.scripted_swarm import LARGE, SMALL, ScriptedSwarm, node_id
from potluck.trust.keeper import SwarmKeeper


def state_of(swarm: ScriptedSwarm) -> PageState:
    return swarm.state("http://127.0.0.1:7470", False)


def without_models(state: PageState) -> PageState:
    return msgspec.structs.replace(state, models=())


@pytest.mark.parametrize("model", [None, SMALL, "no-such-model"])
def test_nothing_is_waited_for_where_there_is_an_answer_or_never_will_be(model: str | None) -> None:
    assert worth_waiting_s(state_of(ScriptedSwarm()), model) == 0


def test_layers_that_are_on_their_way_are_waited_for_longer_than_those_that_may_come() -> None:
    swarm = ScriptedSwarm()
    may_come_s = worth_waiting_s(state_of(swarm), LARGE)  # the large model has a gap, and nobody loads
    swarm.kill_worker(node_id(2))
    assert 0 < may_come_s < worth_waiting_s(state_of(swarm), LARGE)


def test_a_swarm_that_has_just_begun_and_knows_no_model_is_given_a_moment() -> None:
    assert worth_waiting_s(without_models(state_of(ScriptedSwarm())), None) > 0


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the API of a node of this home would be, while it runs."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    with own_run_file().held(), socket.create_server(("127.0.0.1", 0)) as server:
        own_run_file().write(RunningNode(1, "aa", "bb", (), f"127.0.0.1:{server.getsockname()[1]}"))
        yield server


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n{", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_node_that_ends_meanwhile_is_told_apart_from_one_that_answers_rubbish(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, ends: bool
) -> None:
    monkeypatch.setattr(running, "_ENDING_S", 5.0 if ends else 0.0)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)
        if ends:  # a little later than its connections
            (tmp_path / "node.run").unlink()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(PotluckError, match="has ended; type: potluck up" if ends else "does not answer"):
        call("GET", "/potluck/state")
    thread.join()


@pytest.mark.parametrize("command", ["status", "leave", "plan", "top"])
def test_a_node_without_an_api_is_told_from_none_and_how_to_give_it_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    with own_run_file().held():
        own_run_file().write(RunningNode(41, "aa", "bb", (), ""))
        assert run([command]) == 2
    told = capsys.readouterr().err
    assert "runs without an API (--api off, or its port was taken)" in told
    assert "end it (Ctrl-C where it runs, or: kill 41), and start it with: potluck up --api 127.0.0.1:PORT" in told


def test_members_are_listed_by_a_node_without_an_api_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    SwarmKeeper.found(own_key(), own_swarm_file())
    with own_run_file().held():
        own_run_file().write(RunningNode(41, "aa", "bb", (), ""))
        assert run(["members"]) == 0
    assert own_key().node_id.hex()[:8] in capsys.readouterr().out


def test_a_node_of_another_version_is_to_be_ended_before_it_is_started_again() -> None:
    with pytest.raises(PotluckError, match="start it again: potluck leave, then potluck up"):
        running.read_state({})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
def test_a_key_that_is_added_before_the_first_one_does_not_lock_commands_out(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node took what was in the file at its start; commands show one of those."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    options = api_options(address, None, None)
    assert options is not None

    async def main() -> int:
        gateway = GatewayServer(MemoryAnswering(), gateway_settings(options))
        await gateway.start()
        try:
            announce(gateway)
            keys = tmp_path / "api-keys"
            if gateway.needs_key:
                keys.write_text("added-before-the-first-one\n" + keys.read_text())
            return await asyncio.to_thread(status_of_models)
        finally:
            await gateway.stop()

    with own_run_file().held():
        assert asyncio.run(main()) == 200


def announce(gateway: GatewayServer | None, as_json: bool = True) -> None:
    """As a node does when it is up."""
    keeper = SwarmKeeper.found(own_key(), own_swarm_file())
    options = SwarmOptions(
        None, None, 0, None, None, 1, 4, "", (), True, True, False, "cpu", False, None, as_json,
    )  # fmt: skip
    swarm = SimpleNamespace(
        on_addresses=[],
        node=SimpleNamespace(id=own_key().node_id),
        steward=SimpleNamespace(statement=SimpleNamespace(addresses=("127.0.0.1:1",))),
    )
    _Session(options, own_key(), keeper, None, 0.0)._announce(swarm, gateway)  # type: ignore[arg-type]


def status_of_models() -> int:
    address, connection = running._connection(10.0)
    with contextlib.closing(connection):
        return running._request(address, connection, "GET", "/v1/models", None).status


def test_a_node_whose_swarm_serves_nothing_says_that_it_is_to_be_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    with own_run_file().held():
        announce(None, as_json=False)
    assert "end this node (Ctrl-C) and start it with one" in capsys.readouterr().err
    monkeypatch.setattr("potluck.cli.swarm.call", lambda method, path: {"plans": [], "state": {"nodes": []}})
    assert run(["plan"]) == 0
    assert "potluck leave, then potluck up --model NAME" in capsys.readouterr().err


def test_whoever_waits_for_a_node_that_leaves_is_told_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said, is_said = list[str](), threading.Event()
    monkeypatch.setattr(running, "_QUIET_S", 0.0)
    monkeypatch.setattr(running, "notice", lambda text: (said.append(text), is_said.set()))
    with running._told_while_waiting("/potluck/state", 10.0):
        pass
    with running._told_while_waiting("/potluck/leave", 70.0):
        assert is_said.wait(10)
    [line] = said
    assert "layers" in line
    assert "up to 70 s" in line
