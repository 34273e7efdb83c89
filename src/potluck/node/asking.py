"""A head without weights: connects to shards, gets tokenizer and template from one of them, and streams text."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

from potluck.core.errors import BadRequest, ContextLengthExceeded, PotluckError, ShardUnavailable, WeightsMismatch
from potluck.core.grammar import Grammar
from potluck.core.model_facts import ModelFacts
from potluck.core.sampling_params import SamplingParams
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.node.node import Node
from potluck.node.serving import check_tokenizer
from potluck.orchestrator.frames import Finished, PipelineAborted, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest
from potluck.orchestrator.orchestrator import DistributedChatParams
from potluck.text.chat_template import ChatTemplate
from potluck.text.detokenizer import StopMatcher, StreamingDetokenizer
from potluck.text.tokenizer import Tokenizer
from potluck.weights.manifest import Manifest
from potluck.wire.messages import Boundary, Codec, ShardInfo


class TextFrame(NamedTuple):
    """What a frame adds to the text; diagnostics add nothing."""

    frame: StreamFrame
    text: str


async def _fetch_text_side(node: Node, info: ShardInfo) -> tuple[Manifest, TokenizerSpec]:
    """Manifest and tokenizer from the first holder that has what the hash covers. Raises what the last one did wrong."""
    error: Exception = ShardUnavailable(f"nobody there serves {info.model}")
    for holder in node.orchestrator.store.holders(info.model, info.weights_sha256):
        try:
            return check_tokenizer(
                *await node.orchestrator.fetch_tokenizer(holder, info.weights_sha256), info.weights_sha256
            )
        except (PotluckError, TimeoutError) as problem:
            error = (
                problem
                if isinstance(problem, PotluckError)
                else ShardUnavailable(f"{holder.hex()[:8]} does not answer")
            )
    raise error


class RemoteModel:
    """A model that other nodes hold: its facts and text side here, its layers there."""

    def __init__(
        self, node: Node, info: ShardInfo, facts: ModelFacts, tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        self._node, self.info, self.facts, self.tokenizer, self.template = node, info, facts, tokenizer, template

    @classmethod
    async def find(cls, node: Node, name: str | None) -> "RemoteModel":
        """The model called `name`, or the only one on offer. Its tokenizer comes from a holder, checked against the hash."""
        offers = node.orchestrator.store.models()
        fitting = [info for (model, _), info in offers.items() if name in (None, model)]
        if not fitting:
            raise ShardUnavailable(f"nobody there serves {name or 'any model'}")
        names = sorted({info.model for info in fitting})
        if len(names) > 1:
            raise BadRequest(f"several models are on offer ({', '.join(names)}); choose one with --model")
        if len(fitting) > 1:
            hashes = ", ".join(sorted(info.weights_sha256[:12] for info in fitting))
            raise WeightsMismatch(
                f"{names[0]} is on offer with different weights ({hashes}); leave out one kind of holder"
            )
        info = fitting[0]
        manifest, spec = await _fetch_text_side(node, info)
        return cls(node, info, manifest.facts, Tokenizer(spec), ChatTemplate(spec.chat_template, spec))

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return self.tokenizer.encode_prompt(self.template.render(messages))

    def request(
        self, prompt: Sequence[int], params: SamplingParams, max_tokens: int, codec: Codec = "fp32",
        pipeline_edges: Sequence[int] = (), *, grammar: Grammar | None = None, prompt_logprobs: int | None = None,
    ) -> GenerationRequest:  # fmt: skip
        """What to ask for. `max_tokens` 0: only the prompt goes through, for its scores. The sampling shard judges the grammar."""
        room = self.facts.context_length - len(prompt)
        if room < min(1, max_tokens):
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; the context is {self.facts.context_length}"
            )
        boundaries = tuple(Boundary(layer, codec) for layer in pipeline_edges) if codec != "fp32" else ()
        return GenerationRequest(
            model=self.info.model, weights_sha256=self.info.weights_sha256, arithmetic=self.info.arithmetic,
            layer_count=self.facts.layer_count, prompt=tuple(prompt), max_tokens=min(max_tokens, room), params=params.check(),
            eos=tuple(sorted(self.tokenizer.eos_ids)), boundaries=boundaries, vocabulary_size=self.facts.vocabulary_size,
            grammar=grammar, prompt_logprobs=prompt_logprobs,
        )  # fmt: skip

    async def generate(
        self, request: GenerationRequest, params: DistributedChatParams, stops: Sequence[str] = ()
    ) -> AsyncIterator[TextFrame]:
        """Frames with the text that each adds. A stop string ends the generation on every shard."""
        detokenizer, matcher = StreamingDetokenizer(self.tokenizer), StopMatcher(stops)
        async for frame in self._node.orchestrator.chat(request, params):
            if isinstance(frame, Finished | PipelineAborted):
                yield TextFrame(frame, matcher.push(detokenizer.finish()).text + matcher.finish())
                return
            if not isinstance(frame, TokenDelta):
                yield TextFrame(frame, "")
                continue
            check = matcher.push(detokenizer.push(frame.token))
            yield TextFrame(frame, check.text)
            if check.stop is not None:
                return
