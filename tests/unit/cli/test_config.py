"""`potluck config`, and the reference that is made from the code."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from potluck.cli import main
from potluck.core.configuration import DistributedSettings, HostSettings
from potluck.core.configuration_reference import KEYS, VARIABLES, rendered_reference

FILE = """
[research.distributed_inference]
max_shards_per_request = 8
[research.distributed_inference.host]
shard_eviction_idle_seconds = 30
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    for variable in ("POTLUCK_CONFIG", "POTLUCK_CACHE", "POTLUCK_KEY", "POTLUCK_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main.run(["config", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_value_says_where_it_came_from(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "config.toml").write_text(FILE)
    told = shown(capsys)
    assert (told["file"], told["exists"]) == (str(home / "config.toml"), True)
    values = told["values"]
    assert values["max_shards_per_request"] == {"value": 8, "source": "file"}
    assert values["host.shard_eviction_idle_seconds"] == {"value": 30.0, "source": "file"}
    assert values["fallback_to_local"] == {"value": True, "source": "default"}
    assert values["models_folder"] == {"value": str(home / "models"), "source": "POTLUCK_HOME"}


def test_one_value_is_printed_bare_and_secrets_never(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main.run(["config", "max_shards_per_request"]) == 0
    assert capsys.readouterr().out == "16\n"
    monkeypatch.setenv("POTLUCK_API_KEY", "very-secret")
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    assert main.run(["config"]) == 0
    assert "very-secret" not in capsys.readouterr().out
    assert main.run(["config", "colour"]) == 2
    assert "potluck config" in capsys.readouterr().err


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "config.toml").write_text("[research.distributed_inference]\ncolour = 1\nmax_shards_per_request = 0\n")
    assert main.run(["config"]) == 2
    told = capsys.readouterr().err
    assert "colour" in told
    assert "max_shards_per_request must be" in told


def test_the_reference_has_every_key_once_and_the_document_is_made_from_it() -> None:
    fields = [field.name for field in msgspec.structs.fields(DistributedSettings) if field.name != "host"]
    fields += [f"host.{field.name}" for field in msgspec.structs.fields(HostSettings)]
    assert sorted(key.name for key in KEYS) == sorted(fields)
    assert (Path(__file__).parents[3] / "docs" / "configuration.md").read_text() == rendered_reference()


def test_the_reference_has_every_variable_that_the_code_reads() -> None:
    source = Path(main.__file__).parents[1]
    text = "".join(path.read_text() for path in source.rglob("*.py") if "testing" not in path.parts)
    named = {variable.name for variable in VARIABLES}
    read = set(re.findall(r'"((?:POTLUCK|HF|OTEL)_[A-Z_]+)"', text))
    assert read == named
