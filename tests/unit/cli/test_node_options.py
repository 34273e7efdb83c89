"""Options of `potluck up` and `potluck join` that cannot be: refused before anything is started."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck.cli import node_options
from potluck.cli.api_options import api_options
from potluck.cli.chat_params import require_own_layers_fit
from potluck.cli.main import run
from potluck.cli.swarm_up import SwarmOptions, _Session
from potluck.core.errors import BadRequest
from potluck.node.device import ProbeInterrupted
from potluck.swarm.adverts import Advert

NO_TEXT = os.fsdecode(b"\xff")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where no node starts, whatever is asked for."""

    def started(*arguments: object) -> None:
        raise AssertionError("a node would have been started")

    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    monkeypatch.setattr("potluck.cli.up.run_swarm_node", started)
    monkeypatch.setattr("potluck.cli.swarm.run_swarm_node", started)
    monkeypatch.setattr("potluck.cli.up._serve", started)
    return tmp_path


@pytest.mark.parametrize("command", [["up"], ["join", "potluck-abc"], ["up", "--layers", "0-4"]])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--threads", "9999"), ("--max-layers", "9999999"), ("--streams", "99999999999999999999"), ("--name", NO_TEXT),
        ("--name", "n" * 65), ("--own-layers", "foo"), ("--own-layers", "3-7"), ("--own-layers", ""),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_errors_of_usage(
    command: list[str], option: str, value: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, option, value]) == 2
    told = capsys.readouterr().err
    assert option in told
    assert told.count("\n") == 1
    assert not list(home.iterdir())


@pytest.mark.parametrize("command", [["ask", "What?", "--here"], ["local"]])
def test_no_command_computes_with_thousands_of_threads(command: list[str]) -> None:
    assert run([*command, "--threads", "9999"]) == 2


def test_what_the_options_allow_an_advert_can_say() -> None:
    most = Advert(
        node=bytes(32), threads=node_options.MOST_THREADS, max_layers=node_options._MOST_LAYERS,
        name="n" * node_options._MOST_NAME_CHARACTERS,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(most), type=Advert) == most


@pytest.mark.parametrize("option", [["--open"], ["--spare"], ["--metrics", "127.0.0.1:0"]])
def test_what_only_means_something_without_a_swarm_is_not_ignored_in_one(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", *option]) == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", [["up", "--layers", "0-4"], ["up", "--via", "127.0.0.1:1"]])
@pytest.mark.parametrize(
    "option", [["--max-layers", "3"], ["--name", "kitchen"], ["--interface", "lo"], ["--no-discovery"], ["--chaos"]]
)
def test_what_only_means_something_in_a_swarm_is_not_ignored_without_one(
    command: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, *option]) == 2
    assert f"{option[0]} would do nothing" in capsys.readouterr().err


@pytest.mark.parametrize("place", [[], ["--here"]])
@pytest.mark.parametrize(
    "option",
    [
        ["--own-layers", "0-1"], ["--no-ring"], ["--activation-dtype", "int8"], ["--activation-dtype", "bogus"],
        ["--dist-prefill-chunk", "8"], ["--dist-prefill-window", "2"],
    ],
)  # fmt: skip
def test_what_is_about_other_machines_shards_is_not_ignored_without_them(
    place: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ask", "What?", *place, *option]) == 2
    told = capsys.readouterr().err
    assert f"{option[0]} would do nothing" in told
    assert "--via" in told


def test_a_question_is_asked_here_or_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "What?", "--here", "--via", "127.0.0.1:1"]) == 2
    assert "--here would do nothing" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["up"], ["join", "potluck-abc"]])
@pytest.mark.parametrize(("option", "value"), [("--allow-origin", "chat.example"), ("--allow-host", "http://kitchen/")])
def test_a_host_or_site_that_no_request_could_name_is_refused_before_anything_starts(
    command: list[str], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, option, value]) == 2
    assert f"{option} takes" in capsys.readouterr().err


def test_hosts_and_sites_are_kept_as_requests_name_them() -> None:
    taken = api_options(None, ["Kitchen:7470"], ["https://Chat.Example/"])
    assert taken is not None
    assert (taken.hosts, taken.origins) == (("kitchen",), ("https://chat.example",))


@pytest.mark.parametrize(
    ("text", "layer_counts", "complaint"),
    [
        ("0-40", [30], "go past the last one"), ("0-40", [30, 62], None), ("0-40", [], None), (None, [30], None),
        ("embedding,output", [30], None), ("0-4,3-output", [30], "named twice"),
    ],
)  # fmt: skip
def test_own_layers_fit_one_of_the_models_that_are_here(
    text: str | None, layer_counts: list[int], complaint: str | None
) -> None:
    if complaint is None:
        return require_own_layers_fit(text, layer_counts)
    with pytest.raises(BadRequest, match=complaint):
        require_own_layers_fit(text, layer_counts)
    return None


def test_ctrl_c_while_the_device_is_looked_at_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(device: str) -> None:
        raise ProbeInterrupted(f"looking at {device} was interrupted")

    async def session(options: SwarmOptions) -> None:
        await _Session(options, Any, Any, Any, 0.0)._device()  # type: ignore[arg-type]

    monkeypatch.setattr("potluck.node.device.measured_device", interrupted)
    monkeypatch.setattr("potluck.cli.up.run_swarm_node", lambda options: asyncio.run(session(options)))
    assert run(["up", "--device", "cuda"]) == 130
    assert capsys.readouterr().err == "error: interrupted [interrupted]\n"
