"""`potluck chat` and `potluck top` at a real (pseudo) terminal, against a node's API whose answers are scripted."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.node.run_file import RunFile, RunningNode
from potluck.testing.page_server import PageServer, Script
from tests.support.terminals import Terminal

_PATIENCE_S = 60.0
TEXT = "Everyone brings a dish, and everyone eats well."


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(script=Script(answer=TEXT)) as made:
        yield made


@contextlib.contextmanager
def chatting(server: PageServer, home: Path) -> Iterator[Terminal]:
    terminal = Terminal(["chat", "--url", server.base_url], home)
    try:
        terminal.wait_for(">>> ")
        yield terminal
    finally:
        terminal.end()


def test_a_conversation_with_several_lines_commands_and_figures(server: PageServer, tmp_path: Path) -> None:
    with chatting(server, tmp_path) as terminal:
        terminal.type('"""Hello\nthere"""\n')
        assert TEXT in terminal.wait_for(r"tokens/s.*\]")
        terminal.wait_for(">>> ")
        assert server.bodies[-1]["messages"] == [{"role": "user", "content": "Hello\nthere"}]
        terminal.type(f"/save {tmp_path}/talk.json\n")
        terminal.wait_for("saved to")
        terminal.type("/system Rhyme.\n")
        terminal.wait_for("begun anew")
        terminal.type("Again \\\nplease\n")
        terminal.wait_for(r"tokens/s.*>>> ")
        assert [message["role"] for message in server.bodies[-1]["messages"]] == ["system", "user"]
        terminal.type("\x04")
        assert terminal.finish() == 0
    assert TEXT in (tmp_path / "talk.json").read_text()
    history = tmp_path / "chat-history"
    assert "please" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(server: PageServer, tmp_path: Path) -> None:
    server.script.hold_after = 3
    with chatting(server, tmp_path) as terminal:
        terminal.type("Hello\n")
        terminal.wait_for("brings")
        terminal.type("\x03")
        assert "stopped" in terminal.wait_for(r"\[.*\].*>>> ")
        deadline_s = time.monotonic() + _PATIENCE_S
        while server.disconnects < 1 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert server.disconnects == 1  # the server knows, and so would every shard
        server.script.hold_after = None
        terminal.wait_until_asleep()
        terminal.type("\x03")  # at the prompt it drops the line, and says how to end
        terminal.wait_for("Ctrl-D ends.*>>> ")
        terminal.type("Go on\n")
        terminal.wait_for(r"tokens/s.*>>> ")
        said = server.bodies[-1]["messages"]
        assert [message["role"] for message in said] == ["user", "assistant", "user"]
        assert TEXT.startswith(said[1]["content"])
        terminal.type("/exit\n")
        assert terminal.finish() == 0


def test_a_refusal_is_one_line_and_the_question_can_be_asked_again(server: PageServer, tmp_path: Path) -> None:
    server.script.error = "layers 8-14 are missing"
    with chatting(server, tmp_path) as terminal:
        terminal.type("Hello\n")
        assert "layers 8-14 are missing" in terminal.wait_for("error: .*>>> ")
        server.script.error = ""
        terminal.type("Hello\n")
        terminal.wait_for(r"tokens/s.*>>> ")
        assert len(server.bodies[-1]["messages"]) == 1
        terminal.type("\x04")
        assert terminal.finish() == 0


def test_top_follows_the_swarm_until_ctrl_c(server: PageServer, tmp_path: Path) -> None:
    address = server.base_url.removeprefix("http://")
    run_file = RunFile(tmp_path / "node.run")
    with run_file.held():
        run_file.write(RunningNode(os.getpid(), "01" * 32, "5a" * 32, (), address))
        terminal = Terminal(["top"], tmp_path, columns=120, kind="xterm")
        try:
            assert "ben-desktop" in terminal.wait_for("grandma.*no answer is being written")
            server.do(lambda swarm: swarm.say("lost", "attic fell asleep", None))
            terminal.wait_for("attic fell asleep")
            terminal.type("\x03")
            assert terminal.finish() == 0
        finally:
            terminal.end()
