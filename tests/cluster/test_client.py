"""The client for scripts: typed events, whole answers and errors, over a server in this process."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from potluck import AsyncClient, Client
from potluck.client import ApiError, Finished, PipelineAborted, ShardFailover, Text, ToolCall, Usage
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.orchestrator import frames
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import TOOLS

FAILOVER = frames.ShardFailover(("a",), ("b",), 1, 120.0, 5, "replay")


@pytest.fixture
def answering() -> MemoryAnswering:
    return MemoryAnswering("Hi there")


@pytest.fixture
def url(answering: MemoryAnswering) -> Iterator[str]:
    """A server on a loop of its own, since the client blocks."""
    ready, done = threading.Event(), threading.Event()
    told: list[str] = []

    async def serve() -> None:
        server = GatewayServer(answering, GatewaySettings(address="127.0.0.1:0"))
        await server.start()
        told.append(server.url)
        ready.set()
        await asyncio.to_thread(done.wait)
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait(10)
    yield told[0]
    done.set()
    thread.join()


def test_an_answer_comes_as_typed_events(url: str, answering: MemoryAnswering) -> None:
    answering.model.frames_before = {1: [FAILOVER]}
    with Client(url) as client:
        assert client.models() == ["memory"]
        events = list(client.chat("Hello"))
    assert "".join(event.text for event in events if isinstance(event, Text)) == "Hi there"
    assert [event.pause_ms for event in events if isinstance(event, ShardFailover)] == [120.0]
    assert isinstance(events[-2], Finished)
    assert events[-1] == Usage(events[-1].prompt_tokens, 9, 1, 120.0, ("aa" * 32, "bb" * 32), model="memory")


def test_a_whole_answer_and_tool_calls(url: str, answering: MemoryAnswering) -> None:
    answering.model.script = lambda request: '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with Client(url, model="memory") as client:
        answer = client.ask([{"role": "user", "content": "Weather?"}], tools=TOOLS)
    assert (answer.text, answer.reason) == ("", "tool_calls")
    calls = [event for event in answer.events if isinstance(event, ToolCall)]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("weather", '{"city": "Oslo"}')


def test_errors_have_their_code_before_and_within_the_stream(url: str, answering: MemoryAnswering) -> None:
    with Client(url, model="other") as client, pytest.raises(ApiError) as missing:
        client.ask("Hello")
    assert (missing.value.status, missing.value.code) == (404, "model_not_found")
    answering.model.frames_before = {3: [frames.PipelineAborted("pipeline_stalled", "no progress", 3)]}
    seen = []

    def read_all() -> None:
        with Client(url) as client:
            for event in client.chat("Hello"):
                seen.append(event)

    with pytest.raises(ApiError) as broken:
        read_all()
    assert broken.value.code == "pipeline_stalled"
    assert any(isinstance(event, PipelineAborted) for event in seen)


def test_the_same_with_asyncio(url: str) -> None:
    async def ask() -> str:
        async with AsyncClient(url) as client:
            return (await client.ask("Hello")).text

    assert asyncio.run(ask()) == "Hi there"
