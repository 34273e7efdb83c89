"""`potluck join`, `invite`, `members`, `expel`, `plan`, `leave`: a swarm at the terminal."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.api_options import AllowHostOption, AllowOriginOption, ApiOption, api_options
from potluck.cli.console import JsonOption, format_table, notice, print_json, shown_bytes
from potluck.cli.invite_text import read_invite
from potluck.cli.node_options import (
    BatchInvariantOption,
    ChaosOption,
    DeviceOption,
    DiscoveryOption,
    InterfaceOption,
    ListenOption,
    MaxLayersOption,
    MemoryOption,
    NameOption,
    OwnLayersOption,
    ServeOption,
    StreamsOption,
    ThreadsOption,
    is_serving,
)
from potluck.cli.running import RESTART, call, has_ended, running_node
from potluck.cli.swarm_up import SwarmOptions, run_swarm_node
from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from potluck.trust.keeper import SwarmKeeper
    from potluck.trust.records import Trust
    from potluck.trust.roster import Member


def join(
    invite: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE", help="What `potluck invite` printed; without it, or with -, it is asked for."),
    ] = None,
    max_layers: MaxLayersOption = 0,
    memory: MemoryOption = None,
    listen: ListenOption = None,
    threads: ThreadsOption = None,
    streams: StreamsOption = 16,
    name: NameOption = "",
    interface: InterfaceOption = None,
    discovery: DiscoveryOption = True,
    serve: ServeOption = None,
    chaos: ChaosOption = False,
    device: DeviceOption = "cpu",
    batch_invariant: BatchInvariantOption = False,
    own_layers: OwnLayersOption = None,
    api: ApiOption = None,
    allow_host: AllowHostOption = None,
    allow_origin: AllowOriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join a swarm with an invite, take a share of its layers, and stay; Ctrl-C ends it, `potluck up` brings it back.

    Arguments show in the machine's process list: where others use it too, type `potluck join` and paste the invite when asked.
    """
    from potluck.node.machine import computing_threads

    threads = threads or computing_threads()
    options = SwarmOptions(
        None, None, max_layers, memory, listen, threads, streams, name, tuple(interface or ()), discovery, is_serving(serve),
        chaos, device, batch_invariant, api_options(api, allow_host, allow_origin), as_json, own_layers,
    )  # fmt: skip
    run_swarm_node(options, read_invite(invite or ()))


def invite(
    trust: Annotated[str, typer.Option("--trust", help="trusted: serves layers; member: only asks.")] = "trusted",
    expires: Annotated[str, typer.Option("--expires", help="How long it is good: 30m, 12h, 7d.")] = "24h",
    uses: Annotated[int, typer.Option("--uses", min=1, max=1000, help="For how many machines.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Print one line to paste on another machine, which brings it into this swarm."""
    from potluck.trust.invites import encode_invite

    level = _trust_level(trust)
    now_s, good_s = time.time(), _duration_s(expires)
    addresses = running_node().addresses
    made = _keeper().invite(level, uses, int(now_s) + good_s, addresses, now_s)
    text = encode_invite(made)
    if as_json:
        return print_json({"invite": text, "command": f"potluck join {text}", "expires_at": int(now_s) + good_s})
    print(f"potluck join {text}")
    until = time.strftime("%a %d %b %H:%M", time.localtime(now_s + good_s))
    notice(f"good for {uses} machine{'s' if uses > 1 else ''}, until {until}")
    notice("where other people use that machine too: type `potluck join` alone, and paste this line when asked")
    return None


def members(as_json: JsonOption = False) -> None:
    """List who belongs to this swarm."""
    keeper = _keeper()
    roster = keeper.roster
    names = _names()
    rows: list[dict[str, Any]] = [
        {
            "id": member.node.hex(), "name": names.get(member.node.hex(), ""), "trust": str(member.trust),
            "may_invite": member.may_invite, "may_expel": member.may_expel, "is_founder": member.node == roster.founder,
        }
        for member in roster.members()
    ]  # fmt: skip
    if as_json:
        return print_json(
            {"swarm": roster.swarm.hex(), "members": rows, "expelled": [n.hex() for n in roster.expelled()]}
        )
    header = ("ID", "NAME", "TRUST", "RIGHTS")
    print(format_table(header, [(row["id"][:8], row["name"], row["trust"], _rights(row)) for row in rows]))
    return None


def expel(
    member: Annotated[str, typer.Argument(metavar="ID", help="The first characters of an id in `potluck members`.")],
    as_json: JsonOption = False,
) -> None:
    """Throw a member out: its links close, and it is refused everywhere."""
    keeper = _keeper()
    node = _member(keeper, member)
    keeper.expel(node)
    if as_json:
        return print_json({"expelled": node.hex()})
    print(f"{node.hex()[:8]} is expelled; the others learn of it now")
    return None


def entrust(
    member: Annotated[str, typer.Argument(metavar="ID", help="The first characters of an id in `potluck members`.")],
    trust: Annotated[str | None, typer.Option("--trust", help="trusted: serves layers; member: only asks.")] = None,
    may_invite: Annotated[
        bool | None, typer.Option("--may-invite/--may-not-invite", help="Whether it invites others.")
    ] = None,
    may_expel: Annotated[
        bool | None, typer.Option("--may-expel/--may-not-expel", help="Whether it expels others.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a member may do: how far it is trusted, and whether it invites and expels in the founder's place.

    What is not named stays as it is.
    """
    keeper = _keeper()
    held = keeper.roster.member(_member(keeper, member))
    assert held is not None
    if trust is None and may_invite is None and may_expel is None:
        raise BadRequest(
            "say what is to change: --trust, --may-invite or --may-not-invite, --may-expel or --may-not-expel"
        )
    changed = held._replace(
        trust=held.trust if trust is None else _trust_level(trust),
        may_invite=held.may_invite if may_invite is None else may_invite,
        may_expel=held.may_expel if may_expel is None else may_expel,
    )
    keeper.admit(changed.node, changed.trust, changed.may_invite, changed.may_expel)
    if as_json:
        return print_json(
            {
                "id": changed.node.hex(), "trust": str(changed.trust), "may_invite": changed.may_invite,
                "may_expel": changed.may_expel,
            }
        )  # fmt: skip
    print(f"{changed.node.hex()[:8]} is {changed.trust}, {_may(changed)}; the others learn of it now")
    return None


def _may(member: "Member") -> str:
    rights = [word for is_given, word in ((member.may_invite, "invite"), (member.may_expel, "expel")) if is_given]
    return f"may {' and '.join(rights)}" if rights else "may neither invite nor expel"


def withdraw(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As `potluck plan` names it.")],
    as_json: JsonOption = False,
) -> None:
    """Have the swarm serve a model no longer; `potluck up --model` brings it back."""
    keeper = _keeper()
    served = {each.subject: each for each in keeper.roster.models()}
    if model not in served:
        raise BadRequest(f"this swarm serves {', '.join(served) or 'no model'}, not {model}")
    keeper.serve_model(model, served[model].weights_sha256, is_served=False)
    if as_json:
        return print_json({"withdrawn": model})
    print(f"{model} is withdrawn; its layers are given up as the answers that use them end")
    return None


def plan(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show; this is what it always does.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which machine should hold which layers, how fast that should be, and why."""
    details = call("GET", "/potluck/details")
    if as_json:
        return print_json({"plans": details["plans"]})
    names = {node["id"]: node["name"] for node in details["state"]["nodes"]}
    for each in details["plans"]:
        _print_plan(each, names)
    if not details["plans"]:
        notice(f"this swarm serves no model yet; type: {RESTART} --model NAME")
    return None


def _print_plan(each: dict[str, Any], names: dict[str, str]) -> None:
    if each["problem"]:
        notice(each["problem"])
    if each["tokens_per_s"] is None:
        return
    print(
        f"{each['model']}: about {each['tokens_per_s']:.1f} tokens/s for one answer, "
        f"{each['throughput_per_s']:.1f} for many ({each['objective']})"
    )
    rows = [
        (
            row["node"][:8], names.get(row["node"], ""), row["layers"] or "none", "stand-in" if row["is_replica"] else "",
            shown_bytes(row["bytes"]), row["reason"],
        )
        for row in each["assignments"]
    ]  # fmt: skip
    print(format_table(("NODE", "NAME", "LAYERS", "ROLE", "LOADS", "WHY"), rows))


def leave(
    patience: Annotated[float, typer.Option("--patience", min=0, max=3600, help="Seconds to wait for others.")] = 60.0,
    forget: Annotated[
        bool, typer.Option("--forget", help="Also forget the swarm: coming back needs an invite.")
    ] = False,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="With --forget: also take a new identity, as an expelled node needs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """End this machine's node in good order: others take its layers first, and answers that run are not broken."""
    from potluck.node.identity_file import forget_own_peers, own_run_file, own_swarm_file, retire_own_key

    if new_key and not forget:
        raise BadRequest("--new-key goes with --forget: the swarm knows this machine by its key")
    is_drained = True
    if own_run_file().read() is not None:
        is_drained = call("POST", "/potluck/leave", {"patience_s": patience}, patience + 10)["drained"]
        if forget:
            has_ended()  # at its end a node writes down whom it knows
    elif not forget:
        running_node()  # says that there is none
    if forget:
        own_swarm_file().remove()
        forget_own_peers()
    if new_key:
        retire_own_key()
    if as_json:
        return print_json({"drained": is_drained, "forgotten": forget})
    print("left" if is_drained else "left; nobody else has all of its layers now")
    return None


def _keeper() -> "SwarmKeeper":
    from potluck.node.identity_file import own_key, own_swarm_file
    from potluck.trust.keeper import SwarmKeeper

    if own_swarm_file().read() is None:
        raise BadRequest("this machine belongs to no swarm; `potluck up` founds one, `potluck join INVITE` joins one")
    return SwarmKeeper(own_key(), own_swarm_file())


def _member(keeper: "SwarmKeeper", beginning: str) -> bytes:
    if not beginning.strip():
        raise BadRequest("say whom: the first characters of an id that `potluck members` lists")
    found = [each.node for each in keeper.roster.members() if each.node.hex().startswith(beginning.lower())]
    if len(found) != 1:
        raise BadRequest(f"{len(found) or 'no'} members begin with {beginning}; `potluck members` lists them")
    return found[0]


def _trust_level(text: str) -> "Trust":
    from potluck.trust.records import Trust

    try:
        return Trust(text)
    except ValueError:
        raise BadRequest(f"--trust is one of {', '.join(Trust)}, not {text}") from None


def _names() -> dict[str, str]:
    from potluck.node.identity_file import own_run_file

    running = own_run_file().read()
    if running is None or not running.api:
        return {}
    return {member["id"]: member["name"] for member in call("GET", "/potluck/details")["members"]}


def _rights(row: dict[str, Any]) -> str:
    rights = [word for key, word in (("may_invite", "invite"), ("may_expel", "expel")) if row[key]]
    return "founder" if row["is_founder"] else ", ".join(rights)


def _duration_s(text: str) -> int:
    units = {"m": 60, "h": 3600, "d": 86_400}
    number, unit = text[:-1], text[-1:]
    if (
        unit not in units
        or not number.isascii()
        or not number.isdigit()
        or not 0 < int(number) * units[unit] <= 365 * 86_400
    ):
        raise BadRequest(f"--expires is a time like 30m, 12h or 7d, up to a year, not {text}")
    return int(number) * units[unit]
