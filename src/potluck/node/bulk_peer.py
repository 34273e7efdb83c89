"""A link for bulk to one peer: numbered requests for chunks, manifests and holdings, and who gets the answers."""

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from potluck.core.errors import PotluckError, ShardUnavailable
from potluck.identity.keys import short_id
from potluck.net.link import Link, Transport
from potluck.net.peers import DIAL_TIMEOUT_S
from potluck.weights.peer_fetch import Ask
from potluck.wire.messages import BulkLink, ChunkData, Failed, GetChunk, Holdings, Message, TokenizerData

ANSWER_TIMEOUT_S = 10.0


class WeightSource(msgspec.Struct, frozen=True):
    """A peer that may have some of the weights, and where it listens; `others` are tried where `address` leads nowhere."""

    node: bytes
    address: str
    others: tuple[str, ...] = ()


class BulkPeer:
    """A link for bulk to one source: numbered requests, and who gets the answers. The handler of that link."""

    def __init__(self, source: WeightSource, on_answer: "OnAnswer", on_gone: Callable[["BulkPeer"], None]) -> None:
        self.source = source
        self.asked: dict[int, Ask] = {}
        self._on_answer, self._on_gone = on_answer, on_gone
        self._link: Link | None = None
        self._nonces = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Message, bytes]]] = {}

    async def dial(self, transport: Transport) -> None:
        """Raises what the last of its addresses did, where none leads to it."""
        *first, last = (self.source.address, *self.source.others)
        for address in first:
            try:
                self._link = await transport.dial(address, self.source.node, self, DIAL_TIMEOUT_S)
                break
            except (PotluckError, OSError):  # a network that this machine is not on
                continue
        else:
            self._link = await transport.dial(last, self.source.node, self, DIAL_TIMEOUT_S)
        self._link.send(BulkLink())

    async def question(
        self, make: Callable[[int], Message], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[Message, bytes]:
        """One request and its answer. Raises ShardUnavailable where there is none."""
        nonce = next(self._nonces)
        future = self._waiting[nonce] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(nonce))
            answer, body = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise ShardUnavailable(f"{short_id(self.source.node)} does not answer") from None
        finally:
            self._waiting.pop(nonce, None)
        if isinstance(answer, Failed):
            raise ShardUnavailable(f"{short_id(self.source.node)}: {answer.code}")
        return answer, body

    def ask(self, ask: Ask, weights: str) -> None:
        """Raises LinkError."""
        nonce = next(self._nonces)
        self._send(GetChunk(nonce, weights, ask.tensor, ask.chunk))
        self.asked[nonce] = ask

    def _send(self, message: Message) -> None:
        assert self._link is not None
        self._link.send(message)

    def on_message(self, link: Link, message: Message, body: bytes) -> None:
        nonce = getattr(message, "nonce", None)
        if not isinstance(message, ChunkData | Failed | Holdings | TokenizerData) or nonce is None:
            self._fail()
        elif nonce in self._waiting:
            if not self._waiting[nonce].done():
                self._waiting[nonce].set_result((message, body))
        elif nonce in self.asked and isinstance(message, ChunkData | Failed):
            self._on_answer(self, self.asked.pop(nonce), message, body)
        else:
            self._fail()  # nobody asked: there is no reason to listen on

    def on_lost(self, link: Link, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ShardUnavailable(f"{short_id(self.source.node)}: {reason}"))
        self._on_gone(self)

    def _fail(self) -> None:
        assert self._link is not None
        self._link.abort()
        self.on_lost(self._link, "it answers what nobody asked")

    def close(self) -> None:
        if self._link is not None:
            self._link.abort()  # nothing that is still under way is wanted


OnAnswer = Callable[[BulkPeer, Ask, ChunkData | Failed, bytes], None]
