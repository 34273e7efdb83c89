"""The commands that ask the running node, against a real one: status, doctor, top, trace, chat."""

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from potluck.cli import main
from potluck.core.errors import PotluckError
from potluck.testing.real_swarm import real_swarm
from potluck.testing.swarm_process import SwarmProcess

QUESTION = "Name three things that people bring to a potluck dinner."


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, models_home: Path) -> Iterator[SwarmProcess]:
    with real_swarm(tmp_path_factory.mktemp("swarm"), models_home) as swarm:
        made = swarm.up("only", "--listen", "127.0.0.1:0")
        made.wait(made.can_answer, 60)
        made.ask(QUESTION, 24)
        yield made


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Typed = Callable[..., Done]


@pytest.fixture
def typed(node: SwarmProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Commands of that node's user, in this process, since starting Python takes longer than they do."""
    monkeypatch.setenv("POTLUCK_HOME", str(node.home))

    def type_it(*arguments: str, given: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        code = main.run(arguments)
        return Done(code, *capsys.readouterr())

    return type_it


def test_status_shows_layers_processes_and_the_api(node: SwarmProcess, typed: Typed) -> None:
    done = typed("status")
    assert done.code == 0
    assert "only    ##############################" in done.out
    assert f"API http://{node.wait_until_up()['api']}/v1" in done.out
    told = typed("status", "--json").json()
    [health] = told["shard_health"]
    assert (health["shard_id"], health["online"]) == (f"{node.node[:8]}:0-29", True)
    assert 0 < health["p95_latency_ms"] < 10_000
    processes = told["processes"]
    assert processes["daemon_pid"] == node.process.pid
    [worker] = processes["workers"]
    os.kill(worker["pid"], 0)  # it is there
    assert worker["memory_bytes"] > 50_000_000


def test_doctor_finds_a_sound_node_and_tries_multicast(typed: Typed) -> None:
    found = {finding["check"]: finding for finding in typed("doctor", "--json").json()["findings"]}
    for check in ("node", "members", "duplicate ids", "versions", "arithmetic", "layers", "key", "swarm file"):
        assert found[check]["verdict"] == "ok", found[check]
    assert found["multicast"]["verdict"] == "ok" or found["multicast"]["next"]


def test_doctor_finds_a_key_that_others_can_read(node: SwarmProcess, typed: Typed) -> None:
    key = node.home / "node.key"
    key.chmod(0o644)
    try:
        loose = typed("doctor", "--quick")
    finally:
        key.chmod(0o600)
    assert loose.code == 1
    assert f"next: chmod 600 {key}" in loose.out


def test_top_prints_one_frame_and_the_state(typed: Typed) -> None:
    frame = typed("top", "--once")
    assert frame.code == 0
    assert "smollm2-135m can answer." in frame.out
    assert "\x1b" not in frame.out
    assert typed("top", "--json").json()["models"][0]["can_answer"] is True


def test_trace_tells_where_each_token_was(typed: Typed) -> None:
    listed = typed("trace", "--json").json()["traces"][0]
    assert listed["tokens"] == 24
    told = typed("trace", listed["id"], "--json").json()
    spent = [sum(compute + queue for compute, queue in step["stages"]) for step in told["steps"]]
    assert len(spent) == 24
    assert min(spent) > 0
    # Token by token a head that was kept waiting sees less than the shards spent; in all it cannot.
    assert sum(spent) <= sum(step["total_ms"] for step in told["steps"]) + 10
    assert "slowest tokens:" in typed("trace", listed["id"]).out
    missing = typed("trace", "999")
    assert (missing.code, "potluck trace" in missing.err) == (2, True)


def test_chat_takes_questions_from_a_pipe_and_remembers_them(node: SwarmProcess, typed: Typed) -> None:
    told = typed("chat", "--json", "--max-tokens", "16", given=f"{QUESTION}\nAnd a fourth?\n").json()
    assert [message["role"] for message in told["messages"]] == ["user", "assistant", "user", "assistant"]
    assert told["answers"][0]["nodes"] == [node.node]
    assert told["answers"][0]["completion_tokens"] > 1


def test_measuring_wants_another_node(node: SwarmProcess) -> None:
    with pytest.raises(PotluckError, match="400"):
        node.request("POST", "/potluck/measure", {"node": node.node})


def test_when_the_node_is_killed_the_commands_say_so(node: SwarmProcess, typed: Typed) -> None:
    node.signal(signal.SIGKILL)
    node.process.wait(10)
    done = typed("status")
    assert (done.code, "type: potluck up" in done.err) == (2, True)
