"""What of the configuration file holds for a node's API, and the switch that keeps a machine out of everything."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from potluck.cli.chat_params import api_params, limit_pipelines
from potluck.cli.main import run as run_command
from potluck.gateway.server import GatewaySettings

Write = Callable[[str], None]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))

    def write(text: str) -> None:
        (tmp_path / "config.toml").write_text(f"[research.distributed_inference]\n{text}\n")

    return write


def test_the_api_follows_the_file(written: Write) -> None:
    written(
        'activation_dtype = "int8"\nmax_shards_per_request = 3\nfallback_to_local = false\nshard_health_timeout_seconds = 7.0'
    )
    params = api_params(60.0)
    assert (params.activation_dtype, params.max_shards_per_request, params.fallback_to_local) == ("int8", 3, False)
    assert (params.settings.stall_timeout_s, params.settings.holder_wait_s) == (7.0, 60.0)
    assert params.settings.keeps_kv


@pytest.mark.parametrize(("text", "pipelines", "requests"), [("", 64, 16), ("max_concurrent_pipelines = 3", 3, 3)])
def test_pipelines_are_limited_where_the_file_says_so(written: Write, text: str, pipelines: int, requests: int) -> None:
    written(text)
    orchestrator = SimpleNamespace(max_concurrent_pipelines=64)
    settings = limit_pipelines(orchestrator, GatewaySettings())  # type: ignore[arg-type]
    assert orchestrator.max_concurrent_pipelines == pipelines
    assert settings.service.admission.max_concurrent_requests == requests
    assert settings.service.admission.max_sessions == (pipelines if text else None)


@pytest.mark.parametrize(
    "command", [["ask", "--via", "127.0.0.1:1", "hello"], ["up", "--layers", "0-1", "--api", "off"], ["up"]]
)
def test_a_machine_that_was_told_to_stay_out_says_experimental_disabled(
    command: list[str], written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """HearthNet §2 and §6: with the switch off the module is inert."""
    written("enabled = false")
    assert run_command([*command, "--json"]) != 0
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert error["code"] == "experimental_disabled"
