"""The places where a request's grammar and prompt logprobs enter the pipeline, and prompt logprobs come back out of it."""

from typing import NoReturn

from potluck.core.errors import UnsupportedParameter
from potluck.gateway.events import TokenLogprobs
from potluck.gateway.request import Grammar
from potluck.orchestrator.frames import StreamFrame
from potluck.orchestrator.generation import GenerationRequest
from potluck.text.tokenizer import Tokenizer


def with_grammar(request: GenerationRequest, grammar: Grammar) -> GenerationRequest:
    """The same generation, held to a grammar."""
    _refuse(f"output held to a grammar ({grammar.kind})", "response_format")


def with_prompt_logprobs(request: GenerationRequest, count: int) -> GenerationRequest:
    """The same generation; before its first token comes a frame with the prompt's logprobs."""
    _refuse("the prompt's own logprobs", "echo")


def prompt_logprobs_of(frame: StreamFrame, tokenizer: Tokenizer) -> tuple[TokenLogprobs, ...] | None:
    """What a frame tells about the prompt; None for every other frame."""
    return None


def _refuse(what: str, param: str) -> NoReturn:
    raise UnsupportedParameter(f"{what} cannot be had from this pipeline yet", param)
