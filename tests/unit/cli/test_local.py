"""`potluck local` and what follows `potluck demo`: what cannot be is refused before any node starts; the page finds a free port."""

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli import local
from potluck.cli.api_options import free_place
from potluck.cli.ask import find_or_pull
from potluck.cli.main import run
from potluck.testing.local_swarm import LocalProcess


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
        assert free_place() == "127.0.0.1:0"
        assert f"{place} is taken" in capsys.readouterr().err
    assert free_place() == place


@pytest.mark.parametrize(
    ("stored", "named", "pulled"), [([], None, ["smollm2-135m"]), (["mine"], None, []), ([], "mine", [])]
)
def test_the_default_model_is_brought_where_there_is_none_and_none_was_named(
    stored: list[str], named: str | None, pulled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[str] = []

    class Puller:
        def __init__(self, store: "Store", progress: object) -> None:
            self._store = store

        def pull(self, source: str) -> None:
            brought.append(source)
            self._store.ids.append(source)

    class Store:
        def __init__(self) -> None:
            self.ids = [*stored]

        def list(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(id=each) for each in self.ids]

        def find(self, model: str) -> SimpleNamespace:
            return SimpleNamespace(id=model)

    monkeypatch.setattr("potluck.weights.pull.Puller", Puller)
    store: Any = Store()
    assert find_or_pull(store, named, as_json=True).id == (named or (stored + pulled)[0])
    assert brought == pulled


def test_an_interrupt_while_a_node_is_about_to_be_waited_for_leaves_no_timer_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Timer] = []

    class Interrupted(threading.Timer):
        def start(self) -> None:
            super().start()
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr("potluck.testing.local_swarm.threading.Timer", Interrupted)
    process = LocalProcess.__new__(LocalProcess)
    process._process = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        process.wait_until_serving(timeout_s=60)
    started[0].join(10)
    assert not started[0].is_alive()


def test_every_node_of_a_local_swarm_has_a_name_of_its_own() -> None:
    names = [local._name(place) for place in range(16)]
    assert len(set(names)) == 16
    assert (names[0], names[8]) == ("kitchen", "kitchen-2")
