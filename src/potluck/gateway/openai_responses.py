"""POST /v1/responses: OpenAI's newer API, stateless. Each event repeats its type and has a rising sequence number."""

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from potluck.core.errors import BadRequest, UnsupportedParameter
from potluck.gateway.conversations import check_together, conversation, read_response_format, text_of
from potluck.gateway.error_table import message_of, openai_error, row_of
from potluck.gateway.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    TextDelta,
    ToolCallArguments,
    ToolCallStarted,
    Usage,
)
from potluck.gateway.reading import checked_limit, read_body, refuse, sampling_params
from potluck.gateway.request import InferenceRequest, Json
from potluck.gateway.surface import SSE, CollectedChoice, potluck_usage, sse, sse_comment

# A stored conversation, among others: without it the model would silently lose its context.
_REFUSED: dict[str, tuple[object, ...]] = {
    "previous_response_id": ("",), "conversation": (), "background": (False,), "prompt": (), "top_logprobs": (0,),
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_SERVER_TOOLS = frozenset({
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "computer_use_preview", "mcp",
    "namespace", "tool_search",
})  # fmt: skip


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    include: list[str] = []
    metadata: dict[str, Any] = {}


def read_responses(data: bytes, created: int) -> tuple[InferenceRequest, "ResponsesSurface"]:
    body, raw = read_body(data, ResponsesBody)
    refuse(raw, _REFUSED)
    if _LOGPROBS in body.include:
        raise UnsupportedParameter(f"include: {_LOGPROBS} cannot be honoured here", "include")
    if body.text.get("verbosity", "medium") != "medium":
        raise UnsupportedParameter("text.verbosity cannot be honoured here", "text")
    effort = body.reasoning.get("effort")
    body = msgspec.structs.replace(body, tools=_callable_tools(body))
    held = conversation(
        _messages(body), body.tools, body.tool_choice, allows_parallel_calls=body.parallel_tool_calls,
        template_variables={"reasoning_effort": effort} if isinstance(effort, str) else {},
    )  # fmt: skip
    form = body.text.get("format")
    if form is not None and not isinstance(form, dict):
        raise BadRequest("text.format is not an object", "text")
    grammar = read_response_format(form)
    check_together(grammar, held)
    request = InferenceRequest(
        model=body.model,
        conversation=held,
        params=sampling_params(raw, temperature=1.0),
        max_tokens=checked_limit(body.max_output_tokens, "max_output_tokens"),
        grammar=grammar,
    )
    return request, ResponsesSurface(body, created)


def _callable_tools(body: ResponsesBody) -> list[Json]:
    """Tools that the server would run are left out where the model may choose: coding agents name them with every request.

    The response's own list of tools says which are left. Where a call is demanded, nothing is left out, and they are refused.
    """
    if body.tool_choice not in (None, "auto"):
        return body.tools
    return [tool for tool in body.tools if str(tool.get("type", "function")) not in _SERVER_TOOLS]


def _messages(body: ResponsesBody) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        message = _message(item, f"input[{number}]")
        if message is None:
            continue
        # Calls of one turn stand in one message.
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _message(item: Json, place: str) -> Json | None:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), place)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": item.get("call_id", ""), "function": function}],
        }
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": str(item.get("call_id", "")),
            "content": text_of(item.get("output"), place),
        }
    if kind == "reasoning":
        return None
    raise UnsupportedParameter(f"{place}: {str(kind)[:40]!r} is not known here", "input")


@dataclass
class _Item:
    """An output item as it grows: a message's text, or a call's arguments."""

    kind: str
    id: str
    call_id: str = ""
    name: str = ""
    text: str = ""
    status: str = "completed"  # once it is closed

    def shown(self, status: str) -> Json:
        if self.kind == "function_call":
            return {
                "type": "function_call", "id": self.id, "call_id": self.call_id, "name": self.name, "arguments": self.text,
                "status": status,
            }  # fmt: skip
        content = [_part(self.text)] if self.text or status != "in_progress" else []
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content}


class ResponsesSurface:
    media_type = SSE

    def __init__(self, body: ResponsesBody, created: int) -> None:
        self.model, self.is_streaming = body.model or "", body.stream
        self._body, self._created = body, created
        self.request_id = f"resp_{secrets.token_hex(16)}"
        self._sequence = 0
        self._items: list[_Item] = []
        self._is_open = False
        self._reason: FinishReason = "stop"

    def begin(self, prompt_tokens: int) -> bytes:
        response = {"response": self._response("in_progress", None)}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._text(event.text) if event.text else b""
        if isinstance(event, ToolCallStarted):
            item = _Item("function_call", f"fc_{secrets.token_hex(12)}", f"call_{event.call_id}", event.name)
            return self._close() + self._open(item)
        if isinstance(event, ToolCallArguments):
            self._items[-1].text += event.text
            return self._event("response.function_call_arguments.delta", self._place() | {"delta": event.text})
        if isinstance(event, ChoiceFinished):
            self._reason = event.reason
        return b""

    def end(self, usage: Usage) -> bytes:
        empty = b"" if self._items else self._open_message()
        status = self._settled(self._reason)
        closed = self._close()
        return empty + closed + self._event(f"response.{status}", {"response": self._response(status, usage)})

    def failure(self, error: Exception) -> bytes:
        if self._is_open:
            self._items[-1].status = "incomplete"
        shown = self._response("failed", None) | {"error": {"code": row_of(error).code, "message": message_of(error)}}
        detail: Any = openai_error(error)["error"]
        return self._event("response.failed", {"response": shown}) + self._event(
            "error", {**detail, "type": "error", "error": detail}
        )

    def keep_alive(self) -> bytes:
        return sse_comment("still at work")

    def body(self, choices: list[CollectedChoice], usage: Usage) -> Json:
        [choice] = choices
        if choice.text or not choice.calls:
            self._items.append(_Item("message", f"msg_{secrets.token_hex(12)}", text=choice.text))
        for call in choice.calls:
            item = _Item(
                "function_call", f"fc_{secrets.token_hex(12)}", f"call_{call.call_id}", call.name, call.arguments
            )
            self._items.append(item)
        return self._response(self._settled(choice.reason), usage)

    def error_body(self, error: Exception) -> Json:
        return openai_error(error)

    def _settled(self, reason: FinishReason) -> str:
        """The response's status. A call that the model itself broke off is not one to run, though the response is all there is."""
        last = self._items[-1]
        is_broken_call = last.kind == "function_call" and reason != "tool_calls"
        last.status = "incomplete" if reason == "length" or is_broken_call else "completed"
        return "incomplete" if reason == "length" else "completed"

    def _text(self, text: str) -> bytes:
        begun = b""
        if not self._is_open or self._items[-1].kind != "message":
            begun = self._close() + self._open_message()
        self._items[-1].text += text
        return begun + self._event("response.output_text.delta", self._place(0) | {"delta": text, "logprobs": []})

    def _open_message(self) -> bytes:
        opened = self._open(_Item("message", f"msg_{secrets.token_hex(12)}"))
        return opened + self._event("response.content_part.added", self._place(0) | {"part": _part("")})

    def _open(self, item: _Item) -> bytes:
        self._items.append(item)
        self._is_open = True
        place = {"output_index": len(self._items) - 1, "item": item.shown("in_progress")}
        return self._event("response.output_item.added", place)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        if item.kind == "function_call":
            done = self._place() | {"name": item.name, "arguments": item.text}
            data = self._event("response.function_call_arguments.done", done)
        else:
            text = self._place(0) | {"text": item.text, "logprobs": []}
            data = self._event("response.output_text.done", text)
            data += self._event("response.content_part.done", self._place(0) | {"part": _part(item.text)})
        place = {"output_index": len(self._items) - 1, "item": item.shown(item.status)}
        return data + self._event("response.output_item.done", place)

    def _place(self, content_index: int | None = None) -> Json:
        place: Json = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return place if content_index is None else place | {"content_index": content_index}

    def _event(self, kind: str, data: Json) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **data}, kind)

    def _response(self, status: str, usage: Usage | None) -> Json:
        body = self._body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.request_id, "object": "response", "created_at": self._created, "status": status, "model": self.model,
            "output": [] if status == "in_progress" else [item.shown(item.status) for item in self._items],
            "error": None, "incomplete_details": cut, "instructions": body.instructions, "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls, "temperature": body.temperature, "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto", "tools": body.tools, "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "text": body.text or {"format": {"type": "text"}}, "usage": None if usage is None else _usage(usage),
        }  # fmt: skip


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "potluck": potluck_usage(usage),
    }
