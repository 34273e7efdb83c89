"""A node's API for the commands that ask it, without a node, a home or a network: answers come from a function."""

import json
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest

URL = "http://127.0.0.1:7470"
Answering = Callable[[httpx.Request], httpx.Response]


class _Stream(httpx.SyncByteStream):
    def __init__(self, lines: Sequence[str], breaks: bool) -> None:
        self._lines, self._breaks = lines, breaks

    def __iter__(self) -> Iterator[bytes]:
        yield from (f"data: {line}\n\n".encode() for line in self._lines)
        if self._breaks:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


def answer(*pieces: str, model: str = "small", breaks: bool = False) -> httpx.Response:
    """A streamed answer of those pieces; with `breaks` the node is gone after them."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    chunks += [] if breaks else [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(pieces)}},
    ]  # fmt: skip
    return httpx.Response(200, stream=_Stream([json.dumps({"model": model, **chunk}) for chunk in chunks], breaks))


def models(*names: str) -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": name} for name in names]})


def question_of(request: httpx.Request) -> str:
    return str(json.loads(request.content)["messages"][-1]["content"])


def node_runs(monkeypatch: pytest.MonkeyPatch, answering: Answering) -> None:
    """From now on a node of this home seems to run, and requests to its API end in `answering`."""
    made = httpx.Client
    monkeypatch.setattr("potluck.cli.ask._runs_a_node", lambda: True)
    monkeypatch.setattr(httpx, "Client", lambda **options: made(transport=httpx.MockTransport(answering), **options))
    for module in ("potluck.cli.ask_swarm", "potluck.cli.chat"):
        monkeypatch.setattr(f"{module}.api_url", lambda: URL)
        monkeypatch.setattr(f"{module}.api_key", lambda: None)
        monkeypatch.setattr(f"{module}.wait_until_answerable", lambda model: None)
