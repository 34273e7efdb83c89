"""Programs on a pseudo terminal, for tests of what people see and type."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil

_PATIENCE_S = 60.0
# Takes the terminal first, so that Ctrl-C there is a signal here; whoever started the tests in the background has it ignored.
_PROGRAM = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); from potluck.cli.main import main; main()"
)


def _environment(**changes: str) -> dict[str, str]:
    """Without the size of whatever terminal the tests were started at: this one has its own."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | changes


class Terminal:
    """A program on a pseudo terminal: what it prints, and what is typed."""

    def __init__(self, arguments: list[str], home: Path, columns: int = 100, kind: str = "dumb") -> None:
        self._own, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, columns))
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            env=_environment(POTLUCK_HOME=str(home), TERM=kind), start_new_session=True,
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

    def wait_until_asleep(self) -> None:
        """A prompt is shown a moment before Python's `input` waits for keys; Ctrl-C in that moment is noticed with the next key only."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while psutil.Process(self.process.pid).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline_s, "the program does not wait for keys"
            time.sleep(0.01)

    def _read(self) -> str:
        try:
            return os.read(self._own, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the other end is closed
            return ""

    def finish(self) -> int:
        code = self.process.wait(_PATIENCE_S)
        os.close(self._own)
        return code

    def end(self) -> None:
        """Whatever has happened, the program is gone after this."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
