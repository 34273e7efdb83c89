"""What every API surface is to the gateway: events and usage in, bytes or a JSON body out. Interfaces and what they share."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from potluck.gateway.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    PromptShown,
    TextDelta,
    TokenLogprobs,
    ToolCallArguments,
    ToolCallStarted,
    Usage,
)
from potluck.gateway.request import Json

SSE = "text/event-stream"
NAME_BYTES = 12  # of a response's id, which shows them in hex
NDJSON = "application/x-ndjson"
_UNICODE_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\u0085\u2028\u2029"]  # of others JSON sees to


class Surface(Protocol):
    """One request's translation; has the state that its stream needs (ids, indices, sequence numbers)."""

    is_streaming: bool
    media_type: str  # of the stream
    model: str  # as asked for; the gateway puts the real name here when it is known
    request_id: str  # as the client and the page see it

    def begin(self, prompt_tokens: int) -> bytes: ...
    def event(self, event: Event) -> bytes: ...
    def end(self, usage: Usage) -> bytes: ...

    def failure(self, error: Exception) -> bytes:
        """A failure after the stream has begun."""

    def keep_alive(self) -> bytes: ...
    def body(self, choices: "list[CollectedChoice]", usage: Usage) -> Json: ...
    def error_body(self, error: Exception) -> Json: ...


@dataclass
class CollectedCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass
class CollectedChoice:
    """One choice, complete."""

    index: int
    text: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason = "stop"
    stop: str | None = None
    _parts: list[str] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._parts.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, ToolCallStarted):
            self.calls.append(CollectedCall(event.call_id, event.name))
        elif isinstance(event, ToolCallArguments):
            self.calls[event.index].arguments += event.text
        elif isinstance(event, PromptShown):
            self.prompt = event.tokens
        elif isinstance(event, ChoiceFinished):
            self.reason, self.stop, self.text = event.reason, event.stop, "".join(self._parts)


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event: one line of data."""
    head = b"" if event is None else b"event: %s\n" % event.encode("ascii")
    return b"%sdata: %s\n\n" % (head, one_line(data))


def sse_comment(text: str) -> bytes:
    """No empty line after it: OpenAI's Python client takes one for the end of an event, an empty one, once events have had ids."""
    return b": %s\n" % text.replace("\n", " ").encode()


def ndjson(data: Any) -> bytes:
    return one_line(data) + b"\n"


def one_line(data: Any) -> bytes:
    """JSON that is one line for everybody: clients built on httpx also end lines where Unicode does."""
    line = msgspec.json.encode(data)
    for end, escaped in _UNICODE_LINE_ENDS:
        line = line.replace(end, escaped)  # UTF-8, so these bytes are that character and nothing else
    return line


def potluck_usage(usage: Usage) -> Json:
    """What only a swarm has to tell: failovers, the pause they made, who took part, and how exact that makes the answer."""
    return {
        "failovers": usage.failovers, "pause_ms": round(usage.pause_s * 1000, 1), "nodes": list(usage.nodes),
        "exactness": usage.exactness,
    }  # fmt: skip
