"""Standard streams that are closed, or that take nothing: an error in a line, or nothing at all, but no traceback."""

import json
from pathlib import Path

import pytest

from potluck.cli.main import run

with_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nothing_is_printed_where_the_output_is_closed(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert run(["models", *options]) == 0


def test_an_error_needs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert run(["models", "--nonsense"]) == 2


@pytest.mark.parametrize(
    ("command", "complaint"), [(["ask", "-"], "there is no question"), (["join"], "there is no invite")]
)
def test_from_an_input_that_is_closed_nothing_comes(
    command: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(command) == 2
    assert complaint in capsys.readouterr().err


@with_full_device
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_is_full_is_told_on_the_other_stream(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run(["models", *options]) == 1
        assert capsys.readouterr().err.endswith(
            "error: what was to be printed cannot be written: No space left on device [file_error]\n"
        )
        full.flush()  # as the interpreter does at its end


@with_full_device
def test_an_error_object_that_cannot_be_written_is_told_on_the_other_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run(["remove", "nosuch", "--json"]) == 1
        assert "model_not_found" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["service", "bench"])
def test_a_group_without_a_command_says_where_its_commands_are(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([group]) == 2
    assert capsys.readouterr().err == f"error: Missing command. (see `potluck {group} --help`) [bad_request]\n"
    assert run([group, "--json"]) == 2
    assert "--help" in json.loads(capsys.readouterr().out)["error"]["message"]
