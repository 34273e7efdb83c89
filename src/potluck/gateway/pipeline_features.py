"""The places where a request's grammar and prompt logprobs enter the pipeline, and prompt logprobs come back out of it.

A pipeline that lacks one of them is not asked for it: the client gets `unsupported_parameter`.
"""

import math
from typing import Any

import msgspec

from potluck.core.errors import UnsupportedParameter
from potluck.core.grammar import Grammar
from potluck.gateway.choice import shown_token
from potluck.gateway.events import TokenLogprobs
from potluck.orchestrator.generation import GenerationRequest
from potluck.text.tokenizer import Tokenizer

_KNOWN = frozenset(field.name for field in msgspec.structs.fields(GenerationRequest))


def with_grammar(request: GenerationRequest, grammar: Grammar) -> GenerationRequest:
    """The same generation, held to a grammar."""
    return _with(request, "grammar", grammar, "response_format")


def with_prompt_logprobs(request: GenerationRequest, count: int) -> GenerationRequest:
    """The same generation; before its first token comes a frame with the prompt's logprobs."""
    return _with(request, "prompt_logprobs", count, "echo")


def prompt_logprobs_of(
    frame: object, prompt: tuple[int, ...], tokenizer: Tokenizer
) -> tuple[TokenLogprobs, ...] | None:
    """What a frame tells about the prompt; None for every other frame. The first token has none: NaN stands for it."""
    positions: Any = getattr(frame, "positions", None)
    if positions is None:
        return None
    told = [TokenLogprobs(shown_token(tokenizer, prompt[0], math.nan))]
    for one in positions:
        top = tuple(shown_token(tokenizer, token, value) for token, value in one.top)
        told.append(TokenLogprobs(shown_token(tokenizer, one.token, one.logprob), top))
    return tuple(told)


def _with(request: GenerationRequest, name: str, value: object, param: str) -> GenerationRequest:
    if name not in _KNOWN:
        raise UnsupportedParameter(f"this pipeline knows no {name}", param)
    changes: dict[str, Any] = {name: value}
    return msgspec.structs.replace(request, **changes)
