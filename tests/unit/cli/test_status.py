"""`potluck status` and `potluck top`: the same made-up swarm as text and as a frame."""

import msgspec
import pytest
from rich.console import Console

from potluck.cli import main
from potluck.cli.layer_strip import layer_strip
from potluck.cli.status import status_lines
from potluck.cli.top import frame, updates
from potluck.gateway.page_state import PageState, RequestView
from potluck.testing.scripted_swarm import LARGE, SMALL, ScriptedSwarm, node_id

PROCESSES = {
    "version": "0.2.0", "arithmetic": 1, "daemon_pid": 41, "memory_bytes": 80_000_000,
    "workers": [{"shard": "smollm2-135m:0-9", "pid": 42, "memory_bytes": 200_000_000}],
}  # fmt: skip


@pytest.fixture
def swarm() -> ScriptedSwarm:
    return ScriptedSwarm()


def state_of(swarm: ScriptedSwarm) -> PageState:
    return swarm.state("http://127.0.0.1:7470", False)


def strip(state: PageState, name: str) -> dict[str, str]:
    model = next(model for model in state.models if model.id == name)
    return {line.split()[0]: line.split()[-1] for line in layer_strip(state, model)[1:]}


def test_the_strip_shows_holders_spares_and_gaps(swarm: ScriptedSwarm) -> None:
    small = strip(state_of(swarm), SMALL)
    assert small["kitchen"] == "#" * 10 + "." * 20
    assert small["attic"] == "." * 10 + "+" * 20
    assert small["copies"] == "1" * 10 + "2" * 20
    assert strip(state_of(swarm), LARGE)["copies"] == "1" * 8 + "!" * 7 + "1" * 13


def test_layers_that_are_only_asleep_are_no_gap(swarm: ScriptedSwarm) -> None:
    """A holder that gave its memory back after a while loads them when asked: the model can answer, and the strip must not deny it."""
    swarm.forget(node_id(0))
    small = strip(state_of(swarm), SMALL)
    assert small["grandma"] == "o" * 15 + "." * 15
    assert small["copies"] == "o" * 10 + "2" * 20


def test_a_deep_model_gets_several_layers_in_a_column_and_the_weakest_counts(swarm: ScriptedSwarm) -> None:
    state = state_of(swarm)
    deep = msgspec.structs.replace(state.models[0], layer_count=200)
    row = layer_strip(state, deep)[1].split()[-1]
    assert len(row) == 67
    assert row.startswith("###.")  # layers 9 to 11 are not all held


def test_status_says_who_holds_what_what_is_missing_and_what_would_fix_it(swarm: ScriptedSwarm) -> None:
    state = state_of(swarm)
    details = {"members": [{}] * 5, "listen": "192.168.1.20:7475", "processes": PROCESSES}
    text = "\n".join(status_lines(state, details))
    model = next(model for model in state.models if not model.can_answer)
    assert f"next: {model.fix}" in text
    assert "5 members, this node 01010101 at 192.168.1.20:7475" in text
    assert "daemon 41, 80.0 MB" in text
    assert "worker 42, 200 MB, smollm2-135m:0-9" in text
    assert "10-29 (spare)" in text


def test_without_a_model_it_says_what_can_be_typed_while_the_node_runs(swarm: ScriptedSwarm) -> None:
    state = msgspec.structs.replace(state_of(swarm), models=())
    details = {"members": [{}], "listen": "192.168.1.20:7475", "processes": PROCESSES}
    assert any("potluck leave, then potluck up --model NAME" in line for line in status_lines(state, details))


def test_without_a_node_it_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    for command in ("status", "top", "trace", "chat", "plan"):
        assert main.run([command]) == 2
        assert "type: potluck up" in capsys.readouterr().err


def test_a_frame_shows_nodes_running_answers_stage_by_stage_and_news(swarm: ScriptedSwarm) -> None:
    swarm.requests["7"] = RequestView("7", SMALL, "decode", 12, 36.4, 1, swarm.route(SMALL))
    news = swarm.say("failover", "attic took over from ben-desktop", None)
    told = [("state", msgspec.to_builtins(state_of(swarm))), ("news", msgspec.to_builtins(news))]
    *_, (state, items) = updates(told)
    console = Console(width=140, file=None, record=True, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(frame(state, items, 140))
    text = captured.get()
    assert "kitchen 0-9: 2.1" in text
    assert "36.4" in text
    assert "attic took over from ben-desktop" in text
    assert "\x1b" not in text


def test_a_narrow_terminal_loses_columns_and_no_names(swarm: ScriptedSwarm) -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(frame(state_of(swarm), (), 80))
    assert "ben-desktop" in captured.get()
    assert "WEIGHTS" not in captured.get()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_lines(swarm: ScriptedSwarm, width: int) -> None:
    details = {"members": [{}] * 5, "listen": "192.168.1.20:7475", "processes": PROCESSES}
    lines = status_lines(state_of(swarm), details, width)
    start = next(number for number, line in enumerate(lines) if line.startswith("NODE"))
    table = "\n".join(lines[start:]).split("\n\n")[0].splitlines()
    assert table[0].split()[:3] == ["NODE", "NAME", "STATE"]
    assert "LAYERS" in table[0]
    assert all(len(line) <= width for line in table)


def test_status_tells_of_a_worker_that_ran_out_of_memory(swarm: ScriptedSwarm) -> None:
    worker = {**PROCESSES["workers"][0], "kv_limit_bytes": 500_000_000, "out_of_memory": 2}  # type: ignore[index]
    details = {"members": [], "listen": "192.168.1.20:7475", "processes": {**PROCESSES, "workers": [worker]}}
    last = status_lines(state_of(swarm), details)[-1]
    assert "ran out of memory 2×: KV limit lowered to 500" in last
