"""The node that a client asked is killed in the middle of the answer; the client goes on at another one and misses nothing.

Real processes: two shards, a spare and heads without layers. Three kills here, 20 with POTLUCK_LONG=1.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from potluck.core.remembered import Accounts, AnswerSoFar
from potluck.gateway.resuming import read_event_id
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.net.loop import run
from potluck.node.answering import NodeAnswering
from potluck.node.node import Node
from potluck.orchestrator.generation import GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.testing.local_swarm import LocalHead, LocalSwarm, NodePlan, split_plan
from tests.support.swarms import TINY, head_node, model_on, stored_tiny

MODEL = "smollm2-135m"
KILLS = 20 if os.environ.get("POTLUCK_LONG") else 3
PATIENCE_S = 5.0  # the promise: no longer from the break to the first new event
BODY = {
    "model": MODEL, "messages": [{"role": "user", "content": "Write a short story about a potluck dinner."}], "max_tokens": 60,
    "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},  # and a seed that only the first head has drawn
    {"temperature": 1.2, "seed": 7, "logprobs": True, "top_logprobs": 2, "stop": ["zebra", "the the"]},
]


class SentEvent(NamedTuple):
    id: str
    data: str

    @property
    def number(self) -> int:
        return int(self.id.rpartition(".")[2])


class Stream:
    """One request, and what came of it until the end or the break."""

    def __init__(self, url: str, body: dict[str, Any], last_id: str | None = None) -> None:
        self._url, self._body = f"{url}/v1/chat/completions", body
        self._headers = {} if last_id is None else {"Last-Event-ID": last_id}
        self.first_s = 0.0

    def events(self) -> Iterator[SentEvent]:
        """Whole events only: what was cut off in the middle has not been had."""
        with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=60) as response:
            assert response.status_code == 200, response.read()
            event_id = ""
            for line in response.iter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: "):
                    self.first_s = self.first_s or time.monotonic()
                    yield SentEvent(event_id, line[6:])


def interrupted(head: LocalHead, body: dict[str, Any], after: int) -> list[SentEvent]:
    """What a client has had of a head that is killed after so many events."""
    had: list[SentEvent] = []
    try:
        for event in Stream(head.url, body).events():
            had.append(event)
            if len(had) == after:
                os.kill(head.pid, signal.SIGKILL)
    except httpx.TransportError:
        return had
    raise AssertionError("the answer came to its end before its head was killed")


def text_of(events: list[SentEvent]) -> str:
    chunks = [msgspec.json.decode(event.data) for event in events if event.data != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def told(events: list[SentEvent]) -> list[Any]:
    """Everything that a client is told but for who took part."""
    chunks = [event.data if event.data == "[DONE]" else msgspec.json.decode(event.data) for event in events]
    for chunk in chunks:
        if "usage" in chunk:
            chunk["usage"] = {key: chunk["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    return chunks


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(MODEL, split_plan(30, 2, 1), models_home) as swarm:
        swarm.start_api()
        for number in range(KILLS + 1):
            swarm.add_head(f"victim-{number}")
        for head in swarm.further_heads:
            head.wait_until_serving()
        yield swarm


def taken_up(swarm: LocalSwarm, victim: LocalHead, body: dict[str, Any], after: int) -> tuple[list[SentEvent], float]:
    """All events of both heads, and how long it took from the break to the first new one."""
    assert swarm.head is not None
    had = interrupted(victim, body, after)
    broke_s = time.monotonic()
    second = Stream(swarm.head.url, body, had[-1].id)
    return [*had, *second.events()], second.first_s - broke_s


def check(swarm: LocalSwarm, events: list[SentEvent], body: dict[str, Any]) -> None:
    """Nothing twice, nothing missing, and all of it as of a head that nothing happened to: one that makes the answer from its start."""
    assert swarm.head is not None
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].data == "[DONE]"
    handle = events[0].id.rpartition(".")[0]
    again = list(Stream(swarm.head.url, body, f"{handle}.0").events())
    assert told(events) == told(again)
    if body["temperature"] == 0 or "seed" in body:
        assert text_of(events) == text_of(list(Stream(swarm.head.url, body).events()))


def test_a_client_whose_head_is_killed_goes_on_at_another(swarm: LocalSwarm) -> None:
    draw, waits_s = random.Random(4), []
    for number in range(KILLS):
        body = {**BODY, **VARIANTS[number % len(VARIANTS)]}
        events, wait_s = taken_up(swarm, swarm.further_heads[number], body, draw.randint(1, 45))
        check(swarm, events, body)
        waits_s.append(wait_s)
    shown = ", ".join(f"{1000 * wait_s:.0f}" for wait_s in waits_s)
    print(f"\n{KILLS} heads killed; first new event after {shown} ms")
    assert max(waits_s) < PATIENCE_S


async def _recalled(swarm: LocalSwarm, event_id: str) -> tuple[AnswerSoFar | None, Accounts, str]:
    """What another node is told: with the secret, with another one, and what that says."""
    async with head_node(swarm.addresses) as node:
        [info] = node.orchestrator.store.models().values()
        model = await model_on(node, MODEL)
        accounts = await node.recall(read_event_id(event_id).handle.secret, info.weights_sha256)
        answer = max(accounts.told, key=lambda account: len(account.tokens), default=None)
        text = "" if answer is None else model.tokenizer.decode(answer.chosen)
        return answer, await node.recall(bytes(16), info.weights_sha256), text


def test_a_shard_remembers_and_nothing_is_lost_where_that_shard_is_killed_too(swarm: LocalSwarm) -> None:
    body = {**BODY, "temperature": 0.8}
    assert swarm.head is not None
    had = interrupted(swarm.further_heads[KILLS], body, 20)
    answer, nothing, text = run(_recalled(swarm, had[-1].id))
    assert answer is not None
    assert len(answer.chosen) >= len(had) - 1  # the first event is the role
    assert text.startswith(text_of(had))
    assert nothing == Accounts()
    os.kill(swarm.nodes[1].pid, signal.SIGKILL)
    broke_s = time.monotonic()
    second = Stream(swarm.head.url, body, had[-1].id)
    events = [*had, *second.events()]
    print(f"\nnobody remembered: first new event after {1000 * (second.first_s - broke_s):.0f} ms")
    check(swarm, events, body)


# ---------------------------------------------------------------- heads in this process, over a tiny model


TINY_BODY = {
    "model": TINY,
    "prompt": "Everyone brings",
    "max_tokens": 300,
    "temperature": 0.7,
    "seed": 3,
    "stream": True,
}


class Had(NamedTuple):
    texts: list[str]
    last_id: str
    error: Any


async def _had(url: str, last_id: str | None = None, most: int = 1000, kills: int = 0) -> Had:
    """Up to `most` events of an answer, or its error; the process `kills` is killed after ten."""
    texts: list[str] = []
    event_id, headers = "", {} if last_id is None else {"Last-Event-ID": last_id}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=TINY_BODY, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            event_id = line[4:] if line.startswith("id: ") else event_id
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                return Had(texts, event_id, event["error"])
            texts += [choice["text"] for choice in event["choices"]]
            if kills and len(texts) == 10:
                os.kill(kills, signal.SIGKILL)
            if len(texts) >= most:
                break
    return Had(texts, event_id, None)


@asynccontextmanager
async def _api(addresses: list[str], params: DistributedChatParams) -> AsyncIterator[tuple[str, Node]]:
    async with head_node(addresses) as node:
        server = GatewayServer(NodeAnswering(node, params), GatewaySettings(address="127.0.0.1:0"))
        await server.start()
        try:
            yield server.url, node
        finally:
            await server.stop()


@pytest.fixture(scope="module")
def tiny_swarm(models_home: Path) -> Iterator[LocalSwarm]:
    stored_tiny(models_home)
    with LocalSwarm(TINY, [NodePlan("0-3"), NodePlan("4-7")], models_home) as swarm:
        yield swarm


def test_an_answer_is_rounded_at_the_second_head_as_at_the_first(tiny_swarm: LocalSwarm) -> None:
    """One head sends 8 bits between the shards, the other all; nobody remembers, because the client left the first by itself."""

    async def use() -> tuple[Had, Had, Had, Had]:
        coarse, fine = DistributedChatParams(activation_dtype="int8"), DistributedChatParams(activation_dtype="fp32")
        async with _api(tiny_swarm.addresses, coarse) as (first, _), _api(tiny_swarm.addresses, fine) as (second, node):
            begun = await _had(first, most=40)
            rounded, unrounded = await _had(first), await _had(second)
            assert await node.recall(read_event_id(begun.last_id).handle.secret, "") == Accounts()
            return rounded, unrounded, begun, await _had(second, begun.last_id)

    rounded, unrounded, begun, rest = run(use())
    assert [*begun.texts, *rest.texts] == rounded.texts
    assert rounded.texts != unrounded.texts


def test_an_answer_whose_last_holder_is_lost_goes_on_when_one_is_back(tiny_swarm: LocalSwarm) -> None:
    """P5: the error names the event to go on after, and the head itself remembers the tokens."""

    async def use() -> tuple[Had, Had, Had]:
        params = DistributedChatParams(settings=GenerationSettings(holder_wait_s=0.5))
        async with _api(tiny_swarm.addresses, params) as (url, node):
            whole, begun = await _had(url), await _had(url, kills=tiny_swarm.nodes[1].pid)
            await asyncio.to_thread(tiny_swarm.restart(tiny_swarm.nodes[1]).wait_until_serving)
            async with asyncio.timeout(20):
                while len(node.links.linked()) < 2:  # noqa: ASYNC110 - the head dials again by itself, and tells nobody
                    await asyncio.sleep(0.05)
            return whole, begun, await _had(url, begun.error["resume"])

    whole, begun, rest = run(use())
    assert begun.error["code"] == "shard_unavailable"
    assert begun.error["resume"] == begun.last_id
    assert 10 <= len(begun.texts) < len(whole.texts)
    assert [*begun.texts, *rest.texts] == whole.texts
