"""`potluck chat` at a real (pseudo) terminal, against a node's API whose answers are scripted."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.testing.page_server import PageServer, Script

_PATIENCE_S = 20.0
# Takes the terminal first, so that Ctrl-C there is a signal here.
_PROGRAM = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from potluck.cli.main import main; main()"
TEXT = "Everyone brings a dish, and everyone eats well."


class Terminal:
    """A program on a pseudo terminal: what it prints, and what is typed."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._own, theirs = pty.openpty()
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "POTLUCK_HOME": str(home), "TERM": "dumb"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What came, up to and with the pattern; it is taken from the output."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while (found := re.search(pattern, self.output, re.DOTALL)) is None:
            assert time.monotonic() < deadline_s, f"no {pattern!r} in {self.output!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                self.output += self._read()
        taken, self.output = self.output[: found.end()], self.output[found.end() :]
        return taken

    def _read(self) -> str:
        try:
            return os.read(self._own, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the other end is closed
            return ""

    def finish(self) -> int:
        code = self.process.wait(_PATIENCE_S)
        os.close(self._own)
        return code


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
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


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
