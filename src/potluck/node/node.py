"""The composition root: one node with its key, its links, the shards it serves and the generations it heads.

Messages are handed to the shard or the generation whose session they name; what belongs to neither is counted and dropped.
"""

import asyncio
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable

from potluck import __version__
from potluck.core.errors import (
    BadSwarmFile,
    ModelNotFound,
    NotEntitled,
    PotluckError,
    ResumeImpossible,
    ShardUnavailable,
)
from potluck.core.processors import CROWD, LOOP_CORE
from potluck.core.remembered import (
    Accounts,
    AnswerSoFar,
    RememberedAnswers,
    answer_proof,
    key_behind,
    packed_tokens,
    resume_key,
)
from potluck.identity.keys import NodeKey
from potluck.net.link import Listener, Transport
from potluck.net.peers import PeerLinks
from potluck.node.weight_server import WeightServer
from potluck.orchestrator.orchestrator import PipelineOrchestrator
from potluck.shard.server import ShardServer
from potluck.shard.settings import ShardSettings
from potluck.telemetry.metrics import Metrics
from potluck.trust.admission import Admission
from potluck.trust.roster import Roster
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    MAX_HISTORY,
    AgedRecord,
    AnswerData,
    BulkLink,
    Chaos,
    ChunkData,
    Describe,
    Described,
    Failed,
    Fault,
    GetAnswer,
    GetChunk,
    GetHoldings,
    GetTokenizer,
    Holdings,
    Message,
    Open,
    Opened,
    Probed,
    Records,
    Refused,
    Result,
    Rewired,
    Step,
    SwarmMessage,
    TokenizerData,
)
from potluck.wire.worker_settings import WorkerSettings

_LOG = logging.getLogger(__name__)
_FROM_A_SHARD = (Result, Opened, Refused, Rewired, Probed, Fault)
_HOUSEKEEPING_S = 5.0
_SWARM_FILE_S = 1.0
_MAX_OWNERS = 1 << 14
_MAX_ASKED = 64  # about an answer that broke off
_MAX_CALLERS = 1024  # with a name of their own in the metrics


class ServedModel:
    """What a node can tell about a model that it serves: the manifest and the tokenizer that the manifest covers."""

    def __init__(self, weights_sha256: str, manifest: bytes, tokenizer: bytes) -> None:
        self.weights_sha256, self.manifest, self.tokenizer = weights_sha256, manifest, tokenizer


def _longer(one: AnswerSoFar | None, other: AnswerSoFar | None) -> AnswerSoFar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda answer: len(answer.tokens))


class Node:
    """`start` it inside a running loop, `stop` it before the loop ends."""

    def __init__(self, key: NodeKey, transport: Transport, admission: Admission | None = None) -> None:
        """`admission`: of the swarm that the node belongs to, the same that its transport asks; None: links are open to anyone."""
        self.id = key.node_id
        self._admission = admission
        self.counters: Counter[str] = Counter()
        self.metrics = Metrics()
        self.weights = WeightServer(self._may_fetch, self._may_be_asked_by)
        self.links = PeerLinks(
            self.id, transport, self._on_message, self._on_lost, may_link=self._may_link, bulk=self.weights
        )
        if admission is not None:
            admission.keeper.on_change.append(self._on_roster)
        self.orchestrator = PipelineOrchestrator(self.id, self.links, self._send, self.metrics)
        self.orchestrator.on_ended = self._remember
        self.orchestrator.on_load_changed = self._settle_on_cores
        self._remembered = RememberedAnswers()
        self.shards: list[ShardServer] = []
        self.transport = transport
        self._listeners: list[Listener] = []
        self._models: dict[str, ServedModel] = {}
        self._owners: dict[bytes, ShardServer] = {}  # by session
        self._housekeeping: asyncio.Task[None] | None = None
        self._swarm_keeping: asyncio.Task[None] | None = None
        self._counted: dict[str, int] = {}  # what the page has shown so far
        self._callers: set[bytes] = set()
        self.allows_chaos = False
        self.on_swarm_message: Callable[[bytes, SwarmMessage], None] = self._no_swarm
        self.on_peer_lost: Callable[[bytes, str], None] = lambda node, reason: None

    def __repr__(self) -> str:
        return f"<Node {self.id.hex()[:8]} {self.shards} {self.links!r}>"

    async def listen(self, address: str) -> str:
        """Serves at `address`; returns it with the port that was bound."""
        listener = await self.transport.listen(address, self.links)
        self._listeners.append(listener)
        if self._admission is not None and self._swarm_keeping is None:
            self._swarm_keeping = asyncio.get_running_loop().create_task(self._keep_swarm(self._admission))
        return listener.address

    def add_shard(
        self, settings: ShardSettings, worker: WorkerSettings, model: ServedModel | None = None
    ) -> ShardServer:
        server = ShardServer(self.id, settings, worker, self.links, self.metrics)
        server.on_suspect = self.orchestrator.on_suspect
        server.on_remember = self._remember
        server.on_load_changed = self._settle_on_cores
        self.shards.append(server)
        self.orchestrator.store.put(self.id, "", self._describe(0), is_own=True)
        if model is not None:
            self._models[model.weights_sha256] = model
        self._start_housekeeping()
        return server

    def _settle_on_cores(self) -> None:
        """With one answer on its way a daemon has its place, be it that of a head only; else it runs wherever there is room."""
        sessions = sum(shard.session_count for shard in self.shards)
        serves_alone = sessions == 1 and any(shard.decodes_alone for shard in self.shards)
        heads_alone = sessions == 0 and self.orchestrator.decodes_alone
        is_held = LOOP_CORE.keep_while(serves_alone or heads_alone)
        for shard in self.shards:
            shard.attend(is_held and serves_alone and shard.decodes_alone)
        CROWD.is_heeded = is_held and (heads_alone or any(shard.is_attending for shard in self.shards))

    def _start_housekeeping(self) -> None:
        if self._housekeeping is None:
            self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def remove_shard(self, server: ShardServer) -> None:
        """Ends a shard, its sessions and its worker. Its weights stay on offer to peers."""
        if server in self.shards:
            self.shards.remove(server)
            server.give_up()
            self._owners = {session: owner for session, owner in self._owners.items() if owner is not server}
            await server.stop()
            self._settle_on_cores()

    async def stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        tasks = [task for task in (self._housekeeping, self._swarm_keeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._admission is not None:
            self._admission.keeper.on_change.remove(self._on_roster)
            self._save_swarm(self._admission)
        await self.orchestrator.close()
        await self.links.close()
        await self.weights.close()
        for shard in self.shards:
            await shard.stop()
        LOOP_CORE.keep_while(False)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            for shard in self.shards:
                shard.evict_if_idle()
            self._forget_ended_sessions()
            self._remembered.forget_old(time.monotonic())

    def _forget_ended_sessions(self) -> None:
        self._owners = {
            session: owner
            for session, owner in self._owners.items()
            if owner.core.has_session(session) or owner.core.has_parked(session)
        }

    async def _keep_swarm(self, admission: Admission) -> None:
        """The file also changes under this node: its user's commands write there."""
        while True:
            await asyncio.sleep(_SWARM_FILE_S)
            self._save_swarm(admission)

    def _save_swarm(self, admission: Admission) -> None:
        try:
            admission.keeper.refresh()
            admission.keeper.save_if_changed()
        except BadSwarmFile as error:  # a full disk, perhaps: what is known stays known, and it is tried again
            _LOG.error("%s", error)

    @property
    def may_ask(self) -> bool:
        """Whether others would answer this node; a node that has just joined does not know yet, and tries."""
        if self._admission is None or self.is_expelled:
            return self._admission is None
        roster = self._admission.keeper.roster
        return roster.trust_of(self.id) is None or roster.may_ask(self.id)

    @property
    def is_expelled(self) -> bool:
        return self._admission is not None and self._admission.keeper.roster.is_expelled(self.id)

    def _may_be_asked_by(self, node: bytes) -> bool:
        return self._admission is None or self._admission.keeper.roster.may_ask(node)

    def _may_fetch(self, node: bytes) -> bool:
        """Weights are for those who may serve them: whoever is only in touch, or only asks, needs none (HearthNet §5.9)."""
        return self._admission is None or self._admission.keeper.roster.may_serve(node)

    def _may_link(self, node: bytes) -> bool:
        return self._admission is None or self._admission.keeper.may_link(node)

    def _on_roster(self, before: Roster, after: Roster) -> None:
        for node in self.links.linked():  # whoever is thrown out hears who said so, as long as there is a link
            if (record := after.expulsion_record(node)) is not None:
                self.links.drop(node, "expelled", Records((AgedRecord(record, 0),)))
        self.links.drop_unwelcome("not a member any more")

    def metrics_page(self) -> bytes:
        """The Prometheus page, with the counters of the deciding parts brought up to date."""
        totals = self.counters + self.weights.counters
        for shard in self.shards:
            totals.update(shard.core.counters)
        if self._admission is not None:
            totals.update(self._admission.refusals)
            totals.update({f"record_{reason}": count for reason, count in self._admission.keeper.refusals.items()})
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
        if isinstance(message, _FROM_A_SHARD):
            # To its head; where that shard is our own, it knows the same session.
            if not self.orchestrator.on_message(sender, message.session, message, body):
                self.counters["unknown_session"] += 1
            return None
        if isinstance(message, Describe):
            return self._send(SendTo(sender, None, self._describe(message.nonce)))
        if isinstance(message, GetTokenizer):
            return self._send(self._tokenizer(sender, message))
        if isinstance(message, GetAnswer):
            return self._send(self._answer_so_far(sender, message))
        if isinstance(message, Described | TokenizerData | AnswerData | Failed):
            return self.orchestrator.on_answer(sender, message, body)
        if isinstance(message, Open):
            return self._on_open(sender, message, body)
        if isinstance(message, SwarmMessage):
            return self.on_swarm_message(sender, message)
        if isinstance(message, Chaos):
            return self._suffer(sender)
        if isinstance(message, BulkLink | GetHoldings | Holdings | GetChunk | ChunkData):
            self.counters["for_bulk_links_only"] += 1
            return None
        owner = self._owners.get(message.session)
        if owner is not None:
            return owner.deliver(sender, message, body)
        if self.shards:
            return self.shards[0].deliver(sender, message, body)  # answers probes about sessions that nobody knows
        self.counters["unknown_session"] += 1
        return None

    def _on_open(self, sender: bytes, message: Open, body: bytes) -> None:
        if not self._may_be_asked_by(sender):
            self.counters["may_not_ask"] += 1
            return self._refuse(sender, message, NotEntitled("this node may not ask here"))
        server = self._server_for(message)
        if server is None:  # said at once, because a head takes silence for a death
            self.counters["unknown_session"] += 1
            return self._refuse(sender, message, ShardUnavailable("this node serves no layers"))
        if len(self._owners) >= _MAX_OWNERS:  # sessions that were refused are there too, until the next look
            self._forget_ended_sessions()
        # An id that another shard of ours knows stays that one's, to which steps are delivered; it refuses.
        owner = self._owners.setdefault(message.session, server)
        self.metrics.requests.labels(caller=self._caller(sender)).inc()
        return owner.deliver(sender, message, body)

    def _caller(self, sender: bytes) -> str:
        """As the metrics name it. Without a swarm everybody may make up ids: after the first so many they are one."""
        if len(self._callers) < _MAX_CALLERS:
            self._callers.add(sender)
        return sender.hex()[:16] if sender in self._callers else "others"

    def _refuse(self, sender: bytes, message: Open, error: PotluckError) -> None:
        self._send(SendTo(sender, None, Refused(message.session, message.epoch, error.code, str(error))))

    def _server_for(self, message: Open) -> ShardServer | None:
        """The shard that holds what is wanted; any other will refuse with its reason."""
        fitting = [
            s
            for s in self.shards
            if s.settings.weights_sha256 == message.weights_sha256
            and s.settings.stage.start <= message.stage.start
            and message.stage.stop <= s.settings.stage.stop
            and s.settings.stage.has_embedding >= message.stage.has_embedding
            and s.settings.stage.has_output >= message.stage.has_output
        ]
        # Where a range has changed the old one is still there, for its sessions alone.
        return next(iter(sorted(fitting, key=lambda s: s.core.is_draining) or self.shards), None)

    def _on_lost(self, node: bytes, reason: str) -> None:
        for shard in self.shards:
            shard.node_lost(node)
        self.orchestrator.on_lost(node, reason)
        self.on_peer_lost(node, reason)

    def _suffer(self, sender: bytes) -> None:
        """Kills this node's workers, as the chaos button of somebody who may also ask wants it."""
        may_ask = self._may_be_asked_by(sender)
        self.counters["chaos" if self.allows_chaos and may_ask else "chaos_refused"] += 1
        if self.allows_chaos and may_ask:
            for shard in self.shards:
                shard.supervisor.kill()

    def _no_swarm(self, sender: bytes, message: SwarmMessage) -> None:
        self.counters["no_swarm_here"] += 1

    def _describe(self, nonce: int) -> Described:
        pids = tuple(shard.supervisor.pid or 0 for shard in self.shards)
        return Described(nonce, self.id, __version__, tuple(s.info() for s in self.shards), os.getpid(), pids)

    # ------------------------------------------------------------ answers that broke off

    def _remember(self, key: bytes, answer: AnswerSoFar) -> None:
        self._start_housekeeping()
        self._remembered.put(key, answer, time.monotonic())

    def _recall_own(self, key: bytes) -> AnswerSoFar | None:
        live = [shard.core.recall(key) for shard in self.shards]
        known = [*live, self.orchestrator.recall(key), self._remembered.get(key, time.monotonic())]
        return functools.reduce(_longer, known)

    async def recall(self, secret: bytes, weights_sha256: str, most_tokens: int = MAX_HISTORY) -> Accounts:
        """What is remembered of an answer, here or by those who serve the model. Nobody is shown the secret, which opens the prompt.

        `most_tokens`: that the prompt and the answer can have; longer accounts are not even read.
        """
        key = resume_key(secret)
        holders = [node for node in self.orchestrator.store.holders(weights_sha256) if node != self.id]
        linked = [node for node in holders if self.links.is_linked(node)][:_MAX_ASKED]
        proofs = {node: answer_proof(key, self.id, node) for node in linked}
        told = await self.orchestrator.ask_for_answer(proofs, most_tokens)
        return Accounts(self._recall_own(key), told)

    def _resume_keys(self) -> list[bytes]:
        live = [key for shard in self.shards for key in shard.core.resume_keys]
        return [*live, *self.orchestrator.resume_keys, *self._remembered.keys(time.monotonic())]

    def _answer_so_far(self, sender: bytes, message: GetAnswer) -> SendTo:
        if not self._may_be_asked_by(sender):
            self.counters["may_not_ask"] += 1
            refusal = NotEntitled("this node may not ask here")
            return SendTo(sender, None, Failed(message.nonce, refusal.code, str(refusal)))
        key = key_behind(message.proof, self._resume_keys(), sender, self.id)
        answer = None if key is None else self._recall_own(key)
        if answer is None:
            error = ResumeImpossible("this node remembers no such answer")
            return SendTo(sender, None, Failed(message.nonce, error.code, str(error)))
        return SendTo(sender, None, AnswerData(message.nonce, answer.prompt_length), packed_tokens(answer.tokens))

    def _tokenizer(self, sender: bytes, message: GetTokenizer) -> SendTo:
        if not self._may_be_asked_by(sender):
            self.counters["may_not_ask"] += 1
            refusal = NotEntitled("this node may not ask here")
            return SendTo(sender, None, Failed(message.nonce, refusal.code, str(refusal)))
        model = self._models.get(message.weights_sha256) or self.weights.offered(message.weights_sha256)
        if model is None:
            error = ModelNotFound("this node does not have that model")
            return SendTo(sender, None, Failed(message.nonce, error.code, str(error)))
        answer = TokenizerData(message.nonce, len(model.manifest), len(model.tokenizer))
        return SendTo(sender, None, answer, model.manifest + model.tokenizer)
