"""Links by node: send to a node by its id, dialling it where an address is known. Knows nothing of what is said.

Messages to a node leave in the order in which they were sent, also those that waited for its link. A node whose link breaks, or that
cannot be reached, is reported lost, once for every time it was there. Messages to oneself come back through the loop, in order.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from potluck.core.errors import PotluckError
from potluck.net.link import Link, Transport
from potluck.wire.messages import Message

_LOG = logging.getLogger(__name__)
DIAL_TIMEOUT_S = 3.0
_MAX_WAITING = 256  # messages to a node that is being dialled

OnMessage = Callable[[bytes, Message, bytes], None]
OnLost = Callable[[bytes, str], None]


class PeerLinks:
    """All links of one node; the handler of its transport's callbacks."""

    def __init__(self, node: bytes, transport: Transport, on_message: OnMessage, on_lost: OnLost) -> None:
        self._node, self._transport = node, transport
        self._on_message, self._on_lost = on_message, on_lost
        self._links: dict[bytes, list[Link]] = {}
        self._waiting: dict[bytes, list[tuple[Message, bytes]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<PeerLinks to {len(self._links)} nodes, dialling {len(self._waiting)}>"

    def is_linked(self, node: bytes) -> bool:
        return node in self._links

    async def connect(self, address: str, node: bytes | None = None, timeout_s: float = DIAL_TIMEOUT_S) -> bytes:
        """A link to whoever answers at `address` (or to `node` only); returns its id. Raises the transport's errors."""
        link = await self._transport.dial(address, node, self, timeout_s)
        self._adopt(link)
        return link.peer

    def send(self, node: bytes, address: str | None, message: Message, body: bytes = b"") -> None:
        """Never blocks. What cannot be delivered shows as a lost node."""
        if node == self._node:
            asyncio.get_running_loop().call_soon(self._on_message, node, message, body)
            return
        links = self._links.get(node)
        if links:
            self._send_on(links[-1], message, body)
        elif node in self._waiting:
            self._queue(node, message, body)
        elif address:
            self._waiting[node] = [(message, body)]
            self._own(self._dial(node, address))
        else:
            asyncio.get_running_loop().call_soon(self._on_lost, node, "there is no link to it")

    def _send_on(self, link: Link, message: Message, body: bytes) -> None:
        try:
            link.send(message, body)
        except PotluckError as error:
            # Closed or full: either way what follows would have a hole in it.
            self.on_lost(link, str(error))
            link.abort()

    def _queue(self, node: bytes, message: Message, body: bytes) -> None:
        waiting = self._waiting[node]
        if len(waiting) < _MAX_WAITING:
            waiting.append((message, body))
        else:
            self._waiting.pop(node)
            self._on_lost(node, "too much waits for its link")

    async def _dial(self, node: bytes, address: str) -> None:
        try:
            await self.connect(address, node)
        except (PotluckError, OSError) as error:
            if self._waiting.pop(node, None) is not None:
                self._on_lost(node, f"cannot be reached: {error}")

    def _adopt(self, link: Link) -> None:
        links = self._links.setdefault(link.peer, [])
        if link not in links:
            links.append(link)
        for message, body in self._waiting.pop(link.peer, ()):
            self._send_on(link, message, body)

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ the transport's callbacks

    def on_message(self, link: Link, message: Message, body: bytes) -> None:
        self._adopt(link)
        self._on_message(link.peer, message, body)

    def on_lost(self, link: Link, reason: str) -> None:
        links = self._links.get(link.peer, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._links[link.peer]
            self._on_lost(link.peer, reason)

    def drop(self, node: bytes, reason: str) -> None:
        """Cuts every link to a node at once; it is reported lost where there was one."""
        links = self._links.pop(node, [])
        for link in links:
            link.abort()
        if links:
            self._on_lost(node, reason)

    def linked(self) -> list[bytes]:
        return list(self._links)

    async def close(self) -> None:
        """Closes every link; nobody is reported lost any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links, self._links = self._links, {}
        for link in [link for group in links.values() for link in group]:
            link.close()
