"""A gateway that is ended in the middle of answers: whoever waits for one is told, and nothing is said to whoever ended it."""

import asyncio

import httpx
import pytest

from potluck.gateway.responding import ServiceSettings
from potluck.gateway.resuming import read_event_id
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import MESSAGES, events_of


@pytest.mark.parametrize("is_streaming", [True, False])
def test_whoever_waits_for_an_answer_is_told_that_the_node_ends(
    is_streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    answering = MemoryAnswering("Hi there")
    answering.model.step_s = 3600.0
    response = asyncio.run(stopped_during(answering, is_streaming=is_streaming))
    if is_streaming:
        error = events_of(response)[-1][1]["error"]
        assert read_event_id(error["resume"]).events == 1
    else:
        assert response.status_code == 503
        error = response.json()["error"]
    assert error["code"] == "node_stopping"
    assert answering.model.running == 0
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def stopped_during(answering: MemoryAnswering, *, is_streaming: bool) -> httpx.Response:
    settings = GatewaySettings(address="127.0.0.1:0", service=ServiceSettings(status_wait_s=0.05))
    server = GatewayServer(answering, settings)
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        body = {"messages": MESSAGES, "stream": is_streaming}
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        while not answering.model.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await server.stop()
        return await asking
