"""Real clients, unmodified, against three real nodes: what each of them sees, and a shard that dies under their streams."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from potluck.client import Client, ShardFailover
from potluck.net.loop import run
from potluck.node.node import Node
from potluck.testing.local_swarm import LocalHead, LocalNode, LocalSwarm, split_plan
from potluck.wire.messages import Describe, Described
from tests.support.swarms import head_node, is_connected_to

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is a potluck dinner?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _asked_before(city: str) -> list[dict[str, Any]]:
    """A small model calls tools where it has seen itself do so."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
    ]


TOOL_TALK = [
    *_asked_before("Paris"),
    *_asked_before("Rome"),
    *_asked_before("Madrid"),
    {"role": "user", "content": "What is the weather in Berlin?"},
]


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(MODEL, split_plan(30, 2, 1), models_home) as swarm:
        swarm.start_api()
        yield swarm


@pytest.fixture(scope="module")
def head(swarm: LocalSwarm) -> LocalHead:
    assert swarm.head is not None
    return swarm.head


@pytest.fixture(scope="module")
def client(head: LocalHead) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI) -> str:
    """The greedy answer, which every client must get."""
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.content
    return whole.choices[0].message.content


def test_openai_lists_models_and_finds_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).context_length == 8192
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found"


def test_openai_streams_the_same_text_with_usage_at_the_end(client: openai.OpenAI, answer: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, len(usage.potluck["nodes"]), usage.potluck["failovers"]) == (16, 2, 0)


def test_openai_accumulates_a_streamed_tool_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=TOOL_TALK, tools=[WEATHER], temperature=0, max_tokens=40
    ) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Berlin"})


def test_openai_async_and_completions_and_responses(head: LocalHead, answer: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{head.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)
            assert whole.choices[0].message.content == answer
            completion = await client.completions.create(
                model=MODEL, prompt=["One, two,", [1, 2, 3]], temperature=0, max_tokens=4, logprobs=2, n=2
            )
            assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
            assert completion.choices[0].text == completion.choices[1].text
            shown = completion.choices[0].logprobs
            assert shown is not None
            assert "".join(shown.tokens) == completion.choices[0].text
            response = await client.responses.create(
                model=MODEL, input="What is a potluck dinner?", temperature=0, max_output_tokens=16
            )
            assert (response.output_text, response.status) == (answer, "incomplete")
            kinds = []
            async for event in await client.responses.create(
                model=MODEL, input="What is a potluck dinner?", temperature=0, max_output_tokens=16, stream=True
            ):
                kinds.append(event.type)
            assert kinds[:4] == [
                "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
            ]  # fmt: skip
            assert kinds[-1] == "response.incomplete"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
            assert refused.value.code == "unsupported_parameter"

    asyncio.run(ask())


def test_anthropic_whole_streamed_and_counted(head: LocalHead, answer: str) -> None:
    client = anthropic.Anthropic(base_url=head.url, api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields)
    assert (whole.content[0].text, whole.stop_reason) == (answer, "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == answer
        final = stream.get_final_message()
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**fields, "model": "claude-9"})


def test_anthropic_gets_tool_calls(head: LocalHead) -> None:
    client = anthropic.Anthropic(base_url=head.url, api_key="none", max_retries=0)
    messages: list[Any] = []
    for number, message in enumerate(TOOL_TALK):
        if message["role"] == "user":
            messages.append({"role": "user", "content": message["content"]})
        else:
            arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
            block = {"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather", "input": arguments}
            messages.append({"role": "assistant", "content": [block]})
    function = WEATHER["function"]
    tool = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    with client.messages.stream(
        model=MODEL, messages=messages, tools=[tool], max_tokens=40, extra_body={"temperature": 0}
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [(b.name, b.input) for b in final.content if b.type == "tool_use"] == [("get_weather", {"city": "Berlin"})]


def test_ollama_lists_shows_chats_and_generates(head: LocalHead, answer: str) -> None:
    client = ollama.Client(host=head.url)
    assert [model.model for model in client.list().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.capabilities is not None
    assert "tools" in shown.capabilities
    options = {"temperature": 0, "num_predict": 16, "repeat_penalty": 1.0}
    assert client.chat(MODEL, QUESTION, options=options).message.content == answer
    parts = list(client.chat(MODEL, QUESTION, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == answer
    assert (parts[-1].done, parts[-1].done_reason, parts[-1].eval_count) == (True, "length", 16)
    assert client.generate(MODEL, "What is a potluck dinner?", options=options).response == answer
    with pytest.raises(ollama.ResponseError):
        client.chat("llama9", QUESTION)


def test_langchain_invokes_streams_and_binds_tools(head: LocalHead, answer: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{head.url}/v1", api_key="none", model=MODEL, temperature=0, max_completion_tokens=16, max_retries=0
    )
    assert model.invoke("What is a potluck dinner?").content == answer
    assert "".join(str(chunk.content) for chunk in model.stream("What is a potluck dinner?")) == answer
    caller = ChatOpenAI(base_url=f"{head.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0)
    [call] = caller.bind_tools([WEATHER]).invoke(TOOL_TALK).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Berlin"})


def test_litellm_completes_and_streams(head: LocalHead, answer: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list from the internet
    import litellm

    fields: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": f"{head.url}/v1", "api_key": "none", "messages": QUESTION, "temperature": 0,
        "max_tokens": 16,
    }  # fmt: skip
    assert litellm.completion(**fields).choices[0].message.content == answer
    chunks = list(litellm.completion(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer


# ------------------------------------------------------------ a shard dies


_VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"messages": QUESTION, "temperature": 0},
    "three sampled choices": {"messages": QUESTION, "temperature": 0.8, "seed": 7, "n": 3},
    "a stop string across tokens": {"messages": QUESTION, "temperature": 0, "stop": ["the end of all"]},
    "logprobs": {"messages": QUESTION, "temperature": 0.7, "seed": 3, "logprobs": True, "top_logprobs": 3},
    "tools": {"messages": TOOL_TALK, "temperature": 0, "tools": [WEATHER]},
}


async def _streamed(client: openai.AsyncOpenAI, fields: dict[str, Any], begun: asyncio.Event) -> tuple[Any, int]:
    """All that was streamed, put together by choice, and the failovers that the usage tells."""
    stream = await client.chat.completions.create(
        model=MODEL, max_tokens=40, stream=True, stream_options={"include_usage": True}, **fields
    )
    told: dict[int, list[Any]] = {}
    count, failovers = 0, 0
    async for chunk in stream:
        for choice in chunk.choices:
            logprobs = [(e.token, e.logprob) for e in choice.logprobs.content or ()] if choice.logprobs else None
            calls = [
                (c.index, c.function.name, c.function.arguments) for c in choice.delta.tool_calls or () if c.function
            ]
            told.setdefault(choice.index, []).append((choice.delta.content, calls, logprobs, choice.finish_reason))
            count += 1
        if count > 6:
            begun.set()
        if chunk.usage is not None:
            failovers = chunk.usage.potluck["failovers"]
    begun.set()
    return told, failovers


async def _at_work(swarm: LocalSwarm) -> list[LocalNode]:
    """Those that have streams now: a burst is spread over all that hold the layers, so that nobody knows beforehand."""
    async with head_node(swarm.addresses) as asking:
        offers = [described for _, described in asking.orchestrator.store.offers()]
    busy = {described.node.hex() for described in offers if any(info.streams for info in described.shards)}
    return [node for node in swarm.nodes if node.announcement is not None and node.announcement.node in busy]


@pytest.mark.parametrize("victim", [0, -1])
def test_a_shard_killed_under_streams_changes_nothing_in_any_of_them(swarm: LocalSwarm, victim: int) -> None:
    async def ask() -> LocalNode:
        assert swarm.head is not None
        async with openai.AsyncOpenAI(base_url=f"{swarm.head.url}/v1", api_key="none", max_retries=0) as client:
            undisturbed = {name: (await _streamed(client, f, asyncio.Event()))[0] for name, f in _VARIANTS.items()}
            events = [asyncio.Event() for _ in _VARIANTS]
            tasks = [
                asyncio.create_task(_streamed(client, fields, event))
                for fields, event in zip(_VARIANTS.values(), events, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in events))
            killed = (await _at_work(swarm))[victim]
            killed.signal(signal.SIGKILL)
            disturbed = dict(zip(_VARIANTS, await asyncio.gather(*tasks), strict=True))
        for name, told in undisturbed.items():
            assert disturbed[name][0] == told, name
        assert sum(failovers for _, failovers in disturbed.values()) > 0
        return killed

    swarm.restart(run(ask())).wait_until_serving()


def test_our_own_client_sees_the_failover_as_a_typed_frame(swarm: LocalSwarm) -> None:
    assert swarm.head is not None
    client = Client(swarm.head.url)
    stream = client.chat(QUESTION, max_tokens=60, temperature=0)
    answer = client.ask(QUESTION, max_tokens=60, temperature=0)
    # Of those who answer: after the tests before this one they need not be the first in the list.
    victim = next(node for node in swarm.nodes if node.announcement and node.announcement.node in answer.usage.nodes)
    text, failovers = "", []
    for number, event in enumerate(stream):
        if number == 8:
            victim.signal(signal.SIGKILL)
        if isinstance(event, ShardFailover):
            failovers.append(event)
        text += getattr(event, "text", "")
    assert text == answer.text
    assert len(failovers) >= 1
    assert failovers[0].pause_ms > 0
    swarm.restart(victim).wait_until_serving()


# ------------------------------------------------------------ a client goes away


async def _sessions(node: Node) -> int:
    """Of all shards, as they say now."""
    store = node.orchestrator.store
    count = 0
    for _, described in store.offers():
        answer, _ = await node.orchestrator.ask(described.node, Describe)
        assert isinstance(answer, Described)
        count += sum(info.streams for info in answer.shards)
    return count


async def _until_sessions(node: Node, is_so: Callable[[int], bool], patience_s: float) -> float:
    began_s = time.monotonic()
    while not is_so(await _sessions(node)):
        assert time.monotonic() - began_s < patience_s, "it did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


@pytest.mark.parametrize("moment", ["in prefill", "between tokens"])
def test_a_client_that_disconnects_frees_every_shard_within_a_second(swarm: LocalSwarm, moment: str) -> None:
    async def ask_and_leave() -> None:
        assert swarm.head is not None
        asked = [{"role": "user", "content": "word " * 3000}] if moment == "in prefill" else QUESTION
        body = json.dumps({"messages": asked, "stream": True, "max_tokens": 2000, "temperature": 0}).encode()
        host, _, port = swarm.head.url.removeprefix("http://").rpartition(":")
        async with head_node(swarm.addresses) as node:
            reader, writer = await asyncio.open_connection(host, int(port))
            own_port = writer.get_extra_info("sockname")[1]
            lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(lines.encode() + body)
            if moment == "between tokens":
                await reader.readuntil(b'"content":"')
                await reader.readuntil(b'"content":"')
            await _until_sessions(node, lambda count: count > 0, 30.0)
            assert is_connected_to(swarm.head.pid, own_port)
            writer.close()
            await _until_sessions(node, lambda count: count == 0, 1.0)
            deadline_s = time.monotonic() + 5.0
            # Of all its sockets this one: the head may be dialling a shard that a test before this one has started again.
            while is_connected_to(swarm.head.pid, own_port):  # the server's own side closes a moment later
                assert time.monotonic() < deadline_s, "a file handle is left"
                await asyncio.sleep(0.05)

    run(ask_and_leave())


def test_health_and_metrics_are_there(head: LocalHead) -> None:
    assert httpx.get(f"{head.url}/health").json() == {"status": "ok"}
    page = httpx.get(f"{head.url}/metrics").text
    assert "vllm:generation_tokens_total" in page
    assert "distributed_inference_failovers_total" in page
