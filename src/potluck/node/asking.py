"""A head without weights: connects to shards, gets tokenizer and template from one of them, and streams text."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from potluck.core.errors import (
    BadRequest,
    ContextLengthExceeded,
    ModelNotFound,
    PotluckError,
    ShardUnavailable,
    WeightsMismatch,
)
from potluck.core.exactness import Exactness, exactness_of
from potluck.core.grammar import Grammar
from potluck.core.model_facts import ModelFacts
from potluck.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.node.node import Node
from potluck.node.serving import (
    ServingSettings,
    check_tokenizer,
    own_copy,
    parse_own_layers,
    parse_stage,
    read_stored_model,
    serve,
    started,
)
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.shard.server import ShardServer
from potluck.text.chat_template import ChatTemplate
from potluck.text.detokenizer import StopMatcher, StreamingDetokenizer
from potluck.text.tokenizer import Tokenizer
from potluck.weights.manifest import Manifest
from potluck.weights.store import ModelStore
from potluck.wire.messages import Boundary, Codec, ShardInfo, Stage


class TextFrame(NamedTuple):
    """What a frame adds to the text; diagnostics add nothing."""

    frame: StreamFrame
    text: str


class ChoiceFrame(NamedTuple):
    """A frame of one of several answers to the same prompt, which are counted from 0."""

    choice: int
    frame: StreamFrame
    text: str


_ASK_NEXT_AFTER_S = 5.0  # without a tokenizer from whoever was asked before
_MOST_ASKED_AT_ONCE = 2
_CHOICES_AHEAD = 16  # frames that wait for a slow reader; no answer runs further ahead than its credits


async def _fetch_text_side(node: Node, info: ShardInfo) -> tuple[Manifest, TokenizerSpec]:
    """Manifest and tokenizer from the first holder that sends what the hash covers. Raises what the last one did wrong.

    Whoever is silent may be on a slow line: another is asked as well, and the first answer counts. No more than that, as the slow line may
    be our own.
    """
    error: Exception = ShardUnavailable(f"nobody there serves {info.model}")
    left = deque(node.orchestrator.store.holders(info.weights_sha256))
    asked: list[asyncio.Task[tuple[Manifest, TokenizerSpec]]] = []
    waiting: set[asyncio.Task[tuple[Manifest, TokenizerSpec]]] = set()
    try:
        while waiting or left:
            if left and len(waiting) < _MOST_ASKED_AT_ONCE:
                asked.append(asyncio.create_task(_text_side_of(left.popleft(), node, info.weights_sha256)))
                waiting.add(asked[-1])
            patience_s = _ASK_NEXT_AFTER_S if left and len(waiting) < _MOST_ASKED_AT_ONCE else None
            done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (problem := task.exception()) is None:
                    return task.result()
                if not isinstance(problem, PotluckError):
                    raise problem
                error = problem
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # those too that ended together with the first answer
    raise error


async def _text_side_of(holder: bytes, node: Node, weights_sha256: str) -> tuple[Manifest, TokenizerSpec]:
    try:
        manifest, tokenizer = await node.orchestrator.fetch_tokenizer(holder, weights_sha256)
    except TimeoutError:
        raise ShardUnavailable(f"{holder.hex()[:8]} does not answer") from None
    return check_tokenizer(manifest, tokenizer, weights_sha256)


def _note_first(stages: tuple[Placed, ...], first: list[Placed], params: DistributedChatParams) -> None:
    first += () if first else stages
    if params.on_stages is not None:
        params.on_stages(stages)


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
            if offers:
                raise ModelNotFound(f"nobody there serves {name}; there is {', '.join(sorted({m for m, _ in offers}))}")
            raise ShardUnavailable("nobody there serves any model")
        names = sorted({info.model for info in fitting})
        is_one = len({info.weights_sha256 for info in fitting}) == 1  # whatever its holders call it
        if len(names) > 1 and not is_one:
            raise BadRequest(f"several models are on offer ({', '.join(names)}); choose one with --model")
        if not is_one:
            hashes = ", ".join(sorted(info.weights_sha256[:12] for info in fitting))
            raise WeightsMismatch(
                f"{names[0]} is on offer with different weights ({hashes}); leave out one kind of holder"
            )
        info = min(fitting, key=lambda info: info.model)
        manifest, spec = await _fetch_text_side(node, info)
        return cls(node, info, manifest.facts, Tokenizer(spec), ChatTemplate(spec.chat_template, spec))

    async def serve_own_layers(self, text: str, store: ModelStore, settings: ServingSettings) -> tuple[Stage, ...]:
        """Loads this node's own ends of the model, as people write them (`0-4,25-output`), from its store; ready on return.

        Raises BadRequest for ranges that cannot be a coordinator's, ModelNotFound, WeightsMismatch, and what loading raises.
        """
        own = parse_own_layers(text, self.facts.layer_count)
        name = own_copy(store, self.info.model, self.info.weights_sha256)
        stored = msgspec.structs.replace(read_stored_model(store, name), id=self.info.model)
        servers: list[ShardServer] = []
        loads: list[asyncio.Future[None]] = []
        try:
            for stage in own:
                servers.append(serve(self._node, stored, stage, settings))
            loads = [asyncio.ensure_future(started(server)) for server in servers]
            await asyncio.gather(*loads)
        except BaseException:  # also where whoever asked has gone: the next one would load it all once more
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, *map(self._node.remove_shard, servers), return_exceptions=True)
            raise
        return own

    def offer_own_copy(self, store: ModelStore, settings: ServingSettings) -> bool:
        """Where this machine has the same weights, all of them: they are used when others fail, and not loaded before."""
        entry = store.find_weights(self.info.weights_sha256)
        if entry is None or entry.format == "partial":
            return False
        stored = msgspec.structs.replace(read_stored_model(store, entry.id), id=self.info.model)
        serve(self._node, stored, parse_stage(None, self.facts.layer_count), settings)
        return True

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
        if prompt_logprobs is not None and not 0 <= prompt_logprobs <= MAX_TOP_LOGPROBS:
            raise BadRequest(f"at most {MAX_TOP_LOGPROBS} top logprobs can be had, not {prompt_logprobs}")
        boundaries = tuple(Boundary(layer, codec) for layer in pipeline_edges) if codec != "fp32" else ()
        return GenerationRequest(
            model=self.info.model, weights_sha256=self.info.weights_sha256, arithmetic=self.info.arithmetic,
            layer_count=self.facts.layer_count, prompt=tuple(prompt), max_tokens=min(max_tokens, room), params=params.check(),
            eos=tuple(sorted(self.tokenizer.eos_ids)), boundaries=boundaries, vocabulary_size=self.facts.vocabulary_size,
            grammar=grammar, prompt_logprobs=prompt_logprobs, hidden_size=self.facts.hidden_size,
        )  # fmt: skip

    async def generate(
        self, request: GenerationRequest, params: DistributedChatParams, stops: Sequence[str] = ()
    ) -> AsyncGenerator[TextFrame, None]:
        """Frames with the text that each adds. A stop string ends the generation on every shard. The last frame is an end."""
        detokenizer, matcher = StreamingDetokenizer(self.tokenizer), StopMatcher(stops)
        tokens = failovers = 0
        began_with: list[Placed] = []
        watched = msgspec.structs.replace(params, on_stages=lambda stages: _note_first(stages, began_with, params))
        exactness: Exactness | None = None
        async with aclosing(self._node.orchestrator.chat(request, watched)) as frames:
            async for frame in frames:
                if isinstance(frame, Finished | PipelineAborted):
                    yield TextFrame(frame, matcher.push(detokenizer.finish()).text + matcher.finish())
                    return
                if isinstance(frame, ShardFailover):
                    failovers, exactness = failovers + 1, frame.exactness
                if not isinstance(frame, TokenDelta):
                    yield TextFrame(frame, "")
                    continue
                tokens += 1
                check = matcher.push(detokenizer.push(frame.token))
                yield TextFrame(frame, check.text)
                if check.stop is not None:
                    level = exactness or exactness_of({placed.arithmetic for placed in began_with})
                    yield TextFrame(Finished("stop", tokens, failovers, level), "")
                    return

    async def generate_choices(
        self, request: GenerationRequest, params: DistributedChatParams, count: int, stops: Sequence[str] = ()
    ) -> AsyncGenerator[ChoiceFrame, None]:
        """`count` answers at once, which differ in their choice alone; each ends with its own Finished.

        Where one is aborted that is the last frame, and where one cannot start its error is raised: the others are cancelled.
        Closing this closes all of them, and frees every shard.
        """
        ready: asyncio.Queue[ChoiceFrame | Exception | None] = asyncio.Queue(_CHOICES_AHEAD)

        async def run(choice: int) -> None:
            one = msgspec.structs.replace(request, choice=request.choice + choice)
            try:
                async with aclosing(self.generate(one, params, stops)) as frames:
                    async for frame, text in frames:
                        await ready.put(ChoiceFrame(choice, frame, text))
                await ready.put(None)
            except Exception as error:  # raised again, where somebody waits for it
                await ready.put(error)

        tasks = [asyncio.create_task(run(choice)) for choice in range(count)]
        try:
            while count:
                said = await ready.get()
                if isinstance(said, Exception):
                    raise said
                if said is None:
                    count -= 1
                    continue
                yield said
                if isinstance(said.frame, PipelineAborted):
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
