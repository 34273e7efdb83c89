"""The places where a request's grammar and prompt logprobs enter the pipeline, and prompt logprobs come back out of it."""

import math
from collections.abc import Sequence

import msgspec

from potluck.core.errors import BadGrammar
from potluck.core.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from potluck.gateway.choice import shown_token
from potluck.gateway.events import TokenLogprobs
from potluck.orchestrator.frames import PromptLogprobs
from potluck.orchestrator.generation import GenerationRequest
from potluck.text.detokenizer import StreamingDetokenizer
from potluck.text.tokenizer import Tokenizer


def with_grammar(request: GenerationRequest, grammar: Grammar) -> GenerationRequest:
    """The same generation, held to a grammar. Raises BadGrammar for one that is so long that no shard would read it."""
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise BadGrammar(f"a schema may have {MAX_GRAMMAR_CHARACTERS} characters, not {len(grammar.text)}")
    return msgspec.structs.replace(request, grammar=grammar)


def with_prompt_logprobs(request: GenerationRequest, count: int) -> GenerationRequest:
    """The same generation; before its first token comes a frame with the prompt's logprobs."""
    return msgspec.structs.replace(request, prompt_logprobs=count)


def prompt_logprobs_of(
    frame: object, prompt: tuple[int, ...], tokenizer: Tokenizer
) -> tuple[TokenLogprobs, ...] | None:
    """What a frame tells about the prompt; None for every other frame. The first token has none: NaN stands for it."""
    if not isinstance(frame, PromptLogprobs):
        return None
    starts = _starts((prompt[0], *(one.token for one in frame.positions)), tokenizer)
    told = [TokenLogprobs(shown_token(tokenizer, prompt[0], math.nan), starts[0])]
    for one, start in zip(frame.positions, starts[1:], strict=True):
        top = tuple(shown_token(tokenizer, token, value) for token, value in one.top)
        told.append(TokenLogprobs(shown_token(tokenizer, one.token, one.logprob), start, top))
    return tuple(told)


def without_beginning(tokens: Sequence[int], tokenizer: Tokenizer) -> Sequence[int]:
    """The mark of a text's beginning, which most models want, is nothing that anybody wrote."""
    return tokens[1:] if tokens and tokens[0] == tokenizer.spec.bos_id else tokens


def _starts(tokens: tuple[int, ...], tokenizer: Tokenizer) -> list[int]:
    """In the text of the prompt, the place of the first character that each token has a part in."""
    detokenizer = StreamingDetokenizer(tokenizer, skip_special=False)
    shown = without_beginning(tokens, tokenizer)
    starts, made = [0] * (len(tokens) - len(shown)), 0
    for token in shown:
        starts.append(made + detokenizer.characters_before(token))
        made += len(detokenizer.push(token))
    return starts
