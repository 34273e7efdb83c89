"""What `potluck doctor` makes of what it found: facts in, findings with a next step out. No I/O.

`doctor_probes.py` gathers the facts; `doctor.py` prints.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from potluck.cli.console import counted, one_line, shown_bytes
from potluck.cli.running import RESTART
from potluck.core.extras import how_to_install

if TYPE_CHECKING:
    from potluck.gateway.page_state import PageState
    from potluck.swarm.interfaces import Interface

Verdict = Literal["ok", "warn", "fail"]
_LEAST_PYTHON = (3, 11)
_LITTLE_MEMORY_BYTES, _LEAST_MEMORY_BYTES = 1 << 30, 256 << 20
_LITTLE_DISK_BYTES, _LEAST_DISK_BYTES = 2 << 30, 200 << 20
_SLOW_RTT_MS, _SLOW_MBIT_S = 50.0, 20.0


class Finding(msgspec.Struct, frozen=True):
    """`next`: what to type or do; empty where all is well."""

    check: str
    verdict: Verdict
    text: str
    next: str = ""


def check_python(version: tuple[int, ...], platform: str) -> Finding:
    shown = ".".join(map(str, version[:3]))
    if version[:2] < _LEAST_PYTHON:
        return Finding("python", "fail", f"Python {shown} on {platform}; 3.11 is the least", "install a newer Python")
    return Finding("python", "ok", f"Python {shown} on {platform}")


def check_packages(missing: Sequence[str]) -> Finding:
    if missing:
        return Finding("packages", "fail", f"missing or of another version: {', '.join(missing)}", how_to_install())
    return Finding("packages", "ok", "every package that Potluck needs is there")


def check_engine(numba: str | None, llvmlite: str | None) -> Finding:
    if numba is None or llvmlite is None:
        return Finding(
            "engine", "warn", "numba is not installed: this machine can ask, and hold no layers",
            f"to hold layers, {how_to_install('cpu')}",
        )  # fmt: skip
    return Finding("engine", "ok", f"numba {numba}, llvmlite {llvmlite}")


def check_memory(available_bytes: int, total_bytes: int) -> Finding:
    text = f"{shown_bytes(available_bytes)} of {shown_bytes(total_bytes)} are free"
    if available_bytes < _LEAST_MEMORY_BYTES:
        return Finding("memory", "fail", text, "close programs; a node needs some hundred megabytes")
    if available_bytes < _LITTLE_MEMORY_BYTES:
        return Finding("memory", "warn", text, "close programs, or give less: potluck up --memory 500MB")
    return Finding("memory", "ok", text)


def check_disk(folder: str, free_bytes: int) -> Finding:
    text = f"{shown_bytes(free_bytes)} free in {folder}"
    if free_bytes < _LITTLE_DISK_BYTES:
        verdict: Verdict = "fail" if free_bytes < _LEAST_DISK_BYTES else "warn"
        return Finding("disk", verdict, text, "potluck models and potluck remove ID, or another place: POTLUCK_HOME")
    return Finding("disk", "ok", text)


def check_home(folder: str, problem: str | None) -> Finding:
    """`problem`: why no file can be written there."""
    if problem is not None:
        return Finding(
            "home", "fail", f"{folder} cannot be written: {problem}",
            "make it writable, or name another place: POTLUCK_HOME=FOLDER",
        )  # fmt: skip
    return Finding("home", "ok", f"{folder} can be written")


def check_store(count: int, damaged: Mapping[str, str], problem: str | None = None) -> list[Finding]:
    """`damaged`: what is wrong with which model; `problem`: why the store cannot be read at all."""
    if problem is not None:
        return [Finding("models", "fail", problem, "make it readable, or name another place: POTLUCK_HOME=FOLDER")]
    if damaged:
        return [
            Finding(
                f"model {name}",
                "fail",
                fault.partition("; `potluck remove ")[0],
                f"potluck remove {name}, and pull it again",
            )
            for name, fault in damaged.items()
        ]
    return [Finding("models", "ok", f"{counted(count, 'model')} in the store, of the right size" if count else "none")]


def check_private_file(what: str, path: str, complaint: str | None, problem: str | None = None) -> Finding:
    """`complaint` None: its owner's alone; empty: there is no file yet. `problem`: of what is in it."""
    if not complaint and problem is not None:
        return Finding(
            what, "fail", problem, "put back a copy; or begin anew: potluck leave --forget --new-key, then potluck join"
        )
    if complaint == "is not a file":
        return Finding(what, "fail", f"{path} {complaint}", f"move it away: mv {path} {path}.old")
    if complaint:
        return Finding(what, "fail", f"{path} {complaint}", f"chmod 600 {path}")
    return Finding(what, "ok", f"{path} is yours alone" if complaint is None else f"none yet ({path})")


def check_configuration(path: str, exists: bool, problem: str | None) -> Finding:
    if problem is not None:
        return Finding("configuration", "fail", one_line(problem), f"mend {path}; potluck config shows every value")
    return Finding("configuration", "ok", path if exists else f"defaults (no {path})")


def check_port(what: str, port: int, is_free: bool, own_ports: Sequence[int], option: str) -> Finding:
    check = f"port {port}"
    if is_free:
        return Finding(check, "ok", f"free for {what}")
    if port in own_ports:
        return Finding(check, "ok", f"the running node's own, for {what}")
    return Finding(
        check,
        "warn",
        f"another program has it, so the next node cannot have it for {what}",
        f"choose one: potluck up {option}",
    )


def check_interfaces(
    interfaces: "Sequence[Interface]", chosen: "Sequence[Interface]", broken: Sequence[str]
) -> Finding:
    shown = ", ".join(f"{each.name} ({each.address})" for each in chosen)
    left = dict.fromkeys(f"{each.name}: {_why_left(each)}" for each in interfaces if each not in chosen)
    text = f"used: {shown or 'none'}" + (f"; left out: {'; '.join(left)}" if left else "")
    if not chosen:
        return Finding("interfaces", "fail", text, "connect this machine to a network")
    if broken:
        return Finding(
            "interfaces", "warn", f"{text}; mDNS fails on {', '.join(broken)}", "name others: --interface NAME"
        )
    if all(each.is_loopback for each in chosen):
        return Finding("interfaces", "warn", f"{text}; only this machine", "connect it to a network")
    if all(each.looks_virtual for each in chosen):
        return Finding(
            "interfaces", "warn", f"{text}; only bridges or tunnels", "name one: potluck up --interface NAME"
        )
    return Finding("interfaces", "ok", text)


def _why_left(interface: "Interface") -> str:
    if not interface.is_up:
        return "down"
    if interface.is_loopback:
        return "this machine only"
    return "a bridge or tunnel (name it with --interface to use it)" if interface.looks_virtual else "not named"


class Heard(msgspec.Struct, frozen=True):
    """What came by multicast on one interface: one's own test announcement, and nodes (the first 16 digits of their ids)."""

    interface: str
    is_own_heard: bool
    nodes: tuple[str, ...] = ()
    problem: str = ""


def check_multicast(heard: Sequence[Heard], peers: Sequence[Mapping[str, Any]], own: str, platform: str) -> Finding:
    """`peers`: of the running node. Those that are linked while nobody is heard speak for a network that keeps multicast back."""
    hearing = {each.interface for each in heard if each.is_own_heard}  # by one family: that is enough
    deaf = [each for each in heard if each.interface not in hearing]
    others = {node for each in heard for node in each.nodes if not own or not own.startswith(node)}
    linked = [peer for peer in peers if peer["is_connected"] and not _is_local(peer["addresses"])]
    if not heard:
        return Finding("multicast", "warn", "no interface to try it on", "connect this machine to a network")
    if deaf:
        shown = ", ".join(f"{each.interface}{f' ({one_line(each.problem)})' if each.problem else ''}" for each in deaf)
        return Finding(
            "multicast", "fail", f"one's own announcement does not come back on {shown}", _firewall(platform)
        )
    if others:
        return Finding(
            "multicast", "ok", f"received from {counted(len(others), 'other node')}: {', '.join(sorted(others))[:120]}"
        )
    if linked:
        return Finding(
            "multicast", "warn", f"{len(linked)} peers are linked, and none is heard by multicast",
            "Wi-Fi often keeps clients apart (client isolation, guest network); invites carry addresses, so this costs only discovery",
        )  # fmt: skip
    return Finding("multicast", "ok", "works on this machine; no other node is announcing itself now")


def _is_local(addresses: Sequence[str]) -> bool:
    return all(address.startswith(("127.", "[::1]")) for address in addresses)


def _firewall(platform: str) -> str:
    if platform == "darwin":
        return "allow it: System Settings, Privacy & Security, Local Network; and the firewall"
    if platform == "win32":
        return "set the network to private, and let Python through the Windows firewall (UDP 5353)"
    return "let UDP port 5353 through the firewall (e.g. ufw allow 5353/udp); or join with an invite, which needs no multicast"


# ------------------------------------------------------------ the running node


def check_running(details: Mapping[str, Any], own_version: str) -> list[Finding]:
    state, own = details["state"], details["processes"]
    text = f"node {state['swarm']['self'][:8]} of swarm {state['swarm']['id'][:8]}, daemon {own['daemon_pid']}, Potluck {own['version']}"
    node = Finding("node", "ok", text)
    if own["version"] != own_version:
        node = Finding("node", "warn", f"{text}, and this command is {own_version}", RESTART)
    if details.get("expulsion"):
        text, _, advice = one_line(details["expulsion"]).partition("; ")
        node = Finding("node", "fail", text, advice)
    seen, members = len(details["peers"]) + 1, len(details["members"])
    known = Finding("members", "ok", f"{counted(members, 'member')}, {seen} in sight")
    clock = Finding(
        "clocks", "ok", "may differ: lifetimes run on each receiver's own clock, and invites expire by their issuer's"
    )
    where = ", ".join(each["name"] for each in details["discovery"]["active"])
    unused = (
        "not used by the running node (--no-discovery, or it listens on this machine only); invites carry addresses"
    )
    mdns = Finding("discovery", "ok", f"by mDNS on {where}" if details["discovery"]["is_used"] else unused)
    return [node, known, mdns, check_duplicates(details["duplicates"]), clock, *check_versions(details)]


def check_duplicates(duplicates: Sequence[Mapping[str, Any]]) -> Finding:
    if not duplicates:
        return Finding("duplicate ids", "ok", "every id is there once")
    shown = "; ".join(
        f"{each['id'][:8]} at {' and '.join(', '.join(places) for places in each['addresses'])}" for each in duplicates
    )
    return Finding(
        "duplicate ids", "fail", f"two machines use one key: {shown}",
        "on the copy: potluck leave --forget --new-key, then potluck join with a new invite",
    )  # fmt: skip


def check_versions(details: Mapping[str, Any]) -> list[Finding]:
    own, peers = details["processes"], details["peers"]
    versions = {peer["version"] for peer in peers} | {own["version"]}
    others = [peer for peer in peers if peer["arithmetic"] != own["arithmetic"]]
    findings = [Finding("versions", "ok", f"all run {own['version']}")]
    if len(versions) > 1:
        shown = ", ".join(f"{one_line(peer['name']) or peer['id'][:8]} {one_line(peer['version'])}" for peer in peers)
        findings = [Finding("versions", "warn", f"this {own['version']}; {shown}", "bring all to the newest version")]
    if others:
        names = ", ".join(one_line(peer["name"]) or peer["id"][:8] for peer in others)
        text = f"{names} compute by other rules than version {own['arithmetic']}, so they cannot share an answer with this node"
        return [*findings, Finding("arithmetic", "fail", text, "bring all to the same version")]
    return [*findings, Finding("arithmetic", "ok", f"version {own['arithmetic']} everywhere")]


def check_models(state: "PageState") -> list[Finding]:
    if not state.models:
        return [Finding("layers", "warn", "this swarm serves no model yet", f"{RESTART} --model NAME")]
    return [
        Finding("layers", "ok", model.verdict)
        if model.can_answer
        else Finding("layers", "fail", f"nobody holds {', '.join(model.missing)} of {model.id}", model.fix)
        for model in state.models
    ]


class Throughput(msgspec.Struct, frozen=True):
    """To one peer; `problem` where it could not be measured."""

    peer: str
    mbit_s: float | None = None
    problem: str = ""


def check_peer(peer: Mapping[str, Any], throughput: Throughput | None) -> Finding:
    """`throughput` None: not measured."""
    check = f"peer {one_line(peer['name']) or peer['id'][:8]}"
    if not peer["is_connected"] and peer["is_usable"]:
        return Finding(check, "ok", "no link at the moment, as in a swarm of so many; it is dialled when it is needed")
    if not peer["is_connected"]:
        return Finding(
            check, "fail", f"no link to {', '.join(peer['addresses'])}",
            "is it awake, on this network, and its port let through its firewall? On it: potluck doctor",
        )  # fmt: skip
    text = f"round trip {peer['rtt_ms']:.1f} ms" if peer["rtt_ms"] else "linked, no round trip measured yet"
    if throughput is not None and throughput.mbit_s is not None:
        text += f", {throughput.mbit_s:.0f} Mbit/s"
    elif throughput is not None:
        text += f", throughput unknown ({one_line(throughput.problem)})"
    mbit_s = throughput.mbit_s if throughput is not None else None
    if peer["rtt_ms"] > _SLOW_RTT_MS or (mbit_s is not None and mbit_s < _SLOW_MBIT_S):
        return Finding(check, "warn", f"{text}: slow", "a cable instead of Wi-Fi, or fewer machines in a pipeline")
    return Finding(check, "ok", text)
