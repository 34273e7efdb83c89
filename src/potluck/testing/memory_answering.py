"""Models without numbers, for the gateway's tests and load tests: a real tokenizer and template, tokens that a script chooses.

Deterministic: the same request gets the same answer. A generation can be slow, fail in the middle, or count who leaves it early.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from potluck.core.errors import ContextLengthExceeded, ModelNotFound
from potluck.core.exactness import Exactness
from potluck.core.model_facts import ModelFacts, Rotary
from potluck.core.remembered import Accounts, AnswerSoFar, resume_key
from potluck.core.sampling_params import SamplingParams
from potluck.core.tokenizer_spec import CONTROL, NORMAL, TokenizerSpec
from potluck.gateway.answering import ModelCard
from potluck.orchestrator.frames import Finished, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest
from potluck.text.byte_characters import bytes_to_characters
from potluck.text.chat_template import ChatTemplate
from potluck.text.tokenizer import Tokenizer
from potluck.wire.messages import Boundary

_MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_ECHO_TEXT = "Everyone brings a dish, and everyone eats."
Script = Callable[[GenerationRequest], str]


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """One token for each byte, after three marks."""
    characters = [bytes_to_characters(bytes([byte])) for byte in range(256)]
    return Tokenizer(
        TokenizerSpec(
            algorithm="byte_bpe",
            tokens=(*_MARKS, *characters),
            kinds=(*(CONTROL for _ in _MARKS), *(NORMAL for _ in characters)),
            eos_ids=(1, 2),
            bos_id=0,
            split_patterns=(r"\s+|\S+",),
            chat_template=chat_template,
        )
    )


def _facts(tokenizer: Tokenizer, context_length: int) -> ModelFacts:
    return ModelFacts(
        architecture="llama", name="memory", layer_count=2, hidden_size=8, feed_forward_size=16, head_count=1,
        kv_head_count=1, head_size=8, vocabulary_size=tokenizer.vocabulary_size, context_length=context_length,
        norm_epsilon=1e-5, rotary=Rotary("halves", 10_000.0, 8), attention_scale=0.35,
    )  # fmt: skip


class MemoryAnswer:
    def __init__(self, model: "MemoryModel", request: GenerationRequest) -> None:
        self._model, self._request = model, request

    @property
    def nodes(self) -> tuple[str, ...]:
        return ("aa" * 32, "bb" * 32)

    @property
    def exactness(self) -> Exactness:
        return "bitwise"

    @property
    def arithmetic(self) -> int:
        return self._model.arithmetic

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        return self._request.boundaries

    async def frames(self) -> AsyncIterator[StreamFrame]:
        model = self._model
        model.running += 1
        model.most_running = max(model.most_running, model.running)
        try:
            await asyncio.sleep(model.prefill_s)
            async for frame in self._tokens():
                yield frame
            model.completed += 1
        finally:
            model.running -= 1

    async def _tokens(self) -> AsyncIterator[StreamFrame]:
        model, request = self._model, self._request
        tokens = model.tokenizer.encode(model.script(request), parse_special=True, add_special=False)
        count = 0
        for token in [*tokens, request.eos[0]]:
            for frame in model.frames_before.get(count, ()):
                yield frame
            if request.max_tokens == 0:
                break
            if count >= len(request.begun):
                await asyncio.sleep(model.step_s)
            count += 1
            if count <= len(request.begun):
                continue
            yield _delta(request, token, count)
            if token in request.eos or count == request.max_tokens:
                break
        yield Finished("stop" if count > len(tokens) else "length", count, 0)


def _delta(request: GenerationRequest, token: int, count: int) -> TokenDelta:
    position = len(request.prompt) + count - 1
    if request.params.logprobs is None:
        return TokenDelta(token, position)
    others = [(token, -0.5), *((3 + i, -1.5 - i) for i in range(request.params.logprobs))]
    return TokenDelta(token, position, -0.5, tuple(others[: request.params.logprobs]))


class MemoryModel:
    """`script` says what a request is answered with; `frames_before[i]` come before token i."""

    def __init__(self, name: str, script: Script, context_length: int, chat_template: str | None) -> None:
        self.tokenizer = byte_tokenizer(chat_template)
        self.template = ChatTemplate(chat_template, self.tokenizer.spec)
        self.facts = _facts(self.tokenizer, context_length)
        self.card = ModelCard(
            id=name,
            weights_sha256="ab" * 32,
            created=1_700_000_000,
            context_length=context_length,
            architecture="llama",
        )
        self.script = script
        self.prefill_s = self.step_s = 0.0
        self.frames_before: dict[int, Sequence[StreamFrame]] = {}
        self.running = self.most_running = self.completed = 0
        self.refusal: Exception | None = None
        self.arithmetic = 1  # 0: answers need not come out the same
        self.remembered: dict[bytes, AnswerSoFar] = {}  # by resume key
        self.told: dict[bytes, Sequence[AnswerSoFar]] = {}  # by others
        self.requests: list[GenerationRequest] = []  # all that were started

    def request(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> GenerationRequest:
        room = self.facts.context_length - len(prompt)
        if room < min(1, max_tokens):
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; the context is {self.facts.context_length}"
            )
        return GenerationRequest(
            model=self.card.id, weights_sha256=self.card.weights_sha256, arithmetic=1, layer_count=2, prompt=tuple(prompt),
            max_tokens=min(max_tokens, room), params=params.check(), eos=(1, 2), vocabulary_size=self.facts.vocabulary_size,
        )  # fmt: skip

    def check(self, request: GenerationRequest) -> None:
        if self.refusal is not None:
            raise self.refusal

    def arithmetic_of(self, request: GenerationRequest) -> int:
        return self.arithmetic

    async def recall(self, secret: bytes, most_tokens: int) -> Accounts:
        key = resume_key(secret)
        return Accounts(self.remembered.get(key), tuple(self.told.get(key, ())))

    def start(self, request: GenerationRequest, label: str = "") -> MemoryAnswer:
        self.requests.append(request)
        return MemoryAnswer(self, request)


class MemoryAnswering:
    """One model, or several of the same kind."""

    def __init__(
        self, text: str | Script = _ECHO_TEXT, *, names: Sequence[str] = ("memory",), context_length: int = 4096,
        chat_template: str | None = None,
    ) -> None:  # fmt: skip
        def constant(request: GenerationRequest) -> str:
            assert isinstance(text, str)
            return text

        script = constant if isinstance(text, str) else text
        self._models = {name: MemoryModel(name, script, context_length, chat_template) for name in names}

    @property
    def model(self) -> MemoryModel:
        return next(iter(self._models.values()))

    def metrics_page(self) -> bytes:
        return b""

    async def models(self) -> list[ModelCard]:
        return [model.card for model in self._models.values()]

    async def open(self, name: str | None) -> MemoryModel:
        if name is None:
            return self.model
        if name not in self._models:
            raise ModelNotFound(f"no model of that name is on offer; there is {', '.join(self._models)}")
        return self._models[name]


def prompt_text(model: MemoryModel, request: GenerationRequest) -> str:
    """What a request asks, as text: for scripts that answer with it."""
    return model.tokenizer.decode(request.prompt)


__all__ = ["MemoryAnswer", "MemoryAnswering", "MemoryModel", "byte_tokenizer", "prompt_text"]
