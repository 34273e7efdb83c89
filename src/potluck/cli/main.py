"""The `potluck` program: its commands, and the one place where errors become lines and exit codes.

0: done; 1: it failed; 2: it was asked for something that cannot be; 130: interrupted. Commands live in their own
modules and import what is heavy when they run, so that `potluck --help` is there at once.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from potluck import __version__
from potluck.cli import (
    ask,
    bench,
    chat,
    completion,
    config,
    demo,
    doctor,
    local,
    models,
    service,
    status,
    swarm,
    top,
    trace,
    up,
)
from potluck.cli.console import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, exit_code_of, report_error
from potluck.core.errors import BadRequest, PotluckError

app = typer.Typer(
    name="potluck",
    help="One language model across several people's computers.",
    add_completion=completion.is_asked_for(),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up", short_help="Bring this machine into its swarm; the first time, found one.")(up.up)
app.command("join", short_help="Join a swarm with an invite and take a share of its layers.")(swarm.join)
app.command("invite", short_help="Print the line that brings another machine in.")(swarm.invite)
app.command("chat")(chat.chat)
app.command("ask", short_help="Ask one question and stream the answer.")(ask.ask)
app.command("status", short_help="Show who holds which layers, and what is missing.")(status.status)
app.command("top", short_help="Watch the swarm live.")(top.top)
app.command("trace", short_help="Show where an answer's time went, hop by hop.")(trace.trace)
app.command("doctor", short_help="Find out what is wrong, and what to do about it.")(doctor.doctor)
app.command("plan", short_help="Show who should hold what, and how fast that would be.")(swarm.plan)
app.command("members")(swarm.members)
app.command("expel", short_help="Throw a member out.")(swarm.expel)
app.command("trust", short_help="Say what a member may do.")(swarm.entrust)
app.command("withdraw", short_help="Have the swarm serve a model no longer.")(swarm.withdraw)
app.command("leave", short_help="End this machine's node in good order.")(swarm.leave)
app.command("pull", short_help="Bring a model into the store.")(models.pull)
app.command("models")(models.models)
app.command("remove", short_help="Delete a model from the store.")(models.remove)
app.command("config", short_help="Show every setting, and where it came from.")(config.config)
app.add_typer(service.app, name="service")
app.command("completion")(completion.completion)
app.command("local")(local.local)
app.command("demo", short_help="Start three nodes, ask, kill one, and compare the text.")(demo.demo)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def potluck(
    context: typer.Context,
    is_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --version or alone: print one JSON object.")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        if as_json:
            raise BadRequest("put --json after the command")
        return
    if is_version:
        return _print_version(as_json)
    if as_json:
        return models.models(as_json=True)
    print(_MENU)
    print(_node_line())
    models.models()


def _node_line() -> str:
    from potluck.node.identity_file import own_run_file

    running = own_run_file().read()
    if running is None:
        return "No node is running from this home."
    page = f"; page http://{running.api}/" if running.api else ""
    return f"A node is running (process {running.pid}, swarm {running.swarm[:8]}){page}"


_MENU = """\
potluck up                       bring this machine into its swarm; the first time: found one
potluck invite                   print the line that brings another machine in
potluck join INVITE              … and type it there
potluck chat                     talk to the swarm
potluck ask "..."                ask one question
potluck status                   who holds which layers, and what is missing
potluck top                      the same, live
potluck trace                    why was an answer slow, hop by hop
potluck doctor                   find out what is wrong
potluck plan                     who should hold what, and how fast that would be
potluck members, trust, expel    who belongs and what each may do; put one out
potluck withdraw MODEL           serve a model no longer
potluck leave                    end this machine's node in good order
potluck pull, models, remove     the models on this machine
potluck config                   every setting, and where it came from
potluck service install          run in the background from login on
potluck completion bash          complete commands in the shell
potluck local, demo              try it out on one machine; watch a node die
potluck bench engine, api, …     measure
potluck COMMAND --help           all about a command
"""


def _print_version(as_json: bool) -> None:
    if as_json:
        from potluck.cli.console import print_json

        return print_json({"version": __version__})
    print(f"potluck {__version__}")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Expected failures print one line; bugs keep their traceback."""
    as_json = wants_json(arguments)
    _replace_closed_streams()
    try:
        result = app(args=list(arguments), prog_name="potluck", standalone_mode=False)
        sys.stdout.flush()
        if result == EXIT_INTERRUPTED:  # what Typer makes of Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except PotluckError as error:
        _report(error.code, str(error), as_json)
        return exit_code_of(error)
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_FAILURE
    except OSError as error:
        is_lost = _is_output_lost()
        _report("file_error", _told(error, is_lost), as_json and not is_lost)
        return EXIT_FAILURE
    except (KeyboardInterrupt, typer.Abort):
        _report("interrupted", "interrupted", as_json)
        return EXIT_INTERRUPTED
    except _USAGE_ERRORS as error:
        _report(BadRequest.code, _misuse(error, arguments), as_json)
        return EXIT_USAGE


def _replace_closed_streams() -> None:
    """Python has None where a stream was closed before it began. Nothing comes from there, and whoever closed the others wants nothing."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _report(code: str, message: str, as_json: bool) -> None:
    """On standard error where standard output takes nothing."""
    try:
        report_error(code, message, as_json)
    except OSError:
        _silence_stdout()
        with contextlib.suppress(OSError):
            report_error(code, message, as_json=False)


def _misuse(error: typer.BadParameter, arguments: Sequence[str]) -> str:
    context = error.ctx
    command = context.command_path if context is not None else "potluck"
    complaint = _known_elsewhere(arguments) if command == "potluck" else None
    return complaint or f"{error.format_message()} (see `{command} --help`)"


# What people type who come from other programs of the kind.
_KNOWN_ELSEWHERE = {
    "run": "chat", "serve": "up", "start": "up", "stop": "leave", "ls": "models", "list": "models", "rm": "remove",
    "delete": "remove", "ps": "status", "nodes": "status", "download": "pull", "benchmark": "bench",
}  # fmt: skip


def _known_elsewhere(arguments: Sequence[str]) -> str | None:
    typed = next(iter(arguments), "")
    known = _KNOWN_ELSEWHERE.get(typed)
    return None if known is None else f"there is no `potluck {typed}`; here it is: potluck {known}"


_NEXT = {
    errno.ENOSPC: "make room on that disk, or set POTLUCK_HOME to a folder elsewhere",
    errno.EACCES: "set POTLUCK_HOME to a folder that you may write to, or mend its rights",
    errno.EROFS: "set POTLUCK_HOME to a folder that can be written to",
    errno.ENOENT: "is POTLUCK_HOME right? `potluck config` shows all paths",
}


def _told(error: OSError, is_output_lost: bool) -> str:
    """What the system complains of, about which file, and what to do about it."""
    if is_output_lost:
        return f"what was to be printed cannot be written: {error.strerror or error}"
    what = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    hint = _NEXT.get(error.errno or 0, "`potluck doctor` may know more")
    return f"{what}; {hint}"


# Newer versions of Typer carry their own copy of click; the public BadParameter leads to the base class in either.
_USAGE_ERRORS = cast(
    type[typer.BadParameter], next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json was asked for; known before the command line is parsed, because parsing may be what fails."""
    options = list(arguments)
    with contextlib.suppress(ValueError):
        options = options[: options.index("--")]
    return "--json" in options


def _is_output_lost() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()
        return True
    return False


def _silence_stdout() -> None:
    # Whoever read our output has gone; the interpreter's own flush at exit would complain a second time.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
