"""The first `potluck up`, and what it leaves behind when it fails: files and complaints, no node."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli.api_options import api_options, gateway_settings, started
from potluck.cli.chat import base_url
from potluck.cli.main import run
from potluck.cli.swarm_up import _own_swarm
from potluck.core.errors import BadRequest
from potluck.gateway.server import GatewayServer
from potluck.node.identity_file import own_key, own_swarm_file
from potluck.testing.memory_answering import MemoryAnswering
from potluck.trust.keeper import SwarmKeeper
from tests.support.damage import DAMAGES
from tests.support.partial_models import whole_tiny


def test_a_wrong_model_leaves_no_swarm_behind_that_would_serve_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    assert run(["up", "--model", "no-such-model", "--api", "off"]) == 1
    assert "potluck models" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.swarm"))


@pytest.mark.parametrize("named", [[], ["--model", "tiny"]])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_in_one_line_and_nothing_is_founded(
    damage: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    whole_tiny(tmp_path)
    DAMAGES[damage](tmp_path / "models" / "tiny")
    assert run(["up", *named, "--api", "off"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "potluck remove tiny" in line
    assert not list(tmp_path.glob("*.swarm"))


def test_a_node_whose_swarm_serves_only_what_is_damaged_here_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    weights = whole_tiny(tmp_path).entry.weights_sha256
    SwarmKeeper.found(own_key(), own_swarm_file(), "").serve_model("tiny", weights)
    DAMAGES["truncated"](tmp_path / "models" / "tiny")
    assert run(["up", "--api", "off"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "has 100 bytes instead of" in line


@pytest.mark.parametrize("name", ["a-name-before", "tiny", "z-name-after"])
def test_a_model_that_the_swarm_serves_under_another_name_keeps_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    whole = whole_tiny(tmp_path)
    SwarmKeeper.found(own_key(), own_swarm_file(), "").serve_model(name, whole.entry.weights_sha256)
    options: Any = SimpleNamespace(model="tiny", serves=True, name="", as_json=True)
    for _ in range(2):
        keeper = _own_swarm(own_key(), whole.store, options)
        assert [model.subject for model in keeper.roster.models()] == [name]
        assert (f"this swarm serves tiny as {name}" in capsys.readouterr().err) == (name != "tiny")


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_place_that_is_taken_is_named_with_the_option_that_chooses_another(
    is_chosen: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr("potluck.cli.api_options.DEFAULT_API", place)
        options = api_options(place if is_chosen else None, None, None)
        assert options is not None
        gateway = GatewayServer(MemoryAnswering(), gateway_settings(options))
        if is_chosen:
            with pytest.raises(BadRequest, match=f"{place} cannot be had.*--api ADDR"):
                asyncio.run(started(gateway, options))
        else:
            assert not asyncio.run(started(gateway, options))
            assert f"no API: {place} cannot be had" in capsys.readouterr().err


def test_complaints_name_the_command_whose_help_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask"]) == 2
    assert "potluck ask --help" in capsys.readouterr().err


def test_a_home_that_cannot_be_made_is_told_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", "/proc/nowhere")
    assert run(["up", "--api", "off"]) == 1
    assert "POTLUCK_HOME" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "here"), [("run", "chat"), ("serve", "up"), ("ls", "models"), ("ps", "status")])
def test_whoever_types_another_programs_command_hears_its_name_here(
    typed: str, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([typed]) == 2
    assert f"here it is: potluck {here} " in capsys.readouterr().err


@pytest.mark.parametrize("group", [[], ["bench"], ["service"]])
def test_the_list_of_commands_is_in_whole_sentences(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*group, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize("url", ["10.0.0.7:7470", "http://10.0.0.7:7470/", "http://10.0.0.7:7470/v1"])
def test_another_nodes_address_may_be_typed_with_or_without_its_ends(url: str) -> None:
    assert base_url(url) == "http://10.0.0.7:7470"


@pytest.mark.parametrize("command", ["expel", "trust"])
@pytest.mark.parametrize("member", ["", " "])
def test_nobody_is_not_the_beginning_of_every_members_id(
    command: str, member: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    SwarmKeeper.found(own_key(), own_swarm_file())
    assert run([command, member]) == 2
    assert "say whom" in capsys.readouterr().err


def test_ctrl_c_while_the_model_is_brought_ends_at_once_and_founds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running loop would keep Ctrl-C to itself until the download is over."""

    def interrupted(*arguments: object) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        raise KeyboardInterrupt

    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    monkeypatch.setattr("potluck.cli.ask.find_or_pull", interrupted)
    assert run(["up", "--api", "off"]) == 130
    assert capsys.readouterr().err == "error: interrupted [interrupted]\n"
    assert own_swarm_file().read() is None


def test_what_cannot_be_an_address_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--url", "http://10.0.0.7:747O"]) == 2
    assert "http://10.0.0.7:747O is not an address (invalid port" in capsys.readouterr().err
