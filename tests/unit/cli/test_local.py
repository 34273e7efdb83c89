"""`potluck local` and what follows `potluck demo`: what cannot be is refused before any node starts; the page finds a free port."""

import socket
from pathlib import Path

import pytest

from potluck.cli import demo
from potluck.cli.main import run


@pytest.mark.parametrize("option", [["--api", "off"], ["--no-spare"]])
def test_what_a_local_swarm_cannot_do_is_refused_at_once(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    assert run(["local", "--swarm", *option]) == 2
    assert " ".join(option) in capsys.readouterr().err


def test_the_demonstrations_page_takes_a_free_port_where_the_usual_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("potluck.cli.api_options.DEFAULT_API", place)
        assert demo._free_place() == "127.0.0.1:0"
        assert f"{place} is taken" in capsys.readouterr().err
    assert demo._free_place() == place
