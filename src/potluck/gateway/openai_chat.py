"""POST /v1/chat/completions: OpenAI's chat, to the byte as its SDKs expect it."""

import secrets
from typing import Any

import msgspec

from potluck.core.errors import BadRequest
from potluck.gateway.conversations import check_together, conversation, read_response_format
from potluck.gateway.error_table import openai_error
from potluck.gateway.events import (
    ChoiceFinished,
    Event,
    ShownToken,
    TextDelta,
    TokenLogprobs,
    ToolCallArguments,
    ToolCallStarted,
    Usage,
)
from potluck.gateway.reading import (
    MAX_CHOICES,
    checked_count,
    checked_limit,
    read_body,
    refuse,
    sampling_params,
    stop_strings,
)
from potluck.gateway.request import InferenceRequest, Json
from potluck.gateway.surface import NAME_BYTES, SSE, CollectedChoice, potluck_usage, sse, sse_comment

# Fields that would change the output, with the values that do not. What is not named here and not a field is harmless.
_REFUSED: dict[str, tuple[object, ...]] = {
    "audio": (), "modalities": (["text"],), "web_search_options": (), "functions": ([],), "function_call": ("none", "auto"),
    "best_of": (1,), "typical_p": (1, 1.0), "mirostat": (0,), "tfs_z": (1, 1.0), "min_tokens": (0,), "ignore_eos": (False,),
    "guided_json": (), "guided_regex": (), "guided_grammar": (), "guided_choice": (), "grammar": ("",), "json_schema": (),
    "structured_outputs": (), "length_penalty": (1, 1.0), "use_beam_search": (False,), "bad_words": ([],), "allowed_token_ids": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (), "documents": ([],), "verbosity": ("medium",),
    "stop_token_ids": ([],), "include_stop_str_in_output": (False,), "dry_multiplier": (0, 0.0), "xtc_probability": (0, 0.0),
    "min_new_tokens": (0,), "prompt_logprobs": (0,), "truncate_prompt_tokens": (), "skip_special_tokens": (True,),
}  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
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
    logprobs: bool = False
    top_logprobs: int | None = None
    n: int = 1
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


def read_chat(data: bytes, created: int) -> tuple[InferenceRequest, "ChatSurface"]:
    body, raw = read_body(data, ChatBody)
    refuse(raw, _REFUSED)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs", "top_logprobs")
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    held = conversation(
        body.messages, body.tools, body.tool_choice,
        allows_parallel_calls=body.parallel_tool_calls, template_variables=variables,
    )  # fmt: skip
    grammar = read_response_format(body.response_format)
    check_together(grammar, held)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    request = InferenceRequest(
        model=body.model,
        conversation=held,
        params=sampling_params(raw, temperature=1.0, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        max_tokens=checked_limit(getattr(body, limit_name), limit_name),
        n=checked_count(body.n, MAX_CHOICES, "n"),
        stops=stop_strings(body.stop),
        grammar=grammar,
        wants_logprobs=body.logprobs,
    )
    return request, ChatSurface(body.model or "", created, body.stream, body.stream_options.include_usage, body.n)


class ChatSurface:
    media_type = SSE

    def __init__(self, model: str, created: int, is_streaming: bool, includes_usage: bool, n: int) -> None:
        self.is_streaming = is_streaming
        self._includes_usage, self._n = includes_usage, n
        self.model = model
        self.answer_as(secrets.token_bytes(NAME_BYTES), created)

    def answer_as(self, name: bytes, created: int) -> None:
        self.name, self.created = name, created
        self.request_id = f"chatcmpl-{name.hex()}"

    def begin(self, prompt_tokens: int) -> bytes:
        return b"".join(self._delta(n, {"role": "assistant", "content": ""}) for n in range(self._n))

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._delta(event.choice, {"content": event.text}, logprobs=event.logprobs)
        if isinstance(event, ToolCallStarted):
            call = {"index": event.index, **_call(event.call_id, event.name, "")}
            return self._delta(event.choice, {"tool_calls": [call]})
        if isinstance(event, ToolCallArguments):
            piece = {"index": event.index, "function": {"arguments": event.text}}
            return self._delta(event.choice, {"tool_calls": [piece]})
        if isinstance(event, ChoiceFinished):
            return self._delta(event.choice, {}, reason=event.reason)
        return b""

    def end(self, usage: Usage) -> bytes:
        last = sse(self._envelope([]) | {"usage": openai_usage(usage)}) if self._includes_usage else b""
        return last + b"data: [DONE]\n\n"

    def failure(self, error: Exception) -> bytes:
        return sse(openai_error(error))

    def keep_alive(self) -> bytes:
        return sse_comment("still at work")

    def body(self, choices: list[CollectedChoice], usage: Usage) -> Json:
        body = self._envelope([self._choice(choice) for choice in choices])
        return body | {"object": "chat.completion", "usage": openai_usage(usage)}

    def error_body(self, error: Exception) -> Json:
        return openai_error(error)

    def _choice(self, choice: CollectedChoice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call.call_id, call.name, call.arguments) for call in choice.calls]
        logprobs = {"content": [shown_logprobs(each) for each in choice.logprobs]} if choice.logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}

    def _delta(
        self, index: int, delta: Json, reason: str | None = None, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> bytes:
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = {"content": [shown_logprobs(each) for each in logprobs]}
        return sse(self._envelope([choice]))

    def _envelope(self, choices: list[Json]) -> Json:
        return {
            "id": self.request_id, "object": "chat.completion.chunk", "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def openai_usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "potluck": potluck_usage(usage),
    }


def shown_logprobs(each: TokenLogprobs) -> Json:
    return {**_shown(each.chosen), "top_logprobs": [_shown(token) for token in each.top]}


def _shown(token: ShownToken) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
