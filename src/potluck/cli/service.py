"""`potluck service`: a node that starts with the machine's user, by systemd (Linux) or launchd (macOS).

The unit's text is made by pure functions; what talks to the service manager stands at the end.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from potluck.cli.console import EXIT_FAILURE, JsonOption, notice, one_line, print_json
from potluck.core.errors import BadRequest

app = typer.Typer(help="Run the node in the background, from login on.")

UNIT, LABEL = "potluck.service", "potluck.node"
_KEPT_VARIABLES = ("POTLUCK_HOME", "POTLUCK_CACHE", "POTLUCK_CONFIG", "POTLUCK_KEY")
_PATIENCE_S = 30.0


class Manager(NamedTuple):
    """A service manager: its file, and the commands that start, stop and show the service."""

    kind: str
    file: Path
    enable: tuple[tuple[str, ...], ...]
    disable: tuple[tuple[str, ...], ...]
    show: tuple[str, ...]


@app.command(short_help="Run `potluck up` now and whenever you log in.")
def install(
    options: Annotated[list[str] | None, typer.Argument(metavar="-- OPTIONS", help="For `potluck up`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file; change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start `potluck up` with the given options now and whenever you log in."""
    manager = this_manager()
    text = service_text(manager.kind, [*program(), "up", *(options or ())], dict(os.environ), Path.home())
    if dry_run:
        return print_json({"file": str(manager.file), "text": text}) if as_json else print(text, end="")
    _refuse_second_node(manager)
    manager.file.parent.mkdir(parents=True, exist_ok=True)
    manager.file.write_text(text, encoding="utf-8")
    problem = _run_all(manager.enable)
    advice = _linger_advice(manager) if problem is None else _bus_advice(manager)
    if as_json:
        print_json({"file": str(manager.file), "is_enabled": problem is None, "problem": problem, "next": advice})
    else:
        print(f"wrote {manager.file}" + ("; the node is starting: potluck status" if problem is None else ""))
        notice(advice if problem is None else f"it could not be started ({one_line(problem)}); {advice}")
    if problem is not None:
        raise typer.Exit(EXIT_FAILURE)
    return None


def _refuse_second_node(manager: Manager) -> None:
    from potluck.node.identity_file import own_run_file

    if own_run_file().read() is not None and not manager.file.exists():
        raise BadRequest("a node of this home is running already; end it first: potluck leave")


@app.command()
def uninstall(as_json: JsonOption = False) -> None:
    """Stop the background node and remove its file."""
    manager = this_manager()
    if not manager.file.exists():
        raise BadRequest(f"there is no service ({manager.file}); `potluck service install` makes one")
    problem = _run_all(manager.disable)
    manager.file.unlink()
    if as_json:
        return print_json({"removed": str(manager.file), "problem": problem})
    print(f"removed {manager.file}")
    if problem is not None:
        notice(f"it could not be stopped ({one_line(problem)}); if it still runs: potluck leave")
    return None


@app.command(short_help="Show whether it is installed and running.")
def status(as_json: JsonOption = False) -> None:
    """Show whether the service is installed and running; ends with 1 where it is not."""
    manager = this_manager()
    is_installed = manager.file.exists()
    problem = _run(manager.show) if is_installed else "not installed"
    if as_json:
        print_json({"file": str(manager.file), "is_installed": is_installed, "is_running": problem is None})
    elif not is_installed:
        print("not installed; type: potluck service install")
    else:
        print(
            f"{manager.file}: " + ("running; more: potluck status" if problem is None else f"not running ({problem})")
        )
    if problem is not None:
        raise typer.Exit(EXIT_FAILURE)


# ------------------------------------------------------------ what is written


def service_text(kind: str, command: Sequence[str], environment: Mapping[str, str], home: Path) -> str:
    kept = {name: environment[name] for name in _KEPT_VARIABLES if environment.get(name)}
    return systemd_unit(command, kept) if kind == "systemd" else launchd_agent(command, kept, home)


def systemd_unit(command: Sequence[str], environment: Mapping[str, str]) -> str:
    lines = [
        "[Unit]",
        "Description=Potluck: one language model across several people's computers",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_systemd_word(word) for word in command)}",
        *(f"Environment={_systemd_word(f'{name}={value}', is_command=False)}" for name, value in environment.items()),
        "Restart=on-failure",
        "RestartSec=5",
        "KillMode=mixed",  # the node ends its own workers
        "TimeoutStopSec=30",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _systemd_word(word: str, is_command: bool = True) -> str:
    """Quoted as systemd reads it: % and, in commands, $ would otherwise be replaced."""
    if any(not character.isprintable() for character in word):
        raise BadRequest("an option has a line break or a control character in it")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("$", "$$") if is_command else escaped
    is_plain = word and all(character.isalnum() or character in "-_./:=,@+" for character in word)
    return escaped if is_plain else f'"{escaped}"'


def launchd_agent(command: Sequence[str], environment: Mapping[str, str], home: Path) -> str:
    import plistlib

    log = str(home / "Library" / "Logs" / "potluck.log")
    agent = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(agent).decode()


def program() -> list[str]:
    """This very program with absolute paths, as a service manager needs it."""
    return [os.path.abspath(sys.executable), "-m", "potluck.cli.main"]


# ------------------------------------------------------------ who runs it


def this_manager() -> Manager:
    if sys.platform == "darwin":
        return launchd(Path.home())
    if sys.platform.startswith("linux"):
        return systemd(Path.home(), dict(os.environ))
    raise BadRequest("services are made for systemd (Linux) and launchd (macOS) only; here type: potluck up")


def systemd(home: Path, environment: Mapping[str, str]) -> Manager:
    folder = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    control = ("systemctl", "--user")
    return Manager(
        "systemd",
        folder / "systemd" / "user" / UNIT,
        ((*control, "daemon-reload"), (*control, "enable", UNIT), (*control, "restart", UNIT)),
        ((*control, "disable", "--now", UNIT),),
        (*control, "is-active", "--quiet", UNIT),
    )


def launchd(home: Path) -> Manager:
    file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    return Manager(
        "launchd",
        file,
        (("launchctl", "load", "-w", str(file)),),
        (("launchctl", "unload", "-w", str(file)),),
        ("launchctl", "list", LABEL),
    )


def _bus_advice(manager: Manager) -> str:
    typed = " && ".join(" ".join(command) for command in manager.enable)
    if manager.kind == "systemd":
        return f"log in as this user (or: sudo loginctl enable-linger $USER), then type: {typed}"
    return f"type: {typed}"


def _linger_advice(manager: Manager) -> str:
    if manager.kind == "systemd":
        return "it runs while you are logged in; to let it run always: loginctl enable-linger"
    return "it runs while you are logged in"


def _run_all(commands: Sequence[Sequence[str]]) -> str | None:
    for command in commands:
        problem = _run(command)
        if problem is not None:
            return problem
    return None


def _run(command: Sequence[str]) -> str | None:
    """What went wrong; None: nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError:
        return f"there is no {command[0]} here"
    except subprocess.TimeoutExpired:
        return f"{command[0]} does not answer"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[0] if said else f"{' '.join(command)} ended with {done.returncode}"
