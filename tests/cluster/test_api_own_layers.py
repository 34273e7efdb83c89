"""A node that holds every layer itself answers over its own API, and says what it does not have."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from potluck.client import ApiError, AsyncClient
from potluck.core.errors import ShardUnavailable
from potluck.core.sampling_params import SamplingParams
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.net.loop import run
from potluck.node.answering import NodeAnswering, OwnLayers
from potluck.node.serving import ServingSettings, parse_stage, read_stored_model, serve
from potluck.orchestrator.frames import ShardFailover, TokenDelta
from potluck.orchestrator.params import DistributedChatParams
from potluck.testing.local_swarm import LocalSwarm, NodePlan
from potluck.weights.store import ModelStore
from tests.support.swarms import TINY, head_node, stored_tiny

PROMPT = tuple(1 + 37 * number % 400 for number in range(45))


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


def test_a_node_of_an_api_keeps_the_ends_of_every_answer_at_home(models_home: Path) -> None:
    """SwarmLLM's encrypted pipeline: others get activations only, and where the node's own worker dies nobody takes its place."""
    stored_tiny(models_home)
    store = ModelStore(models_home / "models")

    async def use(addresses: list[str]) -> tuple[list[str], list[tuple[str, ...]], bytes, int]:
        async with head_node(addresses) as node:
            own = OwnLayers("0-1,6-output", store, ServingSettings())
            answering = NodeAnswering(node, DistributedChatParams(), own)
            model = await answering.open(TINY)
            plain = await NodeAnswering(node).open(TINY)
            texts, nodes, failovers = [], [], 0
            for each, kills in ((plain, False), (model, False), (model, True)):
                answer = each.start(each.request(PROMPT, SamplingParams(), 24))
                tokens = []
                async for frame in answer.frames():
                    failovers += isinstance(frame, ShardFailover)
                    if isinstance(frame, TokenDelta):
                        tokens.append(frame.token)
                        if kills and len(tokens) == 8:
                            os.kill(node.shards[0].supervisor.pid or 0, signal.SIGKILL)
                texts.append(str(tokens))
                nodes.append(answer.nodes)
            return texts, nodes, node.id, failovers

    with LocalSwarm(TINY, [NodePlan(None), NodePlan(None, is_spare=True)], models_home) as swarm:
        texts, nodes, head, failovers = run(use(swarm.addresses))
        other = swarm.nodes[0].announcement
    assert other is not None
    assert texts[0] == texts[1] == texts[2]
    assert set(nodes[1]) == set(nodes[2]) == {head.hex(), other.node}
    assert failovers == 1
