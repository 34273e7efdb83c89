"""Models and heads for tests with real nodes: a tiny random model in the test store, and what a process holds."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from potluck.bench.random_model import RandomFormat, RandomShape, random_model
from potluck.core.errors import ModelNotFound
from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.tls import TlsTransport
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.orchestrator.frames import PipelineAborted, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest
from potluck.orchestrator.params import DistributedChatParams
from potluck.weights.pull import Puller
from potluck.weights.store import ModelEntry, ModelStore
from tests.support.places import alone

TINY, TINY_FLOATS = "tiny-8-layers", "tiny-8-layers-of-floats"
_SHAPE = RandomShape(
    name="tiny8", hidden_size=64, layer_count=8, head_count=4, kv_head_count=2, head_size=16, feed_forward_size=128,
    vocabulary_size=512, context_length=512,
)  # fmt: skip


def stored_tiny(home: Path, format_name: RandomFormat = "Q4_0") -> ModelEntry:
    """Eight layers of random weights, made and stored once; a token takes well under a millisecond."""
    store = ModelStore(home / "models")
    name = TINY if format_name == "Q4_0" else TINY_FLOATS
    with alone("models"):
        try:
            return store.find(name)
        except ModelNotFound:
            path = random_model(home / "made", _SHAPE, format_name, lambda _: None)
            return Puller(store).pull(str(path), name).entry


@asynccontextmanager
async def head_node(addresses: Sequence[str]) -> AsyncIterator[Node]:
    """A node without shards, linked to these addresses; nothing of it is left afterwards."""
    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        if addresses:
            await node.orchestrator.connect(addresses)
        yield node
    finally:
        await node.stop()


async def frames_of(node: Node, request: GenerationRequest, params: DistributedChatParams) -> list[StreamFrame]:
    return [frame async for frame in node.orchestrator.chat(request, params)]


def tokens_of(frames: Sequence[StreamFrame]) -> list[int]:
    """The tokens of an answer that came to its end."""
    assert not isinstance(frames[-1], PipelineAborted), frames[-1]
    return [frame.token for frame in frames if isinstance(frame, TokenDelta)]


async def model_on(node: Node, name: str) -> RemoteModel:
    return await RemoteModel.find(node, name)


def open_handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_connected_to(pid: int, port: int) -> bool:
    """Whether a process has a TCP socket whose other end has this port, however far it is closed."""
    return any(each.raddr and each.raddr.port == port for each in psutil.Process(pid).net_connections("tcp"))


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
