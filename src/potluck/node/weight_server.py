"""Gives chunks of models to peers that ask, on links of their own. Reads files off the loop; holds a bounded amount for each link.

Whoever asks compares what comes with the manifest, so nothing is hashed here. Knows nothing of shards and generations.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from potluck.core.errors import LinkError, ModelNotFound, NotEntitled, PotluckError, WeightsMissing
from potluck.net.link import Link
from potluck.weights.checkpoint import TensorEntry
from potluck.weights.manifest import CHUNK_BYTES
from potluck.wire.messages import (
    ChunkData,
    Failed,
    GetChunk,
    GetHoldings,
    GetTokenizer,
    Holdings,
    Message,
    TokenizerData,
)

MAX_REQUESTS = 64  # of one link, being read
MAX_QUEUED_BYTES = 32 << 20  # on one link, read and not sent
_READERS = 4
BUSY = "too_many_requests"


class OfferedWeights(msgspec.Struct, frozen=True):
    """A model as files on this machine. `tensors` in the manifest's order; the files of a partial one may come and go."""

    weights_sha256: str
    manifest: bytes
    tokenizer: bytes
    tensors: Mapping[str, TensorEntry]

    def held_ranges(self) -> tuple[tuple[int, int], ...]:
        """Which tensors are whole, as the wire has it. Looks at the disk."""
        files = {entry.file for entry in self.tensors.values()}
        there = {file for file in files if file.is_file()}
        ranges: list[tuple[int, int]] = []
        for number, entry in enumerate(self.tensors.values()):
            if entry.file not in there:
                continue
            if ranges and ranges[-1][1] == number:
                ranges[-1] = (ranges[-1][0], number + 1)
            else:
                ranges.append((number, number + 1))
        return tuple(ranges)

    def read_chunk(self, tensor: str, chunk: int) -> bytes:
        """Raises WeightsMissing for what is not there."""
        entry = self.tensors.get(tensor)
        start = chunk * CHUNK_BYTES
        if entry is None or start >= entry.size_bytes:
            raise WeightsMissing("there is no such chunk in this model")
        size_bytes = min(CHUNK_BYTES, entry.size_bytes - start)
        data = _read(entry.file, entry.offset + start, size_bytes)
        if len(data) != size_bytes:
            raise WeightsMissing("that chunk is not held here")
        return data


def _read(path: Path, offset: int, size_bytes: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size_bytes)
    except OSError:  # dropped since, or a bad disk: either way not to be had from us
        return b""


class WeightServer:
    """The handler of links that peers opened for bulk."""

    def __init__(
        self,
        may_fetch: Callable[[bytes], bool] = lambda node: True,
        may_ask: Callable[[bytes], bool] = lambda node: True,
    ) -> None:
        """`may_fetch`: who gets weights; `may_ask`: who gets a model's tokenizer, which whoever asks questions needs."""
        self._may_fetch, self._may_ask = may_fetch, may_ask
        self.counters: Counter[str] = Counter()
        self._offered: dict[str, OfferedWeights] = {}
        self._busy: Counter[Link] = Counter()  # requests being read
        self._reading = asyncio.Semaphore(_READERS)
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<WeightServer {len(self._offered)} models, {len(self._tasks)} requests, {dict(self.counters)}>"

    def offer(self, weights: OfferedWeights) -> None:
        self._offered[weights.weights_sha256] = weights

    def offered(self, weights_sha256: str) -> OfferedWeights | None:
        return self._offered.get(weights_sha256)

    def withdraw(self, weights_sha256: str) -> None:
        self._offered.pop(weights_sha256, None)

    def on_message(self, link: Link, message: Message, body: bytes) -> None:
        if not isinstance(message, GetTokenizer | GetHoldings | GetChunk) or body:
            self.counters["not_for_bulk_links"] += 1
            return
        if not (self._may_ask if isinstance(message, GetTokenizer) else self._may_fetch)(link.peer):
            self.counters["may_not_fetch"] += 1
            error = NotEntitled("this node is not trusted to hold these weights")
            self._send(link, Failed(message.nonce, error.code, str(error)))
            return
        if self._busy[link] >= MAX_REQUESTS or link.queued_bytes > MAX_QUEUED_BYTES:
            self.counters["too_many_chunk_requests"] += 1
            self._send(link, Failed(message.nonce, BUSY, "ask for fewer at once"))
            return
        self._busy[link] += 1
        task = asyncio.get_running_loop().create_task(self._answer(link, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_lost(self, link: Link, reason: str) -> None:
        self._busy.pop(link, None)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, link: Link, request: GetTokenizer | GetHoldings | GetChunk) -> None:
        try:
            answer, data = await self._find(request)
        except PotluckError as error:
            answer, data = Failed(request.nonce, error.code, str(error)), b""
        finally:
            if link in self._busy:
                self._busy[link] -= 1
        self._send(link, answer, data)

    async def _find(self, request: GetTokenizer | GetHoldings | GetChunk) -> tuple[Message, bytes]:
        offered = self._offered.get(request.weights_sha256)
        if offered is None:
            raise ModelNotFound("this node does not have that model")
        if isinstance(request, GetTokenizer):
            answer = TokenizerData(request.nonce, len(offered.manifest), len(offered.tokenizer))
            return answer, offered.manifest + offered.tokenizer
        async with self._reading:
            if isinstance(request, GetHoldings):
                return Holdings(request.nonce, await asyncio.to_thread(offered.held_ranges)), b""
            data = await asyncio.to_thread(offered.read_chunk, request.tensor, request.chunk)
        self.counters["chunks_served"] += 1
        return ChunkData(request.nonce), data

    def _send(self, link: Link, message: Message, body: bytes = b"") -> None:
        try:
            link.send(message, body)
        except LinkError:  # gone, or full of what it does not read; its own side notices
            self.counters["chunk_not_delivered"] += 1
