"""A node that speaks the protocol and means no good: it offers a shard, opens sessions, and sends rubbish on. No weights, no worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.peers import PeerLinks
from potluck.net.tls import TlsTransport
from potluck.wire.messages import (
    Close,
    Describe,
    Described,
    Failed,
    GetTokenizer,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    Result,
    Rewire,
    Rewired,
    ShardInfo,
    Step,
    TokenizerData,
)


class LyingShard:
    """`row` is what it sends for every position; `token` what it chooses where it owns the output; `text_side` its tokenizer."""

    def __init__(
        self, info: ShardInfo, row: bytes = b"", token: int = 1, text_side: tuple[bytes, bytes] | None = None
    ) -> None:
        self._key = NodeKey.generate()
        self._transport = TlsTransport(self._key, admit_anyone)
        self.links = PeerLinks(self.id, self._transport, self._on_message, lambda node, reason: None)
        self.address = ""
        self.told = 0  # steps that it has lied about
        self.chances = 0  # sessions that were opened
        self._info, self._row, self._token, self._text_side = info, row, token, text_side
        self._sessions: dict[bytes, tuple[bytes, Open]] = {}
        self._lengths: dict[bytes, int] = {}

    @property
    def id(self) -> bytes:
        return self._key.node_id

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["LyingShard"]:
        listener = await self._transport.listen("127.0.0.1:0", self.links)
        self.address = listener.address
        try:
            yield self
        finally:
            listener.close()
            await self.links.close()

    def _on_message(self, sender: bytes, message: Message, body: bytes) -> None:
        if isinstance(message, Describe):
            self._say(sender, Described(message.nonce, self.id, "0", (self._info,), 1, (1,)))
        elif isinstance(message, GetTokenizer):
            self._send_text_side(sender, message)
        elif isinstance(message, Open):
            self.chances += 1
            self._sessions[message.session], self._lengths[message.session] = (sender, message), 0
            self._say(sender, Opened(message.session, message.epoch))
        elif isinstance(message, Step) and message.session in self._sessions:
            self._lie(message)
        elif isinstance(message, Rewire):
            self._say(sender, Rewired(message.session, message.epoch, message.length, 0))
        elif isinstance(message, Probe):
            length = self._lengths.get(message.session, 0)
            self._say(sender, Probed(message.session, message.nonce, True, 0, length, length))
        elif isinstance(message, Close):
            self._sessions.pop(message.session, None)

    def _lie(self, step: Step) -> None:
        head, opened = self._sessions[step.session]
        stop = step.position + step.count
        self._lengths[step.session] = stop
        self.told += 1
        hop = opened.wiring.next
        if hop is None:
            self._say(head, Result(step.session, step.epoch, stop, self._token if step.chooses else None))
            return
        onward = Step(
            hop.session, step.epoch, step.position, step.count, opened.stage.stop, "fp32", step.chooses, source=step.session
        )  # fmt: skip
        self.links.send(hop.node, hop.address, onward, self._row * step.count)

    def _send_text_side(self, sender: bytes, message: GetTokenizer) -> None:
        if self._text_side is None:
            self._say(sender, Failed(message.nonce, "model_not_found", "none of your business"))
            return
        manifest, tokenizer = self._text_side
        answer = TokenizerData(message.nonce, len(manifest), len(tokenizer))
        self.links.send(sender, None, answer, manifest + tokenizer)

    def _say(self, node: bytes, message: Message) -> None:
        self.links.send(node, None, message)
