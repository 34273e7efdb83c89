"""What of the configuration file holds for a node's API, and the switch that keeps a machine out of everything."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from potluck.cli import up
from potluck.cli.ask_via import RemoteQuestion, _chat_params
from potluck.cli.chat_params import api_params, configure_orchestrator
from potluck.cli.main import run as run_command
from potluck.cli.swarm_up import SwarmOptions, _Session
from potluck.core.device_facts import DeviceFacts
from potluck.core.sampling_params import SamplingParams
from potluck.gateway.server import GatewaySettings
from potluck.node import serving
from potluck.node.own_statement import StewardSettings
from potluck.node.serving import ServingSettings
from tests.support.stored_models import MEGABYTE, stored_model

Write = Callable[[str], None]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))

    def write(text: str) -> None:
        (tmp_path / "config.toml").write_text(f"[research.distributed_inference]\n{text}\n")

    return write


def test_the_api_follows_the_file(written: Write) -> None:
    written(
        'activation_dtype = "int8"\nmax_shards_per_request = 3\nfallback_to_local = false\nshard_health_timeout_seconds = 7.0\n'
        "allow_self_as_shard = true"
    )
    params = api_params(60.0)
    assert (params.activation_dtype, params.max_shards_per_request, params.fallback_to_local) == ("int8", 3, False)
    assert (params.allow_self_as_shard, params.own_place) == (True, "equal")
    assert (params.settings.stall_timeout_s, params.settings.holder_wait_s) == (7.0, 60.0)
    assert params.settings.keeps_kv


def test_ask_via_follows_the_file_and_the_command_line_wins(written: Write) -> None:
    written(
        'activation_dtype = "int8"\nmax_shards_per_request = 3\nfallback_to_local = false\nshard_health_timeout_seconds = 7.0'
    )

    def params(codec: str | None) -> tuple[object, ...]:
        question = RemoteQuestion(["127.0.0.1:1"], None, [], SamplingParams(), 1, True, codec, False)
        found = _chat_params(question, ())
        timeout_s = found.settings.stall_timeout_s
        return found.activation_dtype, found.max_shards_per_request, found.fallback_to_local, timeout_s

    assert params(None) == ("int8", 3, False, 7.0)
    assert params("fp16")[0] == "fp16"
    written("")
    assert params(None) == ("auto", 16, True, 30.0)


HOST = "[research.distributed_inference.host]\nshard_eviction_idle_seconds = 9\nshard_max_vram_mb = 60"


def steward_settings(memory: str | None = None, device: DeviceFacts | None = None) -> StewardSettings:
    options = SwarmOptions(
        None, None, 0, memory, None, 1, 4, "", (), True, True, False, "cpu", False, None, False,
    )  # fmt: skip
    return _Session(options, None, None, None, 0.0)._settings(device).steward  # type: ignore[arg-type]


def test_a_node_of_a_swarm_gives_what_the_file_says(written: Write) -> None:
    written("shard_health_timeout_seconds = 7.0\n" + HOST)
    steward = steward_settings()
    assert (steward.memory_budget_bytes, steward.lifetime_s) == (60 * MEGABYTE, 28)
    assert (steward.serving.eviction_idle_s, steward.serving.max_concurrent_streams) == (9.0, 4)


@pytest.mark.parametrize("device", [None, DeviceFacts("cuda", "a GPU", 8 << 30, 8 << 30, 1e12)])
@pytest.mark.parametrize(("memory", "megabytes"), [(None, 60), ("80MB", 80), ("20MB", 20), ("0", 0)])
def test_memory_on_the_command_line_wins_over_the_file(
    memory: str | None, megabytes: int, device: DeviceFacts | None, written: Write
) -> None:
    written(HOST)
    assert steward_settings(memory, device).memory_budget_bytes == megabytes * MEGABYTE


@pytest.mark.parametrize(("memory", "kv_megabytes"), [(None, 10), ("80MB", 30)])
def test_a_node_with_explicit_layers_gives_what_the_file_says(
    memory: str | None, kv_megabytes: int, written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ServingSettings] = []
    written(HOST)
    monkeypatch.setattr(up, "open_store", lambda: None)
    monkeypatch.setattr(up, "find_model", lambda store, name: SimpleNamespace(id="m"))
    monkeypatch.setattr(serving, "read_stored_model", lambda store, name: stored_model())
    monkeypatch.setattr(serving, "serve", lambda node, model, stage, settings: given.append(settings))
    options = up.UpOptions("m", None, "", 1, 4, "cpu", False, memory, False, None, (), True, None, False)
    up._add_shard(None, options)  # type: ignore[arg-type]
    assert [(each.eviction_idle_s, each.kv_budget_bytes) for each in given] == [(9.0, kv_megabytes * MEGABYTE)]


@pytest.mark.parametrize(("text", "pipelines", "requests"), [("", 64, 16), ("max_concurrent_pipelines = 3", 3, 3)])
def test_pipelines_are_limited_where_the_file_says_so(written: Write, text: str, pipelines: int, requests: int) -> None:
    written(f"{text}\nshard_health_timeout_seconds = 7.0")
    orchestrator = SimpleNamespace(max_concurrent_pipelines=64, health=None)
    settings = configure_orchestrator(orchestrator, GatewaySettings())  # type: ignore[arg-type]
    assert orchestrator.max_concurrent_pipelines == pipelines
    orchestrator.health.note("n:0-7", 1.0, 0.0)
    assert [orchestrator.health.is_online("n:0-7", now_s) for now_s in (7.0, 7.1)] == [True, False]
    assert settings.service.admission.max_concurrent_requests == requests
    assert settings.service.admission.max_sessions == (pipelines if text else None)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["up", "--layers", "0-1", "--api", "off"], "serve_shards = false; say --serve too, or leave out --layers"),
        (["up", "--via", "127.0.0.1:1", "--api", "off"], "without serving there must be --via"),
    ],
)
def test_a_machine_that_was_told_not_to_serve_does_not(
    command: list[str], words: str, written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    written("[research.distributed_inference.host]\nserve_shards = false")
    assert run_command([*command, "--json"]) == 2
    assert words in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]["message"]


@pytest.mark.parametrize(("typed", "serves"), [([], False), (["--serve"], True), (["--no-serve"], False)])
@pytest.mark.parametrize("command", [["up"], ["join", "potluck-abc"], ["up", "--layers", "0-1"]])
def test_serving_on_the_command_line_wins_over_the_file(
    command: list[str], typed: list[str], serves: bool, written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []

    def started(options: SwarmOptions, invite: object = None) -> None:
        taken.append(options.serves)

    async def served(options: up.UpOptions) -> None:
        taken.append(options.serves)

    for place in ("potluck.cli.up.run_swarm_node", "potluck.cli.swarm.run_swarm_node"):
        monkeypatch.setattr(place, started)
    monkeypatch.setattr("potluck.cli.up._serve", served)
    monkeypatch.setattr("potluck.cli.swarm.read_invite", lambda words: None)
    written("[research.distributed_inference.host]\nserve_shards = false")
    is_refused = "--layers" in command and not serves
    assert run_command([*command, *typed]) == (2 if is_refused else 0)
    assert taken == ([] if is_refused else [serves])


@pytest.mark.parametrize(
    "command",
    [["ask", "--via", "127.0.0.1:1", "hello"], ["up", "--layers", "0-1", "--api", "off"], ["up"], ["local"], ["demo"]],
)
def test_a_machine_that_was_told_to_stay_out_says_experimental_disabled(
    command: list[str], written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """HearthNet §2 and §6: with the switch off the module is inert."""
    written("enabled = false")
    assert run_command([*command, "--json"]) != 0
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert error["code"] == "experimental_disabled"
