"""Running a node of a swarm in the foreground: what `potluck up` (without explicit addresses) and `potluck join` have in common."""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from potluck.cli.api_options import ApiOptions
from potluck.cli.chat_params import api_params, configure_orchestrator, own_layers_of, require_own_layers_fit
from potluck.cli.console import make_progress, notice, one_line, print_json
from potluck.cli.models import open_store
from potluck.core.errors import BadRequest, PeerRefused, PotluckError

if TYPE_CHECKING:
    from potluck.core.device_facts import DeviceFacts
    from potluck.gateway.server import GatewayServer
    from potluck.identity.keys import NodeKey
    from potluck.node.administration import NodeAdministration
    from potluck.node.run_file import RunningNode
    from potluck.node.swarm_node import SwarmNode, SwarmNodeSettings
    from potluck.trust.invites import Invite
    from potluck.trust.keeper import SwarmKeeper
    from potluck.weights.store import ModelEntry, ModelStore

_HOLDER_WAIT_S = 60.0
DEFAULT_SWARM_LISTEN = "0.0.0.0:7475"


@dataclass(frozen=True)
class SwarmOptions:
    """`layers`: exactly these, or none. `memory`: at most so much for weights and KV."""

    model: str | None
    layers: str | None
    max_layers: int
    memory: str | None
    listen: str | None
    threads: int
    streams: int
    name: str
    interfaces: tuple[str, ...]
    uses_discovery: bool
    serves: bool
    has_chaos: bool
    device: str
    is_batch_invariant: bool
    api: ApiOptions | None
    as_json: bool
    own_layers: str | None = None  # of every answer that this node's API gives


def run_swarm_node(options: SwarmOptions, invite: "Invite | None" = None) -> None:
    from potluck.net.loop import run
    from potluck.node.configuration_file import require_enabled
    from potluck.node.identity_file import own_key, own_run_file

    began_s = time.monotonic()
    require_enabled()
    with own_run_file().held():  # before anything is founded or redeemed: two nodes of one home would be one twice
        key, store = own_key(), open_store()
        # Before there is a loop, which would hear Ctrl-C only when the download is over.
        keeper = _own_swarm(key, store, options) if invite is None else None

        async def session() -> None:
            own = keeper if invite is None else await _redeem(key, invite)
            assert own is not None
            await _Session(options, key, own, store, began_s, is_newcomer=invite is not None).run()

        run(session())


def _own_swarm(key: "NodeKey", store: "ModelStore", options: SwarmOptions) -> "SwarmKeeper":
    """The swarm that this node belongs to, or a new one of which it is the founder; with a model to serve."""
    from potluck.node.identity_file import forget_own_peers, own_swarm_file
    from potluck.trust.keeper import SwarmKeeper

    file = own_swarm_file()
    is_new = file.read() is None
    # Before the founding: a wrong name or an interrupted download must not leave a swarm behind that serves nothing.
    wanted = _wanted_model(store, options) if options.model is not None or (is_new and options.serves) else None
    keeper = SwarmKeeper.found(key, file, options.name) if is_new else SwarmKeeper(key, file)
    if is_new:
        forget_own_peers()
        notice(f"founded a swarm ({keeper.roster.swarm.hex()[:8]})")
    if wanted is None and options.serves:
        _require_sound(store, [model.weights_sha256 for model in keeper.roster.models()])
    if wanted is not None:
        # Of several names for the same weights the first counts: a second one would rename the model for everybody.
        names = {model.weights_sha256: model.subject for model in reversed(keeper.roster.models())}
        if (name := names.get(wanted.weights_sha256)) is None:
            keeper.serve_model(wanted.id, wanted.weights_sha256, streams=4)
        elif name != wanted.id:
            notice(f"this swarm serves {wanted.id} as {name}; ask for it by that name")
    return keeper


def _wanted_model(store: "ModelStore", options: SwarmOptions) -> "ModelEntry":
    """The model that was named; else one of the store, where the default is brought if there is none. Raises where it is damaged."""
    from potluck.cli.ask import find_or_pull
    from potluck.node.serving import read_stored_model

    entry = find_or_pull(store, options.model, options.as_json)
    read_stored_model(store, entry.id)
    return entry


def _require_sound(store: "ModelStore", served: Sequence[str]) -> None:
    """Raises what is wrong with the swarm's models here where none of them is sound: this node could serve nothing."""
    from potluck.node.serving import read_stored_model

    found = [entry for weights in served if (entry := store.find_weights(weights)) is not None]
    problem: PotluckError | None = None
    for entry in found:
        try:
            read_stored_model(store, entry.id)
            return
        except PotluckError as error:
            problem = problem or error
    if problem is not None:
        raise problem


async def _redeem(key: "NodeKey", invite: "Invite") -> "SwarmKeeper":
    """Shows the invite to its issuer; from then on this node is a member."""
    from potluck.node.identity_file import forget_own_peers, own_swarm_file
    from potluck.trust.keeper import SwarmKeeper

    file = own_swarm_file()
    stored = file.read()
    if stored is not None:
        if stored.swarm == invite.swarm:
            notice("this node belongs to that swarm already")
            return SwarmKeeper(key, file)
        raise BadRequest("this node belongs to another swarm; `potluck leave --forget` ends that first")
    await _show_invite(key, invite)
    forget_own_peers()
    return SwarmKeeper.join(key, file, invite)


async def _show_invite(key: "NodeKey", invite: "Invite") -> None:
    from potluck.net.peers import DIAL_TIMEOUT_S
    from potluck.net.tls import TlsTransport

    transport = TlsTransport(key, lambda node, ticket: "joining")
    problems = []
    for address in invite.addresses:
        try:
            link = await transport.dial(address, invite.issuer, _Silent(), DIAL_TIMEOUT_S, invite.ticket)
        except PeerRefused as refusal:
            advice = "ask for a new one (potluck invite)"
            if refusal.reason == "expelled":
                advice = "this machine's key was expelled; for another one: potluck leave --forget --new-key"
            raise BadRequest(f"the invite was refused: {refusal.reason}; {advice}") from None
        except (PotluckError, OSError) as error:
            problems.append(f"{address}: {error}")
            continue
        link.close()
        return
    raise BadRequest(
        f"whoever invited you cannot be reached ({'; '.join(problems)}); is its node up, on the same network?"
    )


class _Silent:
    """A link that is only there to be admitted."""

    def on_message(self, link: object, message: object, body: bytes) -> None:
        pass

    def on_lost(self, link: object, reason: str) -> None:
        pass


class _Session:
    """One run of the node, from its start to Ctrl-C or `potluck leave`."""

    def __init__(
        self, options: SwarmOptions, key: "NodeKey", keeper: "SwarmKeeper", store: "ModelStore", began_s: float, *,
        is_newcomer: bool = False,
    ) -> None:  # fmt: skip
        """`is_newcomer`: what the swarm serves has not been heard yet."""
        self._options, self._key, self._keeper, self._store, self._began_s = options, key, keeper, store, began_s
        self._stopped = asyncio.Event()
        self._is_newcomer, self._has_served = is_newcomer, False

    async def run(self) -> None:
        from potluck.node.spans import start_spans
        from potluck.node.swarm_node import SwarmNode

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stopped.set)
        require_own_layers_fit(self._options.own_layers, self._layer_counts())
        device = await self._device()
        settings = self._settings(device)
        progress = make_progress(self._options.as_json)
        swarm = SwarmNode(self._key, self._keeper, self._store, settings, lambda: progress, self._say)
        swarm.node.allows_chaos = self._options.has_chaos
        gateway: GatewayServer | None = None
        stop_spans = start_spans(swarm.node.orchestrator.traces)
        try:
            await self._start(swarm)
            gateway = await self._start_api(swarm)
            gc.collect()
            gc.freeze()  # what exists now stays: the collector need not look at it again while tokens are waiting
            self._announce(swarm, gateway)
            await self._stopped.wait()
        finally:
            if gateway is not None:
                await gateway.stop()
            await swarm.stop()
            await asyncio.to_thread(stop_spans)  # sends what is left

    async def _device(self) -> "DeviceFacts | None":
        """The GPU, measured; None where the CPU computes. Raises DeviceUnavailable before anybody counts on it."""
        from potluck.node.device import ProbeInterrupted, measured_device

        if self._options.device == "cpu" or not self._options.serves:
            return None
        try:
            facts = await asyncio.to_thread(measured_device, self._options.device)
        except ProbeInterrupted:
            raise typer.Abort from None
        free, total = facts.free_bytes / 1e9, facts.total_bytes / 1e9
        notice(f"{facts.name}: {free:.1f} of {total:.1f} GB free, copies {facts.bytes_per_s / 1e9:.0f} GB/s")
        return facts

    def _settings(self, device: "DeviceFacts | None") -> "SwarmNodeSettings":
        from potluck.core.layers import LayerRange
        from potluck.core.memory import memory_total_bytes
        from potluck.node.configuration_file import read_configuration
        from potluck.node.identity_file import own_folder
        from potluck.node.machine import memory_budget_bytes, parse_size, reading_bytes_per_s
        from potluck.node.own_statement import StewardSettings
        from potluck.node.serving import ServingSettings
        from potluck.node.swarm_node import SwarmNodeSettings
        from potluck.swarm.adverts import advert_lifetime_s

        options, configuration = self._options, read_configuration()
        asked = parse_size(options.memory) if options.memory is not None else None
        most = configuration.host.shard_max_vram_mb * 1_000_000
        limit = most if asked is None else asked
        budget = memory_budget_bytes(asked, most) if device is None else device.budget_bytes(limit)
        pinned = LayerRange.parse(options.layers, self._layer_count()) if options.layers else None
        steward = StewardSettings(
            name=options.name or _host_name(), is_serving=options.serves, device=device,
            memory_total_bytes=memory_total_bytes() if device is None else device.total_bytes, memory_budget_bytes=budget,
            bytes_per_s=reading_bytes_per_s(options.threads) if device is None else device.bytes_per_s,
            lifetime_s=advert_lifetime_s(configuration.shard_health_timeout_seconds), pinned=pinned, max_layers=options.max_layers,
            serving=ServingSettings(
                threads=options.threads, max_concurrent_streams=options.streams, device=options.device,
                is_batch_invariant=options.is_batch_invariant, device_budget_bytes=None if device is None else budget,
                eviction_idle_s=configuration.host.shard_eviction_idle_seconds,
            ),
        )  # fmt: skip
        return SwarmNodeSettings(
            listen=options.listen or DEFAULT_SWARM_LISTEN, folder=own_folder(), steward=steward,
            uses_discovery=options.uses_discovery, interfaces=options.interfaces,
        )  # fmt: skip

    def _layer_count(self) -> int:
        models = self._keeper.roster.models()
        if not models:
            raise BadRequest("--layers pins layers of a model, and this swarm serves none yet")
        entry = self._store.find_weights(models[0].weights_sha256)
        if entry is None:
            raise BadRequest("--layers can be given once this machine has the model (potluck pull)")
        return entry.layer_count

    def _layer_counts(self) -> list[int]:
        """Of the swarm's models, as far as they are in the store."""
        entries = [self._store.find_weights(model.weights_sha256) for model in self._keeper.roster.models()]
        return [entry.layer_count for entry in entries if entry is not None]

    async def _start(self, swarm: "SwarmNode") -> None:
        try:
            await swarm.start()
        except BadRequest:
            if self._options.listen is not None or swarm.address:  # it listens: something else is wrong
                raise
            host = DEFAULT_SWARM_LISTEN.rpartition(":")[0]
            notice(f"{DEFAULT_SWARM_LISTEN} is taken; listening on another port")
            import msgspec

            swarm.settings = msgspec.structs.replace(swarm.settings, listen=f"{host}:0")
            await swarm.start()

    async def _start_api(self, swarm: "SwarmNode") -> "GatewayServer | None":
        from potluck.cli.api_options import gateway_settings
        from potluck.gateway.administration import add_administration
        from potluck.gateway.api_keys import is_loopback
        from potluck.gateway.server import GatewayServer
        from potluck.net.addresses import parse_address
        from potluck.node.administration import NodeAdministration
        from potluck.node.answering import NodeAnswering

        api = self._options.api
        if api is None:
            return None
        needs_key = not is_loopback(parse_address(api.address)[0])
        administration = NodeAdministration(swarm, "", needs_key, self._options.has_chaos, self._stopped.set)
        # In a swarm somebody else loads what was lost, and that takes its time: the stream stays open meanwhile.
        own = own_layers_of(self._options.own_layers, self._store, self._options.threads)
        answering = NodeAnswering(swarm.node, api_params(_HOLDER_WAIT_S), own)
        settings = configure_orchestrator(swarm.node.orchestrator, gateway_settings(api))
        gateway = GatewayServer(answering, settings, lambda app: add_administration(app, administration))
        return await self._serve_api(gateway, administration, api)

    async def _serve_api(
        self, gateway: "GatewayServer", administration: "NodeAdministration", api: ApiOptions
    ) -> "GatewayServer | None":
        from potluck.cli.api_options import started

        if not await started(gateway, api):
            return None
        administration.api_url = gateway.url
        return gateway

    def _announce(self, swarm: "SwarmNode", gateway: "GatewayServer | None") -> None:
        from potluck.node.identity_file import own_run_file
        from potluck.node.run_file import RunningNode

        roster, addresses = self._keeper.roster, swarm.steward.statement.addresses
        api, key = ("", None) if gateway is None else (gateway.address, gateway.a_key)
        running = RunningNode(os.getpid(), swarm.node.id.hex(), roster.swarm.hex(), addresses, api, key or "")
        own_run_file().write(running)
        swarm.on_addresses.append(lambda addresses: _keep_run_file(running, addresses))
        if self._options.as_json:
            return print_json(
                {
                    "node": swarm.node.id.hex(), "swarm": roster.swarm.hex(), "address": addresses[0], "api": api,
                    "daemon_pid": os.getpid(),
                }
            )  # fmt: skip
        notice(f"node {swarm.node.id.hex()[:8]} of swarm {roster.swarm.hex()[:8]}, reachable at {', '.join(addresses)}")
        if gateway is not None:
            notice(f"page {gateway.url}/   OpenAI API {gateway.url}/v1")
            for url in _urls_elsewhere(gateway, addresses):
                notice(f"from other machines, with the key: {url}/")
        if not roster.models() and not self._is_newcomer:
            notice(
                "this swarm serves no model yet; end this node (Ctrl-C) and start it with one of `potluck models`: "
                "potluck up --model NAME"
            )
        if roster.may_invite(swarm.node.id):
            notice("add a machine: `potluck invite` here, and paste what it prints there")
        return None

    def _say(self, text: str) -> None:
        text = one_line(text)  # what went wrong may be told in a peer's words
        elapsed_s = time.monotonic() - self._began_s
        if self._options.as_json:
            print_json({"event": text, "seconds": round(elapsed_s, 2)})
        elif text.startswith("serving") and not self._has_served:
            self._has_served = True
            notice(f"{text} ({elapsed_s:.1f} s after the start)")
        else:
            notice(text)


def _keep_run_file(running: "RunningNode", addresses: tuple[str, ...]) -> None:
    """A full disk must not end a node that runs well."""
    import msgspec

    from potluck.node.identity_file import own_run_file

    try:
        own_run_file().write(msgspec.structs.replace(running, addresses=addresses))
    except OSError as error:
        notice(f"`potluck invite` goes on naming the addresses of before: {error}")


def _urls_elsewhere(gateway: "GatewayServer", addresses: Sequence[str]) -> list[str]:
    """Where an API that is open to the network is found from there: at the addresses under which this node is."""
    from potluck.gateway.api_keys import is_loopback
    from potluck.net.addresses import format_address, parse_address

    if not gateway.is_everywhere:
        return []
    port = parse_address(gateway.address)[1]
    hosts = [parse_address(address)[0] for address in addresses]
    return [f"http://{format_address(host, port)}" for host in hosts if not is_loopback(host)]


def _host_name() -> str:
    import socket

    with contextlib.suppress(OSError):
        return socket.gethostname()[:64]
    return ""
