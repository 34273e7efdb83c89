"""What the commands share at the terminal: results, errors with exit codes, progress. Knows no command.

Results go to stdout; progress, notices and errors to stderr. With --json, stdout carries exactly one JSON object.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from potluck.core.errors import BadRequest, PotluckError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from potluck.weights.progress import Progress

_ALLOWED = "\n\t\u200c\u200d"  # the last two join and part letters and emoji
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


def notice(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def report_error(code: str, message: str, as_json: bool) -> None:
    if as_json:
        shown = message.encode(errors="replace").decode()  # file names may hold what is no text
        print_json({"error": {"code": code, "message": shown}})
    else:
        notice(f"error: {one_line(message)} [{code}]")


def exit_code_of(error: PotluckError) -> int:
    return EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILURE


def one_line(text: str) -> str:
    """Text from files and servers, made harmless for a terminal: no control characters, no line breaks."""
    return "".join(character if character.isprintable() else " " for character in text)


def require_utf8(text: str, what: str) -> str:
    """The text itself. Raises BadRequest where its bytes were none: Python hides those in characters that nobody can send on."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{what} is not UTF-8 text") from None
    return text


def harmless(text: str) -> str:
    """What a model writes, without control characters that a terminal would obey; line breaks and tabs stay."""
    return "".join(character if character.isprintable() or character in _ALLOWED else " " for character in text)


def shown_bytes(size_bytes: float) -> str:
    """A size as people read it, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.0f} {unit}" if size_bytes >= 100 or unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def shown_count(count: float) -> str:
    """A number of parameters: 135M, 1.5B."""
    for unit in ("", "K", "M", "B"):
        if count < 999.5:
            return f"{count:.0f}{unit}" if count >= 100 or unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def counted(count: int, word: str) -> str:
    """1 member, 2 members."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Plain columns: they read the same on a terminal, in a pipe and in a bug report. `right` columns are numbers."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def fitting_columns(lines: Sequence[Sequence[str]], width: int, droppable: Sequence[int]) -> list[int]:
    """The columns of a table that stay where it is wider than the terminal; `droppable` go first to last until the rest fits."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    kept = list(range(len(widths)))
    for column in droppable:
        if sum(widths[each] + 2 for each in kept) - 2 <= width:
            break
        kept.remove(column)
    return kept


def terminal_width() -> int | None:
    """In characters; None where the output goes elsewhere, and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def make_progress(as_json: bool) -> "Progress":
    """A bar on a terminal, a line now and then in a log, nothing where only the JSON object is wanted."""
    if as_json:
        from potluck.weights.progress import Silence

        return Silence()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


class LineProgress:
    """One line for every tenth of a task that takes a while; short tasks print nothing but what they say."""

    def __init__(self, quiet_s: float = 1.0) -> None:
        self._quiet_s = quiet_s
        self._what = ""
        self._total = self._done = self._tenths = 0
        self._started = 0.0

    def start(self, what: str, total_bytes: int) -> None:
        self._what, self._total, self._done, self._tenths = one_line(what), total_bytes, 0, 0
        self._started = time.monotonic()

    def advance(self, size_bytes: int) -> None:
        self._done += size_bytes
        tenths = 10 * self._done // self._total if self._total else 0
        if tenths > self._tenths and time.monotonic() - self._started >= self._quiet_s:
            notice(f"{self._what}: {10 * tenths} % of {shown_bytes(self._total)}")
        self._tenths = tenths

    def finish(self) -> None:
        pass

    def say(self, message: str) -> None:
        notice(one_line(message))


class BarProgress:
    """A bar with speed and remaining time. It is gone when its task is done, so that results stand alone."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None

    def start(self, what: str, total_bytes: int) -> None:
        self.finish()
        self._bar = _make_bar()
        self._bar.start()
        self._task = self._bar.add_task(_escaped(what), total=total_bytes or None)

    def advance(self, size_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, size_bytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, message: str) -> None:
        self.finish()
        notice(one_line(message))


def _make_bar() -> "RichProgress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(one_line(text))
