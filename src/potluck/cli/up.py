"""`potluck up`: serve some layers of a model to other machines until told to stop."""

import asyncio
import gc
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.ask import find_model
from potluck.cli.console import JsonOption, notice, print_json
from potluck.cli.models import open_store
from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from potluck.gateway.server import GatewayServer
    from potluck.node.node import Node
    from potluck.shard.server import ShardServer

DEFAULT_PORT = 7475


DEFAULT_API = "127.0.0.1:7470"


@dataclass(frozen=True)
class ApiOptions:
    """Where the API is served; `is_chosen`: the user named the place, so not getting it is an error."""

    address: str
    is_chosen: bool
    hosts: tuple[str, ...]
    origins: tuple[str, ...]


@dataclass(frozen=True)
class UpOptions:
    model: str | None
    layers: str | None
    listen: str
    threads: int
    streams: int
    is_spare: bool
    metrics: str | None
    via: tuple[str, ...]
    serves: bool
    api: ApiOptions | None
    as_json: bool


def up(
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model of `potluck models`.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", "-l", help="0-14, 15-output, …; default: all.")] = None,
    listen: Annotated[
        str, typer.Option("--listen", help="Address to serve at; port 0: any.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, help="Threads that compute.")] = 1,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Sessions at once; more are refused.")] = 16,
    spare: Annotated[bool, typer.Option("--spare", help="Be used only where other holders fail.")] = False,
    metrics: Annotated[str | None, typer.Option("--metrics", help="Address of a Prometheus page.")] = None,
    via: Annotated[str | None, typer.Option("--via", help="ADDR,ADDR,…: other nodes that answers may use.")] = None,
    serve: Annotated[bool, typer.Option(help="Hold layers; without, only the API is served.")] = True,
    api: Annotated[
        str | None,
        typer.Option("--api", help=f"Address of the HTTP API ({DEFAULT_API}); off: none. An open one asks for a key."),
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option("--allow-host", help="A name of this machine.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option("--allow-origin", help="A site that may ask.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a range of layers, and the API; Ctrl-C ends it."""
    from potluck.net.loop import run

    chosen = ApiOptions(api or DEFAULT_API, api is not None, tuple(allow_host or ()), tuple(allow_origin or ()))
    others = tuple(address.strip() for address in via.split(",")) if via else ()
    if not serve and (api == "off" or not others):
        raise BadRequest("with --no-serve there must be --via ADDR,… and an API: nothing else is left to do")
    options = UpOptions(
        model,
        layers,
        listen,
        threads,
        streams,
        spare,
        metrics,
        others,
        serve,
        None if api == "off" else chosen,
        as_json,
    )
    run(_serve(options))


async def _serve(options: UpOptions) -> None:
    from potluck.net.link import admit_anyone
    from potluck.net.tls import TlsTransport
    from potluck.node.identity_file import own_key
    from potluck.node.node import Node
    from potluck.telemetry.page import MetricsPage

    key = own_key()
    node = Node(key, TlsTransport(key, admit_anyone))
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    page = MetricsPage(node.metrics_page)
    gateway: GatewayServer | None = None
    try:
        shard = _add_shard(node, options) if options.serves else None
        if shard is not None and not await _loaded(shard, stopped):
            return
        if options.metrics is not None:
            notice(f"metrics at http://{await page.start(options.metrics)}/metrics")
        if options.via:
            await node.orchestrator.connect(options.via)
        # What exists now stays: the collector need not look at it again while tokens are waiting.
        gc.collect()
        gc.freeze()
        address = await node.listen(options.listen) if shard is not None else None
        gateway = await _start_api(node, options.api) if options.api is not None else None
        _announce(node, shard, address, gateway, options.as_json)
        await stopped.wait()
    finally:
        if gateway is not None:
            await gateway.stop()
        await page.close()
        await node.stop()


def _add_shard(node: "Node", options: UpOptions) -> "ShardServer":
    from potluck.node.configuration_file import read_configuration
    from potluck.node.serving import ServingSettings, parse_stage, read_stored_model, serve

    store = open_store()
    stored = read_stored_model(store, find_model(store, options.model).id)
    settings = ServingSettings(
        threads=options.threads,
        max_concurrent_streams=options.streams,
        is_spare=options.is_spare,
        eviction_idle_s=read_configuration().host.shard_eviction_idle_seconds,
    )
    return serve(node, stored, parse_stage(options.layers, stored.facts.layer_count), settings)


async def _loaded(shard: "ShardServer", stopped: asyncio.Event) -> bool:
    """Whether the layers are there; false where Ctrl-C came first. Raises where they cannot be loaded."""
    loading = asyncio.ensure_future(shard.start())
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stopped.is_set():
        loading.cancel()
        return False
    loading.result()
    return True


async def _start_api(node: "Node", api: ApiOptions) -> "GatewayServer | None":
    from potluck.core.paths import locate_folders
    from potluck.gateway.server import GatewaySettings
    from potluck.node.answering import NodeAnswering, start_gateway

    settings = GatewaySettings(
        address=api.address,
        key_file=locate_folders().models.parent / "api-keys",
        allowed_hosts=frozenset(api.hosts),
        allowed_origins=frozenset(api.origins),
    )
    try:
        gateway = await start_gateway(node, NodeAnswering(node), settings)
    except OSError as error:
        if api.is_chosen:
            raise
        notice(f"no API: {api.address} cannot be had ({error.strerror}); choose another place with --api ADDR")
        return None
    if gateway.new_key is not None:
        notice(f"API key (made now, kept in {settings.key_file}): {gateway.new_key}")
    return gateway


def _announce(
    node: "Node", shard: "ShardServer | None", address: str | None, gateway: "GatewayServer | None", as_json: bool
) -> None:
    import os

    shard_id = "" if shard is None else shard.shard_id
    worker_pid = 0 if shard is None else shard.supervisor.pid or 0
    api = "" if gateway is None else gateway.address
    if as_json:
        return print_json(
            {
                "shard": shard_id, "address": address or "", "node": node.id.hex(), "daemon_pid": os.getpid(),
                "worker_pid": worker_pid, "api": api,
            }
        )  # fmt: skip
    if shard is not None:
        shown = f"serving {shard_id} at {address} (node {node.id.hex()[:8]})"
        notice(f'{shown}; ask with: potluck ask --via {address} "..."')
    if gateway is not None:
        notice(f"API at {gateway.url}/v1 (OpenAI), {gateway.url} (Anthropic, Ollama)")
