"""What the gateway needs from below: which models there are, and answers from them. Interfaces only.

The real implementation is the node's, over shards; `testing` has one in memory for load tests.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from potluck.core.exactness import Exactness
from potluck.core.model_facts import ModelFacts
from potluck.core.remembered import Accounts
from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.frames import StreamFrame
from potluck.orchestrator.generation import GenerationRequest
from potluck.text.chat_template import ChatTemplate
from potluck.text.tokenizer import Tokenizer
from potluck.wire.messages import Boundary


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model as lists show it. `created` is in seconds of the epoch: when this node first saw it."""

    id: str
    weights_sha256: str
    created: int
    context_length: int | None = None  # None where its holder cannot be asked now
    architecture: str = "unknown"


class Answer(Protocol):
    """One generation."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of all nodes that have taken part so far."""

    @property
    def exactness(self) -> Exactness:
        """As far as the stages say that it began with; frames tell of changes."""

    @property
    def arithmetic(self) -> int:
        """The one that all stages began with, where anybody who computes by it chooses the same tokens; 0: not so, or not known."""

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """Where its activations are rounded, as known when it has begun."""

    def frames(self) -> AsyncIterator[StreamFrame]:
        """To the end; closing the iterator early ends the generation on every shard. Can be called once."""


class OpenModel(Protocol):
    """A model that can be asked: its text side is here, whoever holds its layers."""

    @property
    def card(self) -> ModelCard: ...
    @property
    def facts(self) -> ModelFacts: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate: ...

    def request(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> GenerationRequest:
        """Raises ContextLengthExceeded where the prompt leaves no room; cuts `max_tokens` to the room there is."""

    def check(self, request: GenerationRequest) -> None:
        """Raises ShardUnavailable with what is missing where no pipeline can be had now."""

    def arithmetic_of(self, request: GenerationRequest) -> int:
        """As `Answer.arithmetic`, of the pipeline that it would get now."""

    async def recall(self, secret: bytes, most_tokens: int) -> Accounts:
        """What nodes remember of an answer that broke off; with its prompt it cannot be longer than `most_tokens`."""

    def start(self, request: GenerationRequest, label: str = "") -> Answer:
        """Nothing is sent before the first frame is asked for. `label`: what the page calls the request."""


class Answering(Protocol):
    """All models that this node can answer with."""

    async def models(self) -> list[ModelCard]: ...

    async def open(self, name: str | None) -> OpenModel:
        """The model of that name; None: the only one. Raises ModelNotFound, or BadRequest where there are several."""

    def metrics_page(self) -> bytes: ...
