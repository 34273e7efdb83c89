"""Two nodes and a link between them, over each kind of network; handlers that remember what they were told."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from potluck.identity.keys import NodeKey
from potluck.net.link import Admits, Link, Listener, Transport, admit_anyone
from potluck.net.loop import run
from potluck.net.memory import MemoryNetwork
from potluck.net.tcp import TcpTransport
from potluck.net.tls import TlsTransport
from potluck.wire.messages import Message

ACCEPTER, DIALER, OTHER = (NodeKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
PATIENCE_S = 20.0  # far above what anything takes; a test that needs it has failed


class Recorder:
    """A handler that keeps everything, and lets a test wait until enough has come."""

    def __init__(self, answer: Callable[[Link, Message, bytes], None] | None = None) -> None:
        self.received: list[tuple[Message, bytes]] = []
        self.links: list[Link] = []
        self.lost: list[str] = []
        self._answer = answer
        self._changed = asyncio.Event()

    def on_message(self, link: Link, message: Message, body: bytes) -> None:
        if link not in self.links:
            self.links.append(link)
        self.received.append((message, body))
        self._changed.set()
        if self._answer is not None:
            self._answer(link, message, body)

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)
        self._changed.set()

    @property
    def messages(self) -> list[Message]:
        return [message for message, _ in self.received]

    async def until(self, is_enough: Callable[["Recorder"], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_enough(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_count(self, count: int) -> None:
        await self.until(lambda recorder: len(recorder.received) >= count)


class Net(Protocol):
    """Makes transports that reach each other."""

    def transport(self, key: NodeKey, admits: Admits = admit_anyone) -> Transport: ...


class MemoryNet:
    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def transport(self, key: NodeKey, admits: Admits = admit_anyone) -> Transport:
        return self.network.transport(key.node_id, admits)


class TcpNet:
    def transport(self, key: NodeKey, admits: Admits = admit_anyone) -> Transport:
        return TcpTransport(key, admits)


class TlsNet:
    def transport(self, key: NodeKey, admits: Admits = admit_anyone) -> Transport:
        return TlsTransport(key, admits)


NETS: dict[str, Callable[[], Net]] = {"memory": MemoryNet, "tcp": TcpNet, "tls": TlsNet}


class Ends:
    """A link from DIALER to ACCEPTER with both handlers. `there` is the accepter's end, once it has received something."""

    def __init__(self, listener: Listener, accepter: Recorder, dialer: Recorder, link: Link) -> None:
        self.listener = listener
        self.accepter = accepter
        self.dialer = dialer
        self.link = link

    @property
    def there(self) -> Link:
        return self.accepter.links[0]


async def connect(
    net: Net,
    answer: Callable[[Link, Message, bytes], None] | None = None,
    answer_back: Callable[[Link, Message, bytes], None] | None = None,
) -> Ends:
    accepter, dialer = Recorder(answer), Recorder(answer_back)
    listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", accepter)
    link = await net.transport(DIALER).dial(listener.address, ACCEPTER.node_id, dialer, PATIENCE_S)
    return Ends(listener, accepter, dialer, link)


def run_test(main: Coroutine[Any, Any, None]) -> None:
    """Run on the product's loop; fail when a task outlives the test, or a callback raised."""

    async def watched() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        await main
        for _ in range(3):  # let what was cancelled end
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left
        assert not problems, problems

    run(watched())
