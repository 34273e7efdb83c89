"""`potluck completion`: the script that teaches a shell to complete Potluck's commands. Typer makes it, on request only.

Typer's own two options for this would stand in every help text; so completion is switched on by the variable that such scripts set.
"""

import os
import subprocess
import sys
from enum import StrEnum
from typing import Annotated

import typer

from potluck.cli.console import JsonOption, notice, print_json
from potluck.core.errors import PotluckError

VARIABLE = "_POTLUCK_COMPLETE"
_PATIENCE_S = 30.0


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_WHERE = {
    Shell.BASH: "potluck completion bash > ~/.local/share/bash-completion/completions/potluck",
    Shell.ZSH: "potluck completion zsh > a folder of your $fpath, as _potluck",
    Shell.FISH: "potluck completion fish > ~/.config/fish/completions/potluck.fish",
}


def is_asked_for() -> bool:
    return VARIABLE in os.environ


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    as_json: JsonOption = False,
) -> None:
    """Print the completion script for a shell."""
    script = _script(shell)
    if as_json:
        return print_json({"shell": shell, "script": script})
    print(script)
    if sys.stdout.isatty():
        notice(f"to keep it: {_WHERE[shell]}")
    return None


def _script(shell: Shell) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "potluck.cli.main"), env={**os.environ, VARIABLE: f"source_{shell}"}, capture_output=True,
        text=True, timeout=_PATIENCE_S, check=False,
    )  # fmt: skip
    if done.returncode != 0 or not done.stdout.strip():
        raise PotluckError(f"the installed Typer makes no script for {shell}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()
