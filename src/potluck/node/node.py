"""The composition root: one node with its key, its links, the shards it serves and the generations it heads.

Messages are handed to the shard or the generation whose session they name; what belongs to neither is counted and dropped.
"""

import asyncio
import os
from collections import Counter

from potluck import __version__
from potluck.core.errors import ModelNotFound
from potluck.identity.keys import NodeKey
from potluck.net.link import Listener, Transport
from potluck.net.peers import PeerLinks
from potluck.orchestrator.orchestrator import PipelineOrchestrator
from potluck.shard.core import ShardSettings
from potluck.shard.server import ShardServer
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Describe,
    Described,
    Failed,
    Fault,
    GetTokenizer,
    Message,
    Open,
    Opened,
    Probed,
    Refused,
    Result,
    Rewired,
    Step,
    TokenizerData,
)
from potluck.wire.worker_settings import WorkerSettings

_HOUSEKEEPING_S = 5.0


class ServedModel:
    """What a node can tell about a model that it serves: the manifest and the tokenizer that the manifest covers."""

    def __init__(self, weights_sha256: str, manifest: bytes, tokenizer: bytes) -> None:
        self.weights_sha256, self.manifest, self.tokenizer = weights_sha256, manifest, tokenizer


class Node:
    """`start` it inside a running loop, `stop` it before the loop ends."""

    def __init__(self, key: NodeKey, transport: Transport) -> None:
        self.id = key.node_id
        self.counters: Counter[str] = Counter()
        self.metrics = Metrics()
        self.links = PeerLinks(self.id, transport, self._on_message, self._on_lost)
        self.orchestrator = PipelineOrchestrator(self.id, self.links, self._send, self.metrics)
        self.shards: list[ShardServer] = []
        self._transport = transport
        self._listeners: list[Listener] = []
        self._models: dict[str, ServedModel] = {}
        self._owners: dict[bytes, ShardServer] = {}  # by session
        self._housekeeping: asyncio.Task[None] | None = None
        self._counted: dict[str, int] = {}  # what the page has shown so far

    def __repr__(self) -> str:
        return f"<Node {self.id.hex()[:8]} {self.shards} {self.links!r}>"

    async def listen(self, address: str) -> str:
        """Serves at `address`; returns it with the port that was bound."""
        listener = await self._transport.listen(address, self.links)
        self._listeners.append(listener)
        return listener.address

    def add_shard(
        self, settings: ShardSettings, worker: WorkerSettings, model: ServedModel | None = None
    ) -> ShardServer:
        server = ShardServer(self.id, settings, worker, self._send, self.metrics)
        self.shards.append(server)
        self.orchestrator.store.put(self.id, "", self._describe(0), is_own=True)
        if model is not None:
            self._models[model.weights_sha256] = model
        if self._housekeeping is None:
            self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())
        return server

    async def stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self.orchestrator.close()
        await self.links.close()
        for shard in self.shards:
            await shard.stop()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            for shard in self.shards:
                shard.evict_if_idle()
            live = {session for session, owner in self._owners.items() if owner.core.has_session(session)}
            self._owners = {session: self._owners[session] for session in live}

    def metrics_page(self) -> bytes:
        """The Prometheus page, with the counters of the deciding parts brought up to date."""
        totals = Counter(self.counters)
        for shard in self.shards:
            totals.update(shard.core.counters)
        for reason, count in totals.items():
            known = self._counted.get(reason, 0)
            self.metrics.dropped_messages.labels(reason=reason).inc(count - known)
            self._counted[reason] = count
        return self.metrics.page()

    # ------------------------------------------------------------ messages

    def _send(self, effect: SendTo) -> None:
        self.links.send(effect.node, effect.address, effect.message, effect.body)

    def _on_message(self, sender: bytes, message: Message, body: bytes) -> None:
        if type(message) is Step and (owner := self._owners.get(message.session)) is not None:
            return owner.deliver(sender, message, body)  # by far the most frequent, and the one that is waited for
        if isinstance(message, Describe):
            return self._send(SendTo(sender, None, self._describe(message.nonce)))
        if isinstance(message, GetTokenizer):
            return self._send(self._tokenizer(sender, message))
        if isinstance(message, Described | TokenizerData | Failed):
            return self.orchestrator.on_answer(sender, message, body)
        if isinstance(message, Open):
            return self._on_open(sender, message, body)
        session = message.session
        if isinstance(message, Opened | Refused | Result | Rewired | Probed | Fault):
            # From a shard to its head; where that shard is our own, it knows the same session.
            if not self.orchestrator.on_message(sender, session, message):
                self.counters["unknown_session"] += 1
            return None
        owner = self._owners.get(session)
        if owner is not None:
            return owner.deliver(sender, message, body)
        if self.shards:
            return self.shards[0].deliver(sender, message, body)  # answers probes about sessions that nobody knows
        self.counters["unknown_session"] += 1
        return None

    def _on_open(self, sender: bytes, message: Open, body: bytes) -> None:
        server = self._server_for(message)
        if server is None:
            self.counters["unknown_session"] += 1
            return
        self._owners.setdefault(message.session, server)
        self.metrics.requests.labels(caller=sender.hex()[:16]).inc()
        server.deliver(sender, message, body)

    def _server_for(self, message: Open) -> ShardServer | None:
        """The shard that holds what is wanted; any other will refuse with its reason."""
        fitting = [
            s
            for s in self.shards
            if s.settings.model == message.model
            and s.settings.stage.start <= message.stage.start
            and message.stage.stop <= s.settings.stage.stop
            and s.settings.stage.has_embedding >= message.stage.has_embedding
            and s.settings.stage.has_output >= message.stage.has_output
        ]
        return next(iter(fitting or self.shards), None)

    def _on_lost(self, node: bytes, reason: str) -> None:
        for shard in self.shards:
            shard.node_lost(node)
        self.orchestrator.on_lost(node, reason)

    def _describe(self, nonce: int) -> Described:
        pids = tuple(shard.supervisor.pid or 0 for shard in self.shards)
        return Described(nonce, self.id, __version__, tuple(s.info() for s in self.shards), os.getpid(), pids)

    def _tokenizer(self, sender: bytes, message: GetTokenizer) -> SendTo:
        model = self._models.get(message.weights_sha256)
        if model is None:
            error = ModelNotFound("this node does not serve that model")
            return SendTo(sender, None, Failed(message.nonce, error.code, str(error)))
        answer = TokenizerData(message.nonce, len(model.manifest), len(model.tokenizer))
        return SendTo(sender, None, answer, model.manifest + model.tokenizer)
