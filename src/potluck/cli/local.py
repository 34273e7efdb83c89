"""`potluck local`: several real nodes on this machine, for trying things out; and what nodes say of themselves (`status --via`)."""

import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.api_options import DEFAULT_API, free_place
from potluck.cli.ask import find_or_pull
from potluck.cli.console import JsonOption, counted, format_table, notice, print_json
from potluck.cli.models import open_store
from potluck.cli.node_options import MOST_THREADS
from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from potluck.wire.messages import Described

_NAMES = ("kitchen", "anna", "ben", "attic", "garage", "grandma", "clara", "david")


def local(
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=16, help="How many.")] = 3,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model of `potluck models`.")] = None,
    spare: Annotated[
        bool | None,
        typer.Option(
            "--spare/--no-spare", help="Let the last node hold everything, in case another fails (the default)."
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, max=MOST_THREADS, help="For each node.")] = 1,
    api: Annotated[
        str | None,
        typer.Option(
            "--api", help=f"Address of the HTTP API ({DEFAULT_API}, or any port where that is taken); off: none."
        ),
    ] = None,
    swarm: Annotated[
        bool, typer.Option("--swarm", help="As members of one swarm, with the page and its chaos button.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start several real nodes on loopback; Ctrl-C ends them all."""
    from potluck.node.configuration_file import require_enabled
    from potluck.testing.local_swarm import LocalSwarm, split_plan

    if swarm and api == "off":
        raise BadRequest("--swarm is there for its page, which needs an address; leave out --api off")
    if swarm and spare is False:
        raise BadRequest("--no-spare goes without --swarm: in a swarm the last node may hold everything")
    if spare and not swarm and nodes < 3:
        raise BadRequest("--spare needs three nodes or more: two that share the layers, and one that holds them all")
    require_enabled()
    entry = find_or_pull(open_store(), model, as_json)
    place = api or free_place()
    if swarm:
        return run_local_swarm(entry.id, entry.layer_count, nodes, threads, place, as_json)
    spares = 1 if spare is not False and nodes > 2 else 0
    _end_at_once_when_told()
    notice(f"starting {counted(nodes, 'node')} (the first start compiles kernels)")
    with LocalSwarm(entry.id, split_plan(entry.layer_count, nodes - spares, spares, threads)) as started:
        announcements = [node.announcement for node in started.nodes]
        url = "" if place == "off" else started.start_api(place).url
        if as_json:
            print_json({"nodes": announcements, "api": url})
        else:
            for shown in announcements:
                assert shown is not None
                print(f"{shown.shard:24} at {shown.address}  daemon {shown.daemon_pid}  worker {shown.worker_pid}")
            notice(f'ask with: potluck ask --via {",".join(started.addresses)} "..."')
            if url:
                notice(
                    f"API at {url}/v1 (OpenAI), {url} (Anthropic, Ollama); talk to it with: potluck chat --url {url}"
                )
        _wait_until_told()
    return None


def _end_at_once_when_told() -> None:
    """While nodes start: whoever owns them ends them on the way out."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _wait_until_told() -> None:
    """From here on a second Ctrl-C does not cut short the farewell of the nodes."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()


def run_local_swarm(model: str, layer_count: int, nodes: int, threads: int, api: str, as_json: bool) -> None:
    """One founds a swarm, the others join it and fetch their layers; none but the last may hold more than it must."""
    import tempfile
    from pathlib import Path

    from potluck.core.paths import locate_folders
    from potluck.testing.real_swarm import RealSwarm

    _end_at_once_when_told()
    notice(f"starting {counted(nodes, 'node')} (the first start compiles kernels)")
    folders = locate_folders()
    share = -(-layer_count // max(1, nodes - 1)) + 1
    common = ["--listen", "127.0.0.1:0", "--chaos", "--no-discovery", "--threads", str(threads)]
    with tempfile.TemporaryDirectory(prefix="potluck-local-") as folder:
        swarm = RealSwarm(Path(folder), folders.models, folders.cache, model)
        try:
            first = swarm.up(_name(0), *common, "--max-layers", str(share), api=api)
            for place in range(1, nodes):
                limit = ["--max-layers", str(share)] if place < nodes - 1 else []
                swarm.join(_name(place), first.command("invite")["invite"], *common, *limit)
                notice(f"{_name(place)} joined")
            first.wait(first.can_answer, 180)
            url = f"http://{first.wait_until_up()['api']}"
            if as_json:
                print_json({"api": url, "nodes": [node.wait_until_up() for node in swarm.nodes]})
            else:
                print(f"open {url}/ : ask something, then press “Kill a shard” while the answer is being written")
                print(f"OpenAI clients: {url}/v1   at the terminal: potluck chat --url {url}")
                print(
                    f"other commands, as from the first machine: POTLUCK_HOME={folder}/{_name(0)} potluck status (top, trace, …)"
                )
                print("Ctrl-C ends everything")
            _wait_until_told()
        finally:
            swarm.close()


def _name(place: int) -> str:
    again, number = divmod(place, len(_NAMES))
    return f"{_NAMES[number]}-{again + 1}" if again else _NAMES[number]


def status_via(via: str, as_json: bool) -> None:
    """What these nodes serve: layers, processes, sessions, load."""
    from potluck.net.loop import run

    answers = run(_describe([address.strip() for address in via.split(",")]))
    if as_json:
        return print_json({"nodes": [_row(address, answer) for address, answer in answers]})
    header = ("NODE", "ADDRESS", "SHARD", "STATE", "SESSIONS", "QUEUE", "MS/TOKEN", "DAEMON", "WORKER")
    rows = []
    for address, answer in answers:
        for info, worker in zip(answer.shards, answer.worker_pids, strict=True):
            stage = f"{info.model}:{info.stage.start}-{info.stage.stop - 1}"
            state = ("spare" if info.is_spare else "serving") if info.is_loaded else "loadable"
            rows.append(
                (answer.node.hex()[:8], address, stage, state, f"{info.streams}/{info.max_streams}", str(info.queue_depth),
                 f"{info.step_us / 1000:.1f}", str(answer.daemon_pid), str(worker))
            )  # fmt: skip
    print(format_table(header, rows))
    return None


async def _describe(addresses: list[str]) -> "list[tuple[str, Described]]":
    from potluck.identity.keys import NodeKey
    from potluck.net.link import admit_anyone
    from potluck.net.tls import TlsTransport
    from potluck.node.node import Node

    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        await node.orchestrator.connect(addresses)
        return node.orchestrator.store.offers()
    finally:
        await node.stop()


def _row(address: str, answer: "Described") -> dict[str, object]:
    return {
        "node": answer.node.hex(),
        "address": address,
        "version": answer.version,
        "daemon_pid": answer.daemon_pid,
        "shards": [
            {
                "shard_id": f"{info.model}:{info.stage.start}-{info.stage.stop - 1}",
                "weights_sha256": info.weights_sha256,
                "worker_pid": worker,
                "is_loaded": info.is_loaded,
                "is_spare": info.is_spare,
                "sessions": info.streams,
                "max_concurrent_streams": info.max_streams,
                "queue_depth": info.queue_depth,
                "step_us": info.step_us,
            }
            for info, worker in zip(answer.shards, answer.worker_pids, strict=True)
        ],
    }
