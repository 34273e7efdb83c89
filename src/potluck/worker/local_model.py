"""A whole model in this process: prompt in, tokens and text out. What `potluck ask` uses where there is only one machine.

The engine is driven through the same steps as over a network; what a token is depends on tokens, parameters and seed alone.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from potluck.core.errors import ContextLengthExceeded, PotluckError
from potluck.core.grammar import Grammar
from potluck.core.layers import LayerRange
from potluck.core.processors import usable_cores
from potluck.core.sampling_params import SamplingParams
from potluck.engine.cpu_engine import CpuEngine
from potluck.engine.sampling import Chosen, choose
from potluck.engine.shard_engine import EngineSettings, Notice, Step
from potluck.text.chat_template import ChatTemplate
from potluck.text.detokenizer import StopMatcher, StreamingDetokenizer
from potluck.text.grammar import GrammarCompiler, GrammarMatcher
from potluck.text.tokenizer import Tokenizer
from potluck.weights.checkpoint import Checkpoint
from potluck.wire.prompt_scores import TokenScore
from potluck.worker.prompt_scoring import score_rows

_PREFILL_CHUNK = 256
_KV_BUDGET_BYTES = 8 << 30


class Piece(NamedTuple):
    """What one token added. `text` may be empty (half a character, or held back for a stop string)."""

    chosen: Chosen | None
    text: str
    finish_reason: str | None = None


class Timing(NamedTuple):
    prompt_tokens: int
    generated_tokens: int
    first_token_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of decoding: the first token belongs to the prompt."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 and self.decode_s > 0 else 0.0


class LocalModel:
    """Engine, tokenizer and template of one model. Close it to give the memory back."""

    def __init__(
        self, checkpoint: Checkpoint, *, source: str, cache_folder: Path | None, threads: int | None = None,
        notice: Notice | None = None,
    ) -> None:  # fmt: skip
        spec = checkpoint.tokenizer
        if spec is None:
            raise PotluckError(f"{checkpoint.facts.name} has no tokenizer; it cannot be asked anything")
        self.facts = checkpoint.facts
        self.tokenizer = Tokenizer(spec)
        self.template = ChatTemplate(spec.chat_template, spec)
        self.timing: Timing | None = None
        self._grammars: GrammarCompiler | None = None
        settings = EngineSettings(
            layers=LayerRange(0, self.facts.layer_count), threads=min(threads or usable_cores(), usable_cores()), source=source,
            cache_folder=cache_folder, kv_budget_bytes=_KV_BUDGET_BYTES,
        )  # fmt: skip
        self.engine = CpuEngine(checkpoint, settings, notice)

    def close(self) -> None:
        self.engine.close()

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return self.tokenizer.encode_prompt(self.template.render(messages))

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, max_tokens: int, stops: Sequence[str] = (),
        grammar: Grammar | None = None,
    ) -> Iterator[Piece]:  # fmt: skip
        """Streams pieces; the last one has a finish reason (`stop` or `length`). `timing` is set when it ends."""
        room = self.facts.context_length - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens and this model's context is {self.facts.context_length}"
            )
        limit = min(max_tokens, room)
        matcher = None if grammar is None else self._matcher(grammar)
        session = self.engine.open(len(prompt) + limit)
        try:
            chosen = self._tokens(session, list(prompt), params.check(), limit, matcher)
            yield from self._pieces(chosen, len(prompt), stops)
        finally:
            self.engine.close_session(session)

    def score_prompt(self, prompt: Sequence[int], top: int) -> list[TokenScore]:
        """How likely each token of the prompt but the first was."""
        session = self.engine.open(len(prompt))
        scores: list[TokenScore] = []
        try:
            for begin in range(0, len(prompt), _PREFILL_CHUNK):
                chunk = list(prompt[begin : begin + _PREFILL_CHUNK])
                [result] = self.engine.forward([Step(session, begin, tokens=chunk)])
                following = prompt[begin + 1 : begin + len(chunk) + 1]
                scores += score_rows(self.engine, session, result.hidden, following, top)
        finally:
            self.engine.close_session(session)
        return scores

    def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer.spec, self.facts.vocabulary_size)
        return self._grammars.matcher(grammar)

    def _pieces(self, tokens: Iterator[Chosen], prompt_tokens: int, stops: Sequence[str]) -> Iterator[Piece]:
        detokenizer, matcher = StreamingDetokenizer(self.tokenizer), StopMatcher(stops)
        start = first = time.perf_counter()
        count = 0
        reason = None
        for chosen in tokens:
            count += 1
            if count == 1:
                first = time.perf_counter()
            if chosen.token in self.tokenizer.eos_ids:
                reason = "stop"
                break
            check = matcher.push(detokenizer.push(chosen.token))
            yield Piece(chosen, check.text)
            if check.stop is not None:
                reason = "stop"
                break
        tail = "" if matcher.is_stopped else matcher.push(detokenizer.finish()).text + matcher.finish()
        self.timing = Timing(prompt_tokens, count, first - start, time.perf_counter() - first)
        yield Piece(None, tail, reason or "length")

    def _tokens(
        self, session: int, prompt: list[int], params: SamplingParams, limit: int, matcher: GrammarMatcher | None
    ) -> Iterator[Chosen]:
        for begin in range(0, len(prompt), _PREFILL_CHUNK):
            chunk = prompt[begin : begin + _PREFILL_CHUNK]
            wanted = [len(chunk) - 1] if begin + len(chunk) == len(prompt) else []
            [result] = self.engine.forward([Step(session, begin, tokens=chunk, logits=wanted)])
        generated: list[int] = []
        while True:
            assert result.logits is not None
            position = len(prompt) + len(generated)
            mask = None
            if matcher is not None:
                matcher.advance_to(generated)
                mask = matcher.allowed()
            chosen = choose(result.logits[0], params, position=position, prompt=prompt, generated=generated, mask=mask)
            generated.append(chosen.token)
            yield chosen
            if len(generated) == limit:
                return
            [result] = self.engine.forward([Step(session, position, tokens=[chosen.token], logits=[0])])
