"""How fast weights come from one peer: some chunks of a model that it holds, over a link of their own, for a few seconds at most.

What comes is counted and dropped. One measurement at a time: it is meant for `potluck doctor`, not for the planner.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator

import msgspec

from potluck.core.errors import BadRequest, PotluckError, ShardUnavailable
from potluck.identity.keys import short_id
from potluck.net.link import Transport
from potluck.node.bulk_peer import BulkPeer, WeightSource
from potluck.node.weight_fetch import check_text_side, tensors_in
from potluck.weights.manifest import CHUNK_BYTES, Manifest
from potluck.wire.messages import ChunkData, GetChunk, GetHoldings, GetTokenizer, Message

MOST_BYTES, MOST_S = 16 << 20, 5.0
_WINDOW = 4  # chunks under way


class LinkMeasure(msgspec.Struct, frozen=True):
    node: str
    size_bytes: int
    seconds: float
    mbit_s: float


class LinkMeasuring:
    """`measure` is bounded in bytes and in time, whatever the peer does."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._is_busy = False

    async def measure(self, source: WeightSource, weights_sha256: str) -> LinkMeasure:
        """Raises BadRequest where one is under way, ShardUnavailable and what dialling raises where nothing comes."""
        if self._is_busy:
            raise BadRequest("another measurement is under way; try again in some seconds")
        self._is_busy = True
        peer = BulkPeer(source, lambda *_: None, lambda _: None)
        try:
            await peer.dial(self._transport)
            wanted = await self._chunks(peer, weights_sha256)
            return await _fetch(peer, weights_sha256, wanted)
        except OSError as error:
            raise ShardUnavailable(f"{short_id(source.node)} cannot be reached: {error}") from None
        finally:
            peer.close()
            self._is_busy = False

    async def _chunks(self, peer: BulkPeer, weights: str) -> list[tuple[str, int]]:
        """Which chunks to ask for: whole ones first, since small ones measure the round trip."""
        answer, body = await peer.question(lambda nonce: GetTokenizer(nonce, weights))
        manifest, _ = await asyncio.to_thread(check_text_side, answer, body, weights)
        answer, _ = await peer.question(lambda nonce: GetHoldings(nonce, weights))
        held = tensors_in(answer, manifest)
        chunks = list(itertools.islice(_chunks_of(manifest, held), MOST_BYTES // CHUNK_BYTES))
        if not chunks:
            raise ShardUnavailable(f"{short_id(peer.source.node)} holds nothing of that model")
        return chunks


def _chunks_of(manifest: Manifest, held: set[str]) -> Iterator[tuple[str, int]]:
    tensors = sorted((record for record in manifest.tensors if record.name in held), key=lambda each: -each.size_bytes)
    for record in tensors:
        for chunk in range(max(1, record.size_bytes // CHUNK_BYTES)):
            yield record.name, chunk


async def _fetch(peer: BulkPeer, weights: str, wanted: list[tuple[str, int]]) -> LinkMeasure:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    queue = iter(wanted)
    received = [0]

    async def fetch_some() -> None:
        for tensor, chunk in queue:
            answer, body = await peer.question(_question(weights, tensor, chunk))
            if not isinstance(answer, ChunkData) or len(body) > CHUNK_BYTES:
                raise ShardUnavailable(f"{short_id(peer.source.node)} answered with something else than a chunk")
            received[0] += len(body)

    fetching = [loop.create_task(fetch_some()) for _ in range(_WINDOW)]
    try:
        done, _ = await asyncio.wait(fetching, timeout=MOST_S, return_when=asyncio.FIRST_EXCEPTION)
        problems = [task.exception() for task in done]
    finally:
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
    seconds = max(loop.time() - began_s, 1e-6)
    if not received[0]:
        raise next(
            (each for each in problems if isinstance(each, PotluckError)), ShardUnavailable("nothing came in time")
        )
    return LinkMeasure(
        peer.source.node.hex(), received[0], round(seconds, 4), round(received[0] * 8 / 1e6 / seconds, 1)
    )


def _question(weights: str, tensor: str, chunk: int) -> Callable[[int], Message]:
    def ask(nonce: int) -> Message:
        return GetChunk(nonce, weights, tensor, chunk)

    return ask
