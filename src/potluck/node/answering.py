"""What the gateway needs, from a node: every model that its shards and those of others cover, asked over the pipeline."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from potluck.core.errors import BadRequest, ModelNotFound, NotEntitled, PotluckError, ShardUnavailable
from potluck.core.exactness import Exactness, exactness_of
from potluck.core.model_facts import ModelFacts
from potluck.core.remembered import Accounts
from potluck.core.sampling_params import SamplingParams
from potluck.gateway.answering import Answer, ModelCard, OpenModel
from potluck.identity.keys import short_id
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings
from potluck.orchestrator.frames import StreamFrame
from potluck.orchestrator.generation import GenerationRequest
from potluck.orchestrator.orchestrator import PipelineOrchestrator
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.text.chat_template import ChatTemplate
from potluck.text.tokenizer import Tokenizer
from potluck.weights.store import ModelStore
from potluck.wire.messages import Boundary, ShardInfo, Stage


class PipelineAnswer:
    """One generation over the pipeline, and who took part in it."""

    def __init__(
        self, orchestrator: PipelineOrchestrator, request: GenerationRequest, params: DistributedChatParams
    ) -> None:
        self._nodes: list[str] = []
        self._began_with: tuple[Placed, ...] = ()
        self._boundaries: tuple[Boundary, ...] = ()
        watched = msgspec.structs.replace(params, on_stages=self._note, on_begun=self._begin)
        self._frames = orchestrator.chat(request, watched)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    @property
    def exactness(self) -> Exactness:
        return exactness_of({placed.arithmetic for placed in self._began_with})

    @property
    def arithmetic(self) -> int:
        return _common_arithmetic(self._began_with)

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        return self._boundaries

    def frames(self) -> AsyncIterator[StreamFrame]:
        return self._frames

    def _begin(self, request: GenerationRequest) -> None:
        self._boundaries = request.boundaries

    def _note(self, stages: tuple[Placed, ...]) -> None:
        self._began_with = self._began_with or stages
        self._nodes += [node for placed in stages if (node := placed.node.hex()) not in self._nodes]


class PipelineModel:
    """A model whose layers are on nodes; its text side is here."""

    def __init__(self, node: Node, remote: RemoteModel, card: ModelCard, params: DistributedChatParams) -> None:
        self._node, self._remote, self.card, self._params = node, remote, card, params

    @property
    def facts(self) -> ModelFacts:
        return self._remote.facts

    @property
    def tokenizer(self) -> Tokenizer:
        return self._remote.tokenizer

    @property
    def template(self) -> ChatTemplate:
        return self._remote.template

    def request(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> GenerationRequest:
        return self._remote.request(prompt, params, max_tokens)

    def check(self, request: GenerationRequest) -> None:
        self._node.orchestrator.pipeline_for(request, self._params)

    def arithmetic_of(self, request: GenerationRequest) -> int:
        return _common_arithmetic(self._node.orchestrator.pipeline_for(request, self._params))

    async def recall(self, secret: bytes, most_tokens: int) -> Accounts:
        return await self._node.recall(secret, self.card.weights_sha256, most_tokens)

    def start(self, request: GenerationRequest, label: str = "") -> Answer:
        params = msgspec.structs.replace(self._params, label=label)
        return PipelineAnswer(self._node.orchestrator, request, params)


class OwnLayers(msgspec.Struct, frozen=True):
    """What this node computes itself of every answer, as people write it (`embedding,output`, `0-4,25-output`), from its store."""

    text: str
    store: ModelStore
    serving: ServingSettings


class NodeAnswering:
    """All models on offer to a node. Text sides are fetched, and its own layers loaded, once per model and hash."""

    def __init__(
        self, node: Node, params: DistributedChatParams | None = None, own_layers: OwnLayers | None = None
    ) -> None:
        self._node, self._params, self._own_layers = node, params or DistributedChatParams(), own_layers
        self._opening = asyncio.Lock()
        self._opened: dict[tuple[str, str], PipelineModel] = {}
        self._seen: dict[tuple[str, str], int] = {}

    def metrics_page(self) -> bytes:
        return self._node.metrics_page()

    async def models(self) -> list[ModelCard]:
        return [await self._card(info) for info in self._offers()]

    async def open(self, name: str | None) -> OpenModel:
        if not self._node.may_ask:  # every shard would refuse, and the request wait for one that does not
            if self._node.is_expelled:
                raise NotEntitled(
                    "this node was expelled from its swarm; `potluck status` says by whom, and what to do"
                )
            raise NotEntitled(
                "this node may not ask in its swarm; whoever founded it can change that, on that machine: "
                f"potluck trust {short_id(self._node.id)} --trust member"
            )
        names = sorted({info.model for info in self._offers()})
        if name is None and len(names) > 1:
            raise BadRequest(f"several models are on offer ({', '.join(names)}); name one of them", "model")
        if not names:
            raise ShardUnavailable("no machine serves any layers yet; they may be loading (`potluck status` shows it)")
        if name is not None and name not in names:
            raise ModelNotFound(f"no model of that name is on offer; there is {', '.join(names)}")
        wanted = names[0] if name is None else name
        [*others, info] = [offer for offer in self._offers() if offer.model == wanted]
        if not others and (opened := self._opened.get(_key_of(info))) is not None:
            return opened
        async with self._opening:  # so that nobody loads twice
            remote = await RemoteModel.find(self._node, wanted)  # raises WeightsMismatch where the offers differ
            opened = self._opened.get(_key_of(remote.info))
            return opened if opened is not None else self._remember(remote, await self._own_stages(remote))

    async def _own_stages(self, remote: RemoteModel) -> tuple[Stage, ...]:
        """Raises what loading raises: where the ends are to stay at home, nothing is answered without them."""
        own = self._own_layers
        return () if own is None else await remote.serve_own_layers(own.text, own.store, own.serving)

    def _offers(self) -> list[ShardInfo]:
        return list(self._node.orchestrator.store.models().values())

    async def _card(self, info: ShardInfo) -> ModelCard:
        """Without context length where its text side cannot be had now: the list is there all the same."""
        try:
            return (await self.open(info.model)).card
        except PotluckError:
            return ModelCard(id=info.model, weights_sha256=info.weights_sha256, created=self._first_seen(info))

    def _remember(self, remote: RemoteModel, own: tuple[Stage, ...]) -> PipelineModel:
        info, facts = remote.info, remote.facts
        card = ModelCard(
            id=info.model, weights_sha256=info.weights_sha256, created=self._first_seen(info),
            context_length=facts.context_length, architecture=facts.architecture,
        )  # fmt: skip
        params = msgspec.structs.replace(self._params, own_layers=own)
        return self._opened.setdefault(_key_of(info), PipelineModel(self._node, remote, card, params))

    def _first_seen(self, info: ShardInfo) -> int:
        return self._seen.setdefault(_key_of(info), int(time.time()))


def _common_arithmetic(stages: Sequence[Placed]) -> int:
    """Of all of them, where it gives the same bits everywhere; else 0."""
    arithmetics = {placed.arithmetic for placed in stages}
    return arithmetics.pop() if len(arithmetics) == 1 and exactness_of(arithmetics) == "bitwise" else 0


def _key_of(info: ShardInfo) -> tuple[str, str]:
    return info.model, info.weights_sha256
