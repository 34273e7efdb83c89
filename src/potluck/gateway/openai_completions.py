"""POST /v1/completions: text or token ids to continue, with `echo` and `logprobs` as evaluation harnesses need them."""

import math
import secrets

import msgspec

from potluck.core.errors import BadRequest, UnsupportedParameter
from potluck.core.sampling_params import MAX_TOP_LOGPROBS
from potluck.gateway.error_table import openai_error
from potluck.gateway.events import ChoiceFinished, Event, PromptShown, TextDelta, TokenLogprobs, Usage
from potluck.gateway.openai_chat import StreamOptions, openai_usage
from potluck.gateway.reading import (
    MAX_CHOICES,
    MAX_PROMPTS,
    checked_count,
    checked_limit,
    read_body,
    refuse,
    sampling_params,
    stop_strings,
)
from potluck.gateway.request import InferenceRequest, Json
from potluck.gateway.surface import NAME_BYTES, SSE, CollectedChoice, sse, sse_comment

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_REFUSED: dict[str, tuple[object, ...]] = {
    "best_of": (1,), "suffix": ("",), "typical_p": (1, 1.0), "mirostat": (0,), "tfs_z": (1, 1.0), "min_tokens": (0,),
    "ignore_eos": (False,), "guided_json": (), "guided_regex": (), "guided_grammar": (), "guided_choice": (), "grammar": ("",),
    "json_schema": (), "structured_outputs": (), "use_beam_search": (False,), "bad_words": ([],), "allowed_token_ids": (),
    "stop_token_ids": ([],), "response_format": ({"type": "text"},), "prompt_logprobs": (0,), "truncate_prompt_tokens": (),
    "images": ([],), "include_stop_str_in_output": (False,), "prompt_embeds": (), "skip_special_tokens": (True,),
}  # fmt: skip


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | bool | None = None
    echo: bool = False
    n: int = 1


def read_completion(data: bytes, created: int) -> tuple[InferenceRequest, "CompletionSurface"]:
    body, raw = read_body(data, CompletionBody)
    refuse(raw, _REFUSED)
    logprobs = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {logprobs}", "logprobs")
    if body.stream and body.echo and logprobs is not None:
        raise UnsupportedParameter("echo with logprobs cannot be streamed", "stream")
    request = InferenceRequest(
        model=body.model,
        prompts=_prompts(body.prompt),
        params=sampling_params(raw, temperature=1.0, logprobs=logprobs),
        max_tokens=_max_tokens(body.max_tokens, scores_prompt=body.echo and logprobs is not None),
        n=checked_count(body.n, MAX_CHOICES, "n"),
        stops=stop_strings(body.stop),
        wants_logprobs=logprobs is not None,
        echoes_prompt=body.echo,
    )
    return request, CompletionSurface(body.model or "", created, body.stream, body.stream_options.include_usage)


def _max_tokens(given: int | None, *, scores_prompt: bool) -> int | None:
    """None at all are enough for whoever only wants the prompt's own log probabilities."""
    if given == 0 and scores_prompt:
        return 0
    return checked_limit(_DEFAULT_MAX_TOKENS if given is None else given, "max_tokens")


def _prompts(given: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return (given,)
    if given and all(isinstance(part, int) for part in given):
        return (tuple(part for part in given if isinstance(part, int)),)
    prompts = tuple(part if isinstance(part, str) else tuple(part) for part in given if not isinstance(part, int))
    if len(prompts) != len(given) or not 0 < len(prompts) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must be a text, token ids, or a list of at most {MAX_PROMPTS} of either", "prompt")
    return prompts


class CompletionSurface:
    media_type = SSE

    def __init__(self, model: str, created: int, is_streaming: bool, includes_usage: bool) -> None:
        self.is_streaming = is_streaming
        self._includes_usage = includes_usage
        self.model = model
        self.answer_as(secrets.token_bytes(NAME_BYTES), created)

    def answer_as(self, name: bytes, created: int) -> None:
        self.name, self.created = name, created
        self.request_id = f"cmpl-{name.hex()}"

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return sse(self._envelope([_choice(event.choice, event.text, event.logprobs, None)]))
        if isinstance(event, ChoiceFinished):
            return sse(self._envelope([_choice(event.choice, "", (), event.reason)]))
        if isinstance(event, PromptShown):
            raise UnsupportedParameter("echo with logprobs cannot be streamed", "stream")
        return b""

    def end(self, usage: Usage) -> bytes:
        last = sse(self._envelope([]) | {"usage": openai_usage(usage)}) if self._includes_usage else b""
        return last + b"data: [DONE]\n\n"

    def failure(self, error: Exception) -> bytes:
        return sse(openai_error(error))

    def keep_alive(self) -> bytes:
        return sse_comment("still at work")

    def body(self, choices: list[CollectedChoice], usage: Usage) -> Json:
        shown = [
            _choice(choice.index, choice.text, (*choice.prompt, *choice.logprobs), choice.reason) for choice in choices
        ]
        return self._envelope(shown) | {"usage": openai_usage(usage)}

    def error_body(self, error: Exception) -> Json:
        return openai_error(error)

    def _envelope(self, choices: list[Json]) -> Json:
        return {
            "id": self.request_id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip


def _choice(index: int, text: str, logprobs: tuple[TokenLogprobs, ...], reason: str | None) -> Json:
    shown = _logprobs(logprobs) if logprobs else None
    return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}


def _logprobs(each: tuple[TokenLogprobs, ...]) -> Json:
    """Four lists side by side. The first token of a prompt has no logprob: null, as in OpenAI's own."""
    values = [None if math.isnan(one.chosen.logprob) else one.chosen.logprob for one in each]
    tops: list[Json | None] = [
        None if value is None else _top(logprobs) for value, logprobs in zip(values, each, strict=True)
    ]
    return {
        "tokens": [logprobs.chosen.text for logprobs in each],
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [logprobs.start for logprobs in each],
    }


def _top(logprobs: TokenLogprobs) -> Json:
    """By text, the chosen one included; where two tokens read alike, the likelier stays."""
    shown: Json = {}
    for token in sorted((logprobs.chosen, *logprobs.top), key=lambda token: token.logprob):
        shown[token.text] = token.logprob
    return shown
