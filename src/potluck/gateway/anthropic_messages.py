"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, in the event order that its SDK and its tools expect."""

import secrets
from typing import Any

import msgspec

from potluck.core.errors import BadRequest, UnsupportedParameter
from potluck.gateway.conversations import check_together, conversation, read_response_format, text_of
from potluck.gateway.error_forms import anthropic_error
from potluck.gateway.events import ChoiceFinished, Event, TextDelta, ToolCallArguments, ToolCallStarted, Usage
from potluck.gateway.reading import checked_limit, read_body, refuse, sampling_params, stop_strings
from potluck.gateway.request import Conversation, InferenceRequest, Json
from potluck.gateway.surface import SSE, CollectedChoice, potluck_usage, sse

_REFUSED: dict[str, tuple[object, ...]] = {
    "mcp_servers": ([],), "container": (), "output_format": (),
}  # fmt: skip


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    context_management: dict[str, Any] = {}


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def read_messages(data: bytes, created: int) -> tuple[InferenceRequest, "MessagesSurface"]:
    body, raw = read_body(data, MessagesBody)
    refuse(raw, _REFUSED)
    held = _conversation(body)
    form = body.output_config.get("format")
    if form is not None and not isinstance(form, dict):
        raise BadRequest("output_config.format is not an object", "output_config")
    grammar = read_response_format(form)
    check_together(grammar, held)
    request = InferenceRequest(
        model=body.model,
        conversation=held,
        grammar=grammar,
        params=sampling_params(raw, temperature=1.0),
        max_tokens=checked_limit(body.max_tokens, "max_tokens"),
        stops=stop_strings(body.stop_sequences),
    )
    return request, MessagesSurface(body.model or "", body.stream)


def read_count(data: bytes) -> tuple[str | None, Conversation]:
    body, raw = read_body(data, CountBody)
    refuse(raw, _REFUSED)
    return body.model, _conversation(body)


def _conversation(body: CountBody) -> Conversation:
    _check_context_edits(body.context_management)
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system, "system")})
    for number, message in enumerate(body.messages):
        messages += _openai_messages(number, message)
    tools = [_openai_tool(number, tool) for number, tool in enumerate(body.tools)]
    choice = body.tool_choice or {}
    messages, begun_answer = _split_begun_answer(messages)
    return conversation(
        messages,
        tools,
        _openai_choice(choice),
        allows_parallel_calls=not choice.get("disable_parallel_tool_use", False),
        template_variables=_thinking_variables(body),
        begun_answer=begun_answer,
    )


def _split_begun_answer(messages: list[Json]) -> tuple[list[Json], str]:
    """A last message of the assistant's is no turn here but the beginning of the answer, which goes on from it."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        return messages, ""
    return messages[:-1], messages[-1]["content"]


def _thinking_variables(body: CountBody) -> Json:
    """For templates that know them. A budget for thinking is a ceiling: a model that does not think keeps to any."""
    kind, effort = body.thinking.get("type"), body.output_config.get("effort")
    if body.thinking and kind not in ("enabled", "adaptive", "disabled"):
        raise BadRequest("thinking.type must be enabled, adaptive or disabled", "thinking")
    variables: Json = {"enable_thinking": kind != "disabled"} if body.thinking else {}
    return variables | ({"reasoning_effort": effort} if isinstance(effort, str) else {})


def _check_context_edits(given: Json) -> None:
    """Earlier thinking never reaches the model here, so clearing it is done already; other edits would be lost silently."""
    edits = given.get("edits", [])
    if not isinstance(edits, list) or not all(
        isinstance(edit, dict) and str(edit.get("type", "")).startswith("clear_thinking") for edit in edits
    ):
        raise UnsupportedParameter(
            "of context_management only clear_thinking can be honoured here", "context_management"
        )


def _openai_tool(number: int, tool: Json) -> Json:
    if tool.get("type", "custom") != "custom":
        raise UnsupportedParameter(f"tools[{number}]: tools that run on the server are not known here", "tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _openai_choice(choice: Json) -> str | Json:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise BadRequest("tool_choice must be auto, any, none or a tool", "tool_choice")
    return "required" if kind == "any" else str(kind)


def _openai_messages(number: int, message: Json) -> list[Json]:
    """One message; results of tools become messages of their own, before the text that came with them."""
    role, content = message.get("role"), message.get("content")
    place = f"messages[{number}]"
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{place}: the role must be user or assistant", "messages")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, place)}]
    texts: list[object] = []
    calls: list[Json] = []
    results: list[Json] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(_openai_call(block, place))
        elif kind == "tool_result":
            shown = text_of(block.get("content"), place)
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": shown})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    text = text_of(texts, place)
    if calls:
        return [*results, {"role": role, "content": text or None, "tool_calls": calls}]
    return [*results, {"role": role, "content": text}] if text or not results else results


def _openai_call(block: Json, place: str) -> Json:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
        raise BadRequest(f"{place}: a tool_use block has no name, or its input is no object", "messages")
    function = {"name": block["name"], "arguments": msgspec.json.encode(block.get("input", {})).decode()}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


class MessagesSurface:
    """One message. Content blocks are opened when their first piece comes: one for text, one for each call."""

    media_type = SSE

    def __init__(self, model: str, is_streaming: bool) -> None:
        self.model, self.is_streaming = model, is_streaming
        self.request_id = f"msg_{secrets.token_hex(12)}"
        self._block = -1
        self._open: str | None = None  # the kind of the block that is open
        self._reason: tuple[str, str | None] = ("end_turn", None)

    def begin(self, prompt_tokens: int) -> bytes:
        message = self._message([], None, None, _counts(prompt_tokens, 0, 0))
        return _event("message_start", {"message": message}) + _event("ping", {})

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._text(event.text) if event.text else b""
        if isinstance(event, ToolCallStarted):
            block = {"type": "tool_use", "id": f"toolu_{event.call_id}", "name": event.name, "input": {}}
            return self._close() + self._begin_block("tool_use", block)
        if isinstance(event, ToolCallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        if isinstance(event, ChoiceFinished):
            self._reason = _stop_reason(event.reason, event.stop)
        return b""

    def end(self, usage: Usage) -> bytes:
        empty = b"" if self._block >= 0 else self._begin_block("text", {"type": "text", "text": ""})
        reason, stop = self._reason
        delta = {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": _usage(usage)}
        return empty + self._close() + _event("message_delta", delta) + _event("message_stop", {})

    def failure(self, error: Exception) -> bytes:
        return sse(self.error_body(error), "error")

    def keep_alive(self) -> bytes:
        return _event("ping", {})

    def body(self, choices: list[CollectedChoice], usage: Usage) -> Json:
        [choice] = choices
        blocks: list[Json] = [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
        for call in choice.calls:
            block = {
                "type": "tool_use",
                "id": f"toolu_{call.call_id}",
                "name": call.name,
                "input": _input(call.arguments),
            }
            blocks.append(block)
        reason, stop = _stop_reason(choice.reason, choice.stop)
        return self._message(blocks, reason, stop, _usage(usage))

    def error_body(self, error: Exception) -> Json:
        return anthropic_error(error)

    def _text(self, text: str) -> bytes:
        begun = b"" if self._open == "text" else self._close() + self._begin_block("text", {"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": text})

    def _begin_block(self, kind: str, block: Json) -> bytes:
        self._block += 1
        self._open = kind
        return _event("content_block_start", {"index": self._block, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._block})

    def _message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": self.request_id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": stop, "usage": usage,
        }  # fmt: skip


def _event(kind: str, data: Json) -> bytes:
    return sse({"type": kind, **data}, kind)


def _stop_reason(reason: str, stop: str | None) -> tuple[str, str | None]:
    if stop is not None:
        return "stop_sequence", stop
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reason], None


def _usage(usage: Usage) -> Json:
    counts = _counts(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    return counts | {"potluck": potluck_usage(usage)}


def _counts(prompt: int, cached: int, output: int) -> Json:
    """What was cached is not among the input tokens: clients add the three up to learn how full the context is."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _input(arguments: str) -> object:
    """What a model cut short by its limit wrote is no JSON; the client gets an empty object and `max_tokens`."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
