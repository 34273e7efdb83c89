"""The `potluck` program: its commands, and the one place where errors become lines and exit codes.

0: done; 1: it failed; 2: it was asked for something that cannot be; 130: interrupted. Commands live in their own
modules and import what is heavy when they run, so that `potluck --help` is there at once.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from potluck import __version__
from potluck.cli import ask, bench, demo, local, models, swarm, up
from potluck.cli.console import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, exit_code_of, report_error
from potluck.core.errors import BadRequest, PotluckError

app = typer.Typer(
    name="potluck",
    help="One language model across several people's computers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("ask")(ask.ask)
app.command("up")(up.up)
app.command("join")(swarm.join)
app.command("invite")(swarm.invite)
app.command("members")(swarm.members)
app.command("expel")(swarm.expel)
app.command("plan")(swarm.plan)
app.command("leave")(swarm.leave)
app.command("local")(local.local)
app.command("demo")(demo.demo)
app.command("status")(local.status)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("remove")(models.remove)
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
    models.models()


_MENU = """\
potluck pull NAME|PATH|hf:REPO   bring a model into the store
potluck models                   list the models in the store
potluck remove ID                delete one
potluck bench engine             measure this machine
potluck bench api                measure the API under load
potluck ask "..."                ask one a question
potluck up --layers 0-14         serve some layers to other machines
potluck local --nodes 3          try it out: several nodes on this machine
potluck demo                     watch a node die in the middle of an answer
potluck status --via ADDR,ADDR   what nodes serve, and how they are
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
    try:
        result = app(args=list(arguments), prog_name="potluck", standalone_mode=False)
        sys.stdout.flush()
        if result == EXIT_INTERRUPTED:  # what Typer makes of Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except PotluckError as error:
        report_error(error.code, str(error), as_json)
        return exit_code_of(error)
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_FAILURE
    except OSError as error:
        report_error("file_error", f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), as_json)
        return EXIT_FAILURE
    except (KeyboardInterrupt, typer.Abort):
        report_error("interrupted", "interrupted", as_json)
        return EXIT_INTERRUPTED
    except _USAGE_ERRORS as error:
        report_error(BadRequest.code, f"{error.format_message()} (see `potluck --help`)", as_json)
        return EXIT_USAGE


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


def _silence_stdout() -> None:
    # Whoever read our output has gone; the interpreter's own flush at exit would complain a second time.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
