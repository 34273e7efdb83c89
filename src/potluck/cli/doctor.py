"""`potluck doctor`: looks at everything that commonly goes wrong, and says of each what to do."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import doctor_checks as checks
from potluck.cli.api_options import DEFAULT_API
from potluck.cli.console import EXIT_FAILURE, JsonOption, counted, notice, one_line, print_json
from potluck.cli.running import NodeHasNoApi, read_state
from potluck.cli.swarm_up import DEFAULT_SWARM_LISTEN
from potluck.core.errors import BadRequest, PotluckError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from potluck.cli.doctor_checks import Finding

_LISTEN_S = 3.0
_MOST_MEASURED = 8  # peers; each takes up to five seconds


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what takes seconds: multicast and throughput.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, its network and its node; each trouble comes with its next step. Ends with 1 where something fails."""
    findings = []
    for finding in _findings(quick):
        findings.append(finding)
        if not as_json:
            print(_line(finding), flush=True)
    failures = sum(finding.verdict == "fail" for finding in findings)
    warnings = sum(finding.verdict == "warn" for finding in findings)
    if as_json:
        print_json({"findings": findings, "failures": failures, "warnings": warnings})
    else:
        print(f"{len(findings)} checks, {failures} failed, {counted(warnings, 'warning')}")
    if failures:
        raise typer.Exit(EXIT_FAILURE)


def _line(finding: "Finding") -> str:
    line = f"{finding.verdict.upper().ljust(4)}  {finding.check}: {one_line(finding.text)}"
    return f"{line}\n      next: {one_line(finding.next)}" if finding.next else line


def _findings(is_quick: bool) -> "Iterator[Finding]":
    yield from _machine()
    yield from _files()
    details, finding = _node()
    yield from _network(details, is_quick)
    yield finding
    if details is not None:
        yield from checks.check_running(details, _own_version())[1:]
        yield from checks.check_models(read_state(details["state"]))
        yield from _peers(details, is_quick)


def _machine() -> "Iterator[Finding]":
    import platform

    from potluck.cli.doctor_probes import free_disk_bytes, missing_packages, version_of
    from potluck.core.memory import memory_available_bytes, memory_total_bytes
    from potluck.core.paths import locate_folders

    yield checks.check_python(sys.version_info[:3], f"{platform.system()} {platform.machine()}")
    yield checks.check_packages(missing_packages())
    yield checks.check_engine(version_of("numba"), version_of("llvmlite"))
    yield checks.check_memory(memory_available_bytes(), memory_total_bytes())
    folder = locate_folders().models
    yield checks.check_disk(str(folder), free_disk_bytes(folder))


def _files() -> "Iterator[Finding]":
    from potluck.cli.doctor_probes import key_problem, privacy_of, store_findings, swarm_problem, writing_problem
    from potluck.node.configuration_file import configuration_bytes, configuration_path, read_configuration
    from potluck.node.identity_file import key_path

    key = key_path()
    yield checks.check_home(str(key.parent), writing_problem(key.parent))
    yield checks.check_private_file("key", str(key), privacy_of(key), key_problem(key))
    swarm = key.with_suffix(".swarm")
    yield checks.check_private_file("swarm file", str(swarm), privacy_of(swarm), swarm_problem(key, swarm))
    yield from store_findings()
    try:
        read_configuration()
        yield checks.check_configuration(configuration_path(), configuration_bytes() is not None, None)
    except BadRequest as error:
        yield checks.check_configuration(configuration_path(), True, str(error))


def _node() -> "tuple[Any, Finding]":
    """What the running node tells (None where none runs, or it does not answer), and what to say of it."""
    from potluck.cli.doctor_probes import running_details

    try:
        details = running_details()
    except NodeHasNoApi as error:
        text, _, advice = str(error).partition("; ")
        return None, checks.Finding("node", "fail", text, advice)
    except (PotluckError, OSError) as error:
        return None, checks.Finding("node", "fail", str(error), "end it and start it again: potluck up")
    if details is None:
        return None, checks.Finding(
            "node", "warn", "none is running from this home", "potluck up, or potluck join INVITE"
        )
    return details, checks.check_running(details, _own_version())[0]


def _network(details: Any, is_quick: bool) -> "Iterator[Finding]":
    from potluck.cli.doctor_probes import is_port_free, listen_for
    from potluck.swarm.interfaces import choose_interfaces, read_interfaces

    own_ports = [] if details is None else [_port(details["listen"]), _port(_api_host(details))]
    for what, address, option in (
        ("other nodes", DEFAULT_SWARM_LISTEN, "--listen 0.0.0.0:PORT"),
        ("the API", DEFAULT_API, "--api 127.0.0.1:PORT"),
    ):
        port = _port(address)
        yield checks.check_port(what, port, is_port_free(port), own_ports, option)
    interfaces = read_interfaces()
    active, broken = ([], []) if details is None else (details["discovery"]["active"], details["discovery"]["broken"])
    chosen = choose_interfaces(interfaces, [each["name"] for each in active])
    yield checks.check_interfaces(interfaces, chosen, [each["name"] for each in broken])
    if not is_quick:
        notice(f"listening for {_LISTEN_S:.0f} s …")
        own = "" if details is None else details["state"]["swarm"]["self"]
        peers = [] if details is None else details["peers"]
        yield checks.check_multicast(listen_for(chosen, _LISTEN_S), peers, own, sys.platform)


def _peers(details: Any, is_quick: bool) -> "Iterator[Finding]":
    from potluck.cli.doctor_probes import measure

    for number, peer in enumerate(details["peers"]):
        is_measured = not is_quick and number < _MOST_MEASURED and peer["is_connected"]
        yield checks.check_peer(peer, measure(peer["id"]) if is_measured else None)


def _api_host(details: Any) -> str:
    return str(details["state"]["api"]["base_url"]).removesuffix("/v1")


def _port(address: str) -> int:
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def _own_version() -> str:
    from potluck import __version__

    return __version__
