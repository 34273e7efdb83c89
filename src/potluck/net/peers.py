"""Links by node: send to a node by its id, dialling it where an address is known. Knows nothing of what is said.

Messages to a node leave in the order in which they were sent, also those that waited for its link. A node whose link breaks, or that
cannot be reached, is reported lost, once for every time it was there. Messages to oneself come back through the loop, in order.
Who may have a link is asked before it is dialled, because others say which nodes are sent to, and where those are; and again
whenever a link is taken into use: a node can lose its welcome after its handshake.
Links for bulk are apart: nothing else is ever sent on them, and their loss is no node's.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence

from potluck.core.errors import PotluckError, WireMisuse, WrongPeer
from potluck.core.processors import give_way_where_few
from potluck.identity.keys import short_id
from potluck.net.link import Link, LinkHandler, Transport
from potluck.wire.effects import SendTo
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.handshake import Ticket
from potluck.wire.messages import BulkLink, Message

_LOG = logging.getLogger(__name__)
DIAL_TIMEOUT_S = 3.0
_SETTLED_S = 2 * DIAL_TIMEOUT_S  # when both have long known that they are linked
_MAX_WAITING = 256  # messages to a node that is being dialled
MAX_DIALS = (
    128  # at a time, two of the longest pipelines: each takes a file handle, and any head may name hops without end
)
MAX_BULK_LINKS = 4  # to one node
# Messages of one step: round the ring, and to the head. With more answers no core is free, and whoever gives way waits for a whole batch.
_ONE_ANSWER = 2

OnMessage = Callable[[bytes, Message, bytes], None]
OnLost = Callable[[bytes, str], None]
MayLink = Callable[[bytes], bool]


class PeerLinks:
    """All links of one node; the handler of its transport's callbacks."""

    def __init__(
        self, node: bytes, transport: Transport, on_message: OnMessage, on_lost: OnLost,
        may_link: MayLink = lambda node: True, bulk: LinkHandler | None = None,
    ) -> None:  # fmt: skip
        """`bulk`: gets what arrives on links that others opened for bulk; without it they are refused."""
        self._node, self._transport, self._may_link = node, transport, may_link
        self._on_message, self._on_lost = on_message, on_lost
        self._bulk = bulk
        self._links: dict[bytes, list[Link]] = {}  # what is sent goes over the last one
        self._in_use_since_s: dict[bytes, float] = {}  # that one, of every node with a link
        self._bulk_links: dict[bytes, list[Link]] = {}  # opened by the other side
        self._waiting: dict[bytes, list[tuple[Message, bytes]]] = {}
        self._dials: set[asyncio.Task[None]] = set()  # a few of them for nodes for which nothing waits any more

    def __repr__(self) -> str:
        return f"<PeerLinks to {len(self._links)} nodes, dialling {len(self._waiting)}>"

    def is_linked(self, node: bytes) -> bool:
        return node in self._links

    async def connect(
        self, address: str, node: bytes | None = None, ticket: Ticket | None = None, timeout_s: float = DIAL_TIMEOUT_S
    ) -> bytes:
        """A link to whoever answers at `address` (or to `node` only); returns its id. Raises the transport's errors.

        `ticket`: an invite that is redeemed there. WrongPeer also where `may_link` has something against whoever answers.
        """
        link = await self._transport.dial(address, node, self, timeout_s, ticket)
        if node is None and link not in (known := self._links.get(link.peer, ())) and known:
            link.close()  # found at another of its addresses: what is on its way keeps its order on one link
            return link.peer
        if not self._adopt(link):
            raise WrongPeer(f"node {short_id(link.peer)} answers there, which is not one of this swarm")
        return link.peer

    def drop(self, node: bytes, reason: str, farewell: Message | None = None) -> None:
        """Cuts every link with a node, and reports it lost; what waited for one is forgotten. It may not come back by itself.

        `farewell`: the last that it hears; nothing that it still says is heeded.
        """
        was_waiting = self._waiting.pop(node, None) is not None
        for bulk in list(self._bulk_links.get(node, ())):
            self.on_lost(bulk, reason)
            bulk.abort()
        links = self._links.pop(node, [])
        self._in_use_since_s.pop(node, None)
        if links and farewell is not None:
            self._send_on(links[-1], farewell, b"")
        for link in links:
            link.close() if farewell is not None else link.abort()
        if links or was_waiting:
            _LOG.info("links with node %s cut: %s", short_id(node), reason)
            self._on_lost(node, reason)

    def drop_unwelcome(self, reason: str) -> None:
        """Drops every node that may not have a link any more; to be called when that may have changed."""
        for node in [node for node in {*self._links, *self._waiting, *self._bulk_links} if not self._may_link(node)]:
            self.drop(node, reason)

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
        elif not address:
            self._lose_soon(node, "there is no link to it")
        elif (obstacle := self._obstacle(node)) is not None:
            self._lose_soon(node, obstacle)
        else:
            self._waiting[node] = [(message, body)]
            self._own(self._dial(node, address))

    def send_all(self, effects: Sequence[SendTo]) -> None:
        """What goes to one node leaves together, so that it arrives together: a shard computes in one batch what is there."""
        last = {effect.node: effect for effect in effects}
        for effect in effects:
            links = self._links.get(effect.node)
            if not links or effect.node == self._node:
                self.send(effect.node, effect.address, effect.message, effect.body)
                continue
            is_last = last[effect.node] is effect
            self._send_on(links[-1], effect.message, effect.body, is_more=not is_last)
            if is_last and len(effects) <= _ONE_ANSWER:
                give_way_where_few()  # to that node, where it is on this machine; those who are sent to first are in a hurry

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        """See Link.foresee; on every link with that node, as it is the one who decides which to use."""
        for link in self._links.get(node, ()):
            link.foresee(step, on_arrival)

    def send_foreseen(self, node: bytes, step: ForeseenStep, spent: bytes, body: bytes) -> bool:
        """As `send`, with a step whose frame was made beforehand; false: nothing was sent, for want of a link or as it does not fit."""
        links = self._links.get(node)
        if not links or node == self._node:
            return False
        link = links[-1]
        try:
            link.send_foreseen(step, spent, body)
        except WireMisuse:  # other times or another body than was foreseen: it can still be sent as any step
            return False
        except PotluckError as error:
            self._lose_link_soon(link, error)
        give_way_where_few()
        return True

    def _obstacle(self, node: bytes) -> str | None:
        """Why a node is not even dialled."""
        if not self._may_link(node):
            return "it may have no link with this node"
        return "too many nodes are being dialled" if len(self._dials) >= MAX_DIALS else None

    def _lose_soon(self, node: bytes, reason: str) -> None:
        """Whoever sends is not told in the middle of that."""
        asyncio.get_running_loop().call_soon(self._on_lost, node, reason)

    def _send_on(self, link: Link, message: Message, body: bytes, *, is_more: bool = False) -> None:
        try:
            link.send(message, body, is_more=is_more)
        except PotluckError as error:
            self._lose_link_soon(link, error)

    def _lose_link_soon(self, link: Link, error: PotluckError) -> None:
        """Closed or full: either way what follows would have a hole in it. Whoever sends is not told in the middle of that."""
        asyncio.get_running_loop().call_soon(self.on_lost, link, str(error))
        link.abort()

    def _queue(self, node: bytes, message: Message, body: bytes) -> None:
        waiting = self._waiting[node]
        if len(waiting) < _MAX_WAITING:
            waiting.append((message, body))
        else:
            self._waiting.pop(node)
            self._lose_soon(node, "too much waits for its link")

    async def _dial(self, node: bytes, address: str) -> None:
        try:
            await self.connect(address, node)
        except (PotluckError, OSError) as error:
            if self._waiting.pop(node, None) is not None:
                self._on_lost(node, f"cannot be reached: {error}")

    def _adopt(self, link: Link) -> bool:
        links = self._links.get(link.peer, [])
        if link not in links:
            if not self._may_link(link.peer):
                link.abort()
                return False
            self._links[link.peer] = self._in_line(link, links)
        for message, body in self._waiting.pop(link.peer, ()):
            self._send_on(link, message, body)
        return True

    def _in_line(self, link: Link, others: list[Link]) -> list[Link]:
        """The last one is sent on. Two nodes may dial each other in the same moment, and what is on its way must keep its order;
        later on, whoever dials again has lost the link that there was.
        """
        now_s = asyncio.get_running_loop().time()
        if others and now_s - self._in_use_since_s[link.peer] < _SETTLED_S:
            return [link, *others]
        self._in_use_since_s[link.peer] = now_s
        return [*others, link]

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    # ------------------------------------------------------------ the transport's callbacks

    def on_message(self, link: Link, message: Message, body: bytes) -> None:
        if self._bulk_links and link in self._bulk_links.get(link.peer, ()):
            assert self._bulk is not None
            self._bulk.on_message(link, message, body)
        elif isinstance(message, BulkLink):
            self._set_apart(link)
        elif link in self._links.get(link.peer, ()) or self._adopt(link):
            self._on_message(link.peer, message, body)

    def _set_apart(self, link: Link) -> None:
        apart = self._bulk_links.get(link.peer, [])
        is_wanted = self._bulk is not None and self._may_link(link.peer) and len(apart) < MAX_BULK_LINKS
        if not is_wanted or link in self._links.get(link.peer, ()):
            self.on_lost(link, "a link for bulk that is not wanted")
            link.abort()
        else:
            self._bulk_links[link.peer] = [*apart, link]

    def on_lost(self, link: Link, reason: str) -> None:
        if link in self._bulk_links.get(link.peer, ()):
            assert self._bulk is not None
            self._bulk_links[link.peer].remove(link)
            if not self._bulk_links[link.peer]:
                del self._bulk_links[link.peer]
            return self._bulk.on_lost(link, reason)
        links = self._links.get(link.peer, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._links[link.peer], self._in_use_since_s[link.peer]
            self._on_lost(link.peer, reason)
        return None

    def linked(self) -> list[bytes]:
        return list(self._links)

    async def close(self) -> None:
        """Closes every link; nobody is reported lost any more."""
        tasks = list(self._dials)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        groups = [*self._links.values(), *self._bulk_links.values()]
        self._links, self._bulk_links, self._in_use_since_s = {}, {}, {}
        for link in [link for group in groups for link in group]:
            link.close()
