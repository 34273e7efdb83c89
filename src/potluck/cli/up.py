"""`potluck up`: serve some layers of a model to other machines until told to stop."""

import asyncio
import gc
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.api_options import (
    AllowHostOption,
    AllowOriginOption,
    ApiOption,
    ApiOptions,
    api_options,
    gateway_settings,
    started,
)
from potluck.cli.ask import find_model
from potluck.cli.chat_params import api_params, configure_orchestrator, own_layers_of, require_own_layers_fit
from potluck.cli.console import JsonOption, notice, print_json
from potluck.cli.models import open_store
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
    refuse_idle,
)
from potluck.cli.swarm_up import SwarmOptions, run_swarm_node
from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from potluck.gateway.server import GatewayServer
    from potluck.node.node import Node
    from potluck.shard.server import ShardServer

DEFAULT_PORT = 7475
_HOLDER_WAIT_S = 5.0  # nobody here loads what was lost; it comes back soon, or not at all


@dataclass(frozen=True)
class UpOptions:
    model: str | None
    layers: str | None
    listen: str
    threads: int
    streams: int
    device: str
    is_batch_invariant: bool
    memory: str | None
    is_spare: bool
    metrics: str | None
    via: tuple[str, ...]
    serves: bool
    api: ApiOptions | None
    as_json: bool
    own_layers: str | None = None


def up(
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model of `potluck models`.")] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", "-l", help="Exactly these (0-14, 15-output, …); without a swarm: for `ask --via`."),
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
    spare: Annotated[bool, typer.Option("--spare", help="With --layers: be used only where others fail.")] = False,
    metrics: Annotated[str | None, typer.Option("--metrics", help="With --layers: a Prometheus page.")] = None,
    via: Annotated[str | None, typer.Option("--via", help="ADDR,ADDR,…: use these nodes, without a swarm.")] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open", help="With --layers: serve anybody who can reach the address.")
    ] = False,
    api: ApiOption = None,
    allow_host: AllowHostOption = None,
    allow_origin: AllowOriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring this machine into its swarm (a new one the first time), and serve the API and the page; Ctrl-C ends it."""
    from potluck.net.loop import run
    from potluck.node.identity_file import own_swarm_file
    from potluck.node.machine import computing_threads

    threads = threads or computing_threads()
    chosen = api_options(api, allow_host, allow_origin)
    others = tuple(address.strip() for address in via.split(",")) if via else ()
    serves = is_serving(serve)
    if layers is not None and not serves:
        refusal = "the configuration says serve_shards = false; say --serve too" if serve is None else "--no-serve"
        raise BadRequest(f"--layers says which layers to hold, against {refusal}, or leave out --layers")
    is_explicit = bool(others) or (layers is not None and own_swarm_file().read() is None)
    if not is_explicit:
        if spare or metrics:
            raise BadRequest("--spare and --metrics go with --layers and explicit addresses; a swarm sees to both")
        if open_to_all:
            raise BadRequest("--open goes with --layers where there is no swarm; in a swarm only members get in")
        swarm_options = SwarmOptions(
            model, layers, max_layers, memory, listen, threads, streams, name, tuple(interface or ()), discovery, serves, chaos,
            device, batch_invariant, chosen, as_json, own_layers,
        )  # fmt: skip
        return run_swarm_node(swarm_options)
    idle = {
        "--max-layers": max_layers, "--name": name, "--interface": interface, "--no-discovery": not discovery, "--chaos": chaos,
    }  # fmt: skip
    refuse_idle(idle, "it is for a node of a swarm, which --via, or --layers where there is no swarm, does not make")
    if not serves and (chosen is None or not others):
        raise BadRequest("without serving there must be --via ADDR,… and an API: nothing else is left to do")
    address = listen or f"127.0.0.1:{DEFAULT_PORT}"
    if serves:
        _require_loopback(address, open_to_all)
    options = UpOptions(
        model, layers, address, threads, streams, device, batch_invariant, memory, spare, metrics, others, serves, chosen,
        as_json, own_layers,
    )  # fmt: skip
    return run(_serve(options))


def _require_loopback(address: str, is_open: bool) -> None:
    from potluck.gateway.api_keys import is_loopback
    from potluck.net.addresses import parse_address

    if not is_open and not is_loopback(parse_address(address)[0]):
        raise BadRequest(
            f"without a swarm anybody who reaches {address} could use this machine; "
            "leave out --layers (then only members get in), or say --open"
        )


async def _serve(options: UpOptions) -> None:
    from potluck.net.link import admit_anyone
    from potluck.net.tls import TlsTransport
    from potluck.node.configuration_file import require_enabled
    from potluck.node.identity_file import own_key
    from potluck.node.node import Node
    from potluck.telemetry.page import MetricsPage

    require_enabled()
    require_own_layers_fit(options.own_layers, _layer_counts(options.model))
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
        gateway = await _start_api(node, options.api, options) if options.api is not None else None
        _announce(node, shard, address, gateway, options.as_json)
        await stopped.wait()
    finally:
        if gateway is not None:
            await gateway.stop()
        await page.close()
        await node.stop()


def _layer_counts(model: str | None) -> list[int]:
    return [entry.layer_count for entry in open_store().list() if model in (None, entry.id)]


def _add_shard(node: "Node", options: UpOptions) -> "ShardServer":
    from potluck.node.configuration_file import read_configuration
    from potluck.node.machine import parse_size
    from potluck.node.serving import (
        ServingSettings,
        parse_stage,
        random_model,
        read_stored_model,
        serve,
        within_memory,
    )
    from potluck.weights.random_checkpoint import is_random

    if options.model is not None and is_random(options.model):
        stored = random_model(options.model)
    else:
        store = open_store()
        stored = read_stored_model(store, find_model(store, options.model).id)
    host = read_configuration().host
    budget = parse_size(options.memory) if options.memory else host.shard_max_vram_mb * 1_000_000
    settings = ServingSettings(
        threads=options.threads,
        device=options.device,
        is_batch_invariant=options.is_batch_invariant,
        device_budget_bytes=budget,
        max_concurrent_streams=options.streams,
        is_spare=options.is_spare,
        eviction_idle_s=host.shard_eviction_idle_seconds,
    )
    stage = parse_stage(options.layers, stored.facts.layer_count)
    if options.device == "cpu":  # a GPU's worker looks after its own budget
        settings = within_memory(stored, stage, settings, budget)
    return serve(node, stored, stage, settings)


async def _loaded(shard: "ShardServer", stopped: asyncio.Event) -> bool:
    """Whether the layers are there; false where Ctrl-C came first. Raises where they cannot be loaded."""
    from potluck.node import serving

    loading = asyncio.ensure_future(serving.started(shard))
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stopped.is_set():
        loading.cancel()
        return False
    loading.result()
    return True


async def _start_api(node: "Node", api: ApiOptions, options: UpOptions) -> "GatewayServer | None":
    from potluck.gateway.server import GatewayServer
    from potluck.node.answering import NodeAnswering

    settings = configure_orchestrator(node.orchestrator, gateway_settings(api))
    own = own_layers_of(options.own_layers, open_store(), options.threads)
    gateway = GatewayServer(NodeAnswering(node, api_params(_HOLDER_WAIT_S), own), settings)
    return gateway if await started(gateway, api) else None


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
