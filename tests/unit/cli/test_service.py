"""`potluck service`: what is written for systemd and launchd, and what is said where neither can be spoken to."""

import json
import plistlib
from pathlib import Path

import pytest

from potluck.cli import main, service
from potluck.core.errors import BadRequest

COMMAND = ["/opt/python", "-m", "potluck.cli.main", "up", "--name", 'my "big" 100% $machine\\x', "--memory", "4GB"]
ENVIRONMENT = {"POTLUCK_HOME": "/home/a b/potluck", "POTLUCK_API_KEY": "secret", "PATH": "/bin"}


def test_the_unit_has_absolute_paths_and_quotes_what_systemd_would_replace() -> None:
    text = service.service_text("systemd", COMMAND, ENVIRONMENT, Path("/home/a b"))
    assert (
        'ExecStart=/opt/python -m potluck.cli.main up --name "my \\"big\\" 100%% $$machine\\\\x" --memory 4GB\n' in text
    )
    assert 'Environment="POTLUCK_HOME=/home/a b/potluck"\n' in text
    assert "secret" not in text
    assert "WantedBy=default.target" in text


def test_a_line_break_cannot_add_a_line_to_the_unit() -> None:
    with pytest.raises(BadRequest, match="line break"):
        service.systemd_unit(["/opt/python", "a\nExecStartPre=/bin/evil"], {})


def test_the_agent_is_a_property_list_with_the_same_command() -> None:
    agent = plistlib.loads(service.service_text("launchd", COMMAND, ENVIRONMENT, Path("/Users/a")).encode())
    assert agent["ProgramArguments"] == COMMAND
    assert agent["EnvironmentVariables"] == {"POTLUCK_HOME": "/home/a b/potluck"}
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["StandardErrorPath"] == "/Users/a/Library/Logs/potluck.log"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, a Linux, and a systemctl that cannot reach a bus."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "potluck"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ -e {tmp_path}/bus ] || {{ echo "Failed to connect to bus" >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


def test_a_dry_run_prints_the_file_and_writes_nothing(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main.run(["service", "install", "--dry-run", "--", "--model", "tiny"]) == 0
    assert "up --model tiny\n" in capsys.readouterr().out
    assert not (home / ".config").exists()


def test_without_a_user_bus_the_file_is_there_and_it_says_what_to_type(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert main.run(["service", "install"]) == 1
    assert "systemctl --user daemon-reload && systemctl --user enable potluck.service" in capsys.readouterr().err
    assert (home / ".config/systemd/user/potluck.service").exists()


def test_installed_shown_and_removed(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "bus").touch()
    assert main.run(["service", "status"]) == 1
    assert main.run(["service", "install", "--json", "--", "--no-serve"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["is_enabled"] is True
    assert main.run(["service", "status"]) == 0
    assert main.run(["service", "uninstall"]) == 0
    assert not (home / ".config/systemd/user/potluck.service").exists()
    assert (home / "calls").read_text().splitlines() == [
        "--user daemon-reload", "--user enable potluck.service", "--user restart potluck.service",
        "--user is-active --quiet potluck.service", "--user disable --now potluck.service",
    ]  # fmt: skip
    assert main.run(["service", "uninstall"]) == 2
