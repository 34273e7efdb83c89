"""What a node has of the swarm's models: those on its disk, whole or in part, and the manifests of those whose weights are elsewhere.

Knows nothing of plans and shards.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from potluck.core.errors import BadRequest, PotluckError, WeightsMissing
from potluck.identity.keys import short_id
from potluck.node.bulk_peer import BulkPeer, WeightSource
from potluck.node.node import Node
from potluck.node.serving import StoredModel, check_tokenizer, read_stored_model
from potluck.orchestrator.questions import TEXT_SIDE_TIMEOUT_S
from potluck.swarm.adverts import MAX_SPEEDS, HeldWeights
from potluck.swarm.view import View
from potluck.weights.store import ModelStore
from potluck.wire.messages import GetTokenizer, Stage, TokenizerData

_LOG = logging.getLogger(__name__)
_STORE_LOOK_S = 5.0  # between looks whether a model has come to this disk by other ways
_ASK_AGAIN_S = 1.0
_REMOVED = "the model's files are no longer in the store; `potluck models` lists what is"
_MAX_LOOKING = 8  # for manifests at once: a swarm may name models that nobody has
_MAX_ASKED = 2  # for manifests at once of one peer, which grants few links for bulk, and weights need theirs


class KnownModels:
    """All of it by the weights' hash."""

    def __init__(
        self, node: Node, store: ModelStore, clock: Callable[[], float], say: Callable[[str], None] = _LOG.warning
    ) -> None:
        self._node, self._store, self._clock, self._say = node, store, clock, say
        self._stored: dict[str, StoredModel | None] = {}
        self._damage: dict[str, str] = {}  # what is wrong with a model on this disk, which counts as not there
        self._manifests: dict[str, bytes] = {}  # of models whose weights are elsewhere
        self._looking: set[str] = set()
        self._asked: Counter[bytes] = Counter()  # peers, by how many manifests they are asked for now
        self._look_s = 0.0

    def __repr__(self) -> str:
        held = sum(stored is not None for stored in self._stored.values())
        return f"<KnownModels {held} stored, {len(self._manifests)} manifests>"

    async def look(self, served: Mapping[str, object]) -> None:
        """What of the swarm's models is on this disk: at once for a new one, and now and then, as its user may have pulled it."""
        self._forget_others(served)
        lacking = [weights for weights in served if self._stored.get(weights) is None]
        is_new = any(weights not in self._stored for weights in lacking)
        if not lacking or (not is_new and self._clock() < self._look_s):
            return
        self._look_s = self._clock() + _STORE_LOOK_S
        held = await asyncio.to_thread(lambda: {entry.weights_sha256 for entry in self._store.list()})
        for weights in lacking:
            self._stored[weights] = None
            if weights in held:
                await self.read(weights)
            else:
                self._damage.pop(weights, None)  # removed: others may give it

    def _forget_others(self, served: Mapping[str, object]) -> None:
        """What the swarm serves no more is not kept, but what is on the disk is still offered to others."""
        self._manifests = {weights: data for weights, data in self._manifests.items() if weights in served}
        self._stored = {
            weights: each for weights, each in self._stored.items() if weights in served or each is not None
        }
        self._damage = {weights: fault for weights, fault in self._damage.items() if weights in served}

    async def read(self, weights_sha256: str, is_changed: bool = False) -> StoredModel | None:
        """A model from the disk, None where it is damaged; `is_changed`: also where it was read before."""
        if is_changed or self._stored.get(weights_sha256) is None:
            try:
                self._stored[weights_sha256] = await asyncio.to_thread(self._read, weights_sha256)
                self._damage.pop(weights_sha256, None)
            except (PotluckError, OSError) as error:
                self._stored[weights_sha256] = None
                await self._on_damage(weights_sha256, str(error))
        return self._stored[weights_sha256]

    def _read(self, weights_sha256: str) -> StoredModel | None:
        entry = self._store.find_weights(weights_sha256)
        return None if entry is None else read_stored_model(self._store, entry.id)

    async def _on_damage(self, weights_sha256: str, problem: str) -> None:
        """Told once. The manifest may be right though the weights are not: then the model can be planned, and others hold it."""
        if self._damage.get(weights_sha256) == problem:
            return
        self._damage[weights_sha256] = problem
        self._say(problem)
        try:
            entry = await asyncio.to_thread(self._store.find_weights, weights_sha256)
            if entry is not None:
                self._manifests[weights_sha256] = await asyncio.to_thread(self._store.manifest, entry.id)
        except (PotluckError, OSError) as error:
            _LOG.debug("no manifest of %s from this disk: %s", weights_sha256[:12], error)

    async def is_sound(self, weights_sha256: str) -> bool:
        """Whether files that were read before are still as they were; where they are not that is told, and they count as gone."""
        stored = self._stored.get(weights_sha256)
        fault = None if stored is None else await asyncio.to_thread(self._fault, stored.weights_sha256)
        if fault is not None:
            self._stored[weights_sha256] = None
            await self._on_damage(weights_sha256, fault)
        return self._stored.get(weights_sha256) is not None

    def _fault(self, weights_sha256: str) -> str | None:
        entry = self._store.find_weights(weights_sha256)
        return _REMOVED if entry is None else self._store.fault(entry.id)

    def damage(self, weights_sha256: str) -> str:
        """What is wrong with the model on this disk; empty where nothing is, or where it is not here."""
        return self._damage.get(weights_sha256, "")

    def stored(self, weights_sha256: str) -> StoredModel | None:
        return self._stored.get(weights_sha256)

    def manifest(self, weights_sha256: str) -> bytes | None:
        stored = self._stored.get(weights_sha256)
        return self._manifests.get(weights_sha256) if stored is None else stored.manifest

    def has_weights(self, weights_sha256: str, stage: Stage) -> bool:
        stored = self._stored.get(weights_sha256)
        if stored is None:
            return False
        try:
            stored.require(stage)
        except WeightsMissing:
            return False
        return True

    def held(self) -> list[HeldWeights]:
        """What this node can give to others."""
        return [
            HeldWeights(weights, tuple((run.start, run.stop) for run in stored.held_layers()))
            for weights, stored in self._stored.items()
            if stored is not None
        ]

    # ------------------------------------------------------------ manifests of peers

    def begin_looking(self, weights_sha256: str) -> bool:
        """Whether `ask_for_manifest` may be started now."""
        if weights_sha256 in self._looking or len(self._looking) >= _MAX_LOOKING or len(self._manifests) >= MAX_SPEEDS:
            return False
        self._looking.add(weights_sha256)
        return True

    async def ask_for_manifest(self, weights_sha256: str, sources: list[WeightSource]) -> bool:
        """Whether one came; whoever is asked may take its time."""
        try:
            for source in sources:
                if self._asked[source.node] >= _MAX_ASKED:
                    continue
                self._asked[source.node] += 1
                try:
                    manifest, tokenizer = await self._text_side(source, weights_sha256)
                    await asyncio.to_thread(check_tokenizer, manifest, tokenizer, weights_sha256)
                except (PotluckError, OSError) as error:  # TimeoutError is one
                    _LOG.info("no manifest from %s: %s", short_id(source.node), error)
                    continue
                finally:
                    self._asked[source.node] -= 1
                self._manifests[weights_sha256] = manifest
                return True
            await asyncio.sleep(_ASK_AGAIN_S)  # before they are asked again
            return False
        finally:
            self._looking.discard(weights_sha256)

    async def _text_side(self, source: WeightSource, weights_sha256: str) -> tuple[bytes, bytes]:
        """Manifest and tokenizer as a peer sends them, unchecked. Raises PotluckError and what dialling raises.

        Over a link of their own: on the ordinary one megabytes hold up activations, and in a large swarm not everybody has one.
        """
        peer = BulkPeer(source, lambda *_: None, lambda _: None)
        try:
            await peer.dial(self._node.transport)
        except (PotluckError, OSError):
            if not self._node.links.is_linked(source.node):
                raise
            # Behind a firewall, say: it dialled this node, and cannot be dialled.
            return await self._node.orchestrator.fetch_tokenizer(source.node, weights_sha256)
        try:
            answer, body = await peer.question(lambda nonce: GetTokenizer(nonce, weights_sha256), TEXT_SIDE_TIMEOUT_S)
        finally:
            peer.close()
        if not isinstance(answer, TokenizerData) or answer.manifest_bytes + answer.tokenizer_bytes != len(body):
            raise BadRequest("a peer answered with something else than a tokenizer")
        return body[: answer.manifest_bytes], body[answer.manifest_bytes :]


def weight_sources(weights_sha256: str, view: View) -> list[WeightSource]:
    """Who says that it has some of these weights."""
    return [
        WeightSource(seen.advert.node, seen.address, seen.advert.addresses[1:])
        for seen in view.usable()
        if not seen.is_own and any(held.weights_sha256 == weights_sha256 for held in seen.advert.held)
    ]
