"""`potluck up`: serve some layers of a model to other machines until told to stop."""

import asyncio
import gc
import signal
from typing import Annotated

import typer

from potluck.cli.ask import find_model
from potluck.cli.console import JsonOption, notice, print_json
from potluck.cli.models import open_store

DEFAULT_PORT = 7475


def up(
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model of `potluck models`.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", "-l", help="0-14, 15-output, …; default: all.")] = None,
    listen: Annotated[
        str, typer.Option("--listen", help="Address to serve at; port 0: any.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, help="Threads that compute.")] = 1,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Sessions at once; more are refused.")] = 16,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    spare: Annotated[bool, typer.Option("--spare", help="Be used only where other holders fail.")] = False,
    metrics: Annotated[str | None, typer.Option("--metrics", help="Address of a Prometheus page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a range of layers; Ctrl-C ends it."""
    from potluck.net.loop import run

    run(_serve(model, layers, listen, threads, streams, device, spare, metrics, as_json))


async def _serve(
    model: str | None, layers: str | None, listen: str, threads: int, streams: int, device: str, is_spare: bool,
    metrics: str | None, as_json: bool,
) -> None:  # fmt: skip
    from potluck.net.tls import TlsTransport
    from potluck.node.configuration_file import read_configuration
    from potluck.node.identity_file import own_key
    from potluck.node.node import Node
    from potluck.node.serving import ServingSettings, parse_stage, random_model, read_stored_model, serve
    from potluck.telemetry.page import MetricsPage
    from potluck.weights.random_checkpoint import is_random

    if model is not None and is_random(model):
        stored = random_model(model)
    else:
        store = open_store()
        stored = read_stored_model(store, find_model(store, model).id)
    stage = parse_stage(layers, stored.facts.layer_count)
    key = own_key()
    node = Node(key, TlsTransport(key, lambda node: None))
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        server = serve(
            node,
            stored,
            stage,
            ServingSettings(
                threads=threads,
                max_concurrent_streams=streams,
                is_spare=is_spare,
                device=device,
                eviction_idle_s=read_configuration().host.shard_eviction_idle_seconds,
            ),
        )
        loading = asyncio.ensure_future(server.start())
        stopping = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        page = MetricsPage(node.metrics_page)
        if not stopped.is_set():
            loading.result()  # raises where the layers cannot be loaded
            if metrics is not None:
                notice(f"metrics at http://{await page.start(metrics)}/metrics")
            # What exists now stays: the collector need not look at it again while tokens are waiting.
            gc.collect()
            gc.freeze()
            address = await node.listen(listen)
            _announce(server.shard_id, address, node.id, server.supervisor.pid or 0, as_json)
            await stopping
        await page.close()
        loading.cancel()
        stopping.cancel()
    finally:
        await node.stop()


def _announce(shard_id: str, address: str, node: bytes, worker_pid: int, as_json: bool) -> None:
    import os

    if as_json:
        return print_json(
            {
                "shard": shard_id,
                "address": address,
                "node": node.hex(),
                "daemon_pid": os.getpid(),
                "worker_pid": worker_pid,
            }
        )
    notice(f'serving {shard_id} at {address} (node {node.hex()[:8]}); ask with: potluck ask --via {address} "..."')
