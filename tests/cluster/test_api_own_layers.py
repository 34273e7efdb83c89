"""A node that holds every layer itself answers over its own API, and says what it does not have."""

import asyncio
from pathlib import Path

import pytest

from potluck.client import ApiError, AsyncClient
from potluck.core.errors import ShardUnavailable
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.net.loop import run
from potluck.node.answering import NodeAnswering
from potluck.node.serving import ServingSettings, parse_stage, read_stored_model, serve
from potluck.weights.store import ModelStore
from tests.support.swarms import TINY, head_node, stored_tiny


def test_a_node_answers_with_its_own_layers(models_home: Path) -> None:
    async def use() -> None:
        stored_tiny(models_home)
        stored = read_stored_model(ModelStore(models_home / "models"), TINY)
        async with head_node([]) as node:
            answering = NodeAnswering(node)
            with pytest.raises(ShardUnavailable):
                await answering.open(None)
            serve(node, stored, parse_stage(None, 8), ServingSettings())
            await asyncio.wait_for(node.shards[0].start(), 120)
            server = GatewayServer(answering, GatewaySettings(address="127.0.0.1:0"))
            await server.start()
            try:
                async with AsyncClient(server.url) as client:
                    assert await client.models() == [TINY]
                    answer = await client.ask("Hello", max_tokens=12, temperature=0, logit_bias={})
                    again = await client.ask("Hello", max_tokens=12, temperature=0)
                    assert (answer.text, answer.usage.nodes) == (again.text, (node.id.hex(),))
                    assert answer.usage.completion_tokens > 0
                    with pytest.raises(ApiError) as too_long:
                        await client.ask("word " * 2000)
                    assert too_long.value.code == "context_length_exceeded"
            finally:
                await server.stop()

    run(use())
