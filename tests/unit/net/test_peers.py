"""Links by node, where a node loses its welcome: cut at once, and not taken up again."""

import asyncio

import pytest

from potluck.core.errors import WrongPeer
from potluck.identity.keys import NodeKey
from potluck.net.memory import MemoryNetwork
from potluck.net.peers import PeerLinks
from potluck.wire.messages import Message
from tests.support.link_ends import ACCEPTER, DIALER, OTHER, run_test
from tests.support.wire_messages import describe


class End:
    """A node with its links, which remembers what it was told."""

    def __init__(self, network: MemoryNetwork, key: NodeKey) -> None:
        self.received: list[bytes] = []
        self.lost: list[tuple[bytes, str]] = []
        self.unwelcome: set[bytes] = set()
        self._transport = network.transport(key.node_id)
        self.links = PeerLinks(key.node_id, self._transport, self._on_message, self._on_lost, self._may_link)

    async def listen(self) -> str:
        return (await self._transport.listen("memory:0", self.links)).address

    def _on_message(self, node: bytes, message: Message, body: bytes) -> None:
        self.received.append(node)

    def _on_lost(self, node: bytes, reason: str) -> None:
        self.lost.append((node, reason))

    def _may_link(self, node: bytes) -> bool:
        return node not in self.unwelcome


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_dropped_node_is_cut_off_and_reported_once() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there, third = End(network, ACCEPTER), End(network, DIALER), End(network, OTHER)
        address = await here.listen()
        for end in (there, third):
            await end.links.connect(address)
            end.links.send(ACCEPTER.node_id, None, describe())
        await settle()
        here.unwelcome.add(DIALER.node_id)
        here.links.drop_unwelcome("expelled")
        here.links.drop_unwelcome("expelled")
        await settle()
        assert here.lost == [(DIALER.node_id, "expelled")]
        assert there.lost == [(ACCEPTER.node_id, "connection reset")]
        assert here.links.is_linked(OTHER.node_id)
        assert third.lost == []
        await third.links.close()
        await settle()

    run_test(main())


def test_a_link_that_was_silent_so_far_is_cut_when_it_speaks() -> None:
    """Accepted before the expulsion, and known to nobody until its first message."""

    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        await there.links.connect(await here.listen())
        here.unwelcome.add(DIALER.node_id)
        here.links.drop(DIALER.node_id, "expelled")
        there.links.send(ACCEPTER.node_id, None, describe())
        await settle()
        assert here.received == []
        assert here.lost == []
        assert there.lost == [(ACCEPTER.node_id, "connection reset")]

    run_test(main())


def test_nobody_dials_a_node_that_may_have_no_link() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        there.unwelcome.add(ACCEPTER.node_id)
        with pytest.raises(WrongPeer):
            await there.links.connect(address)
        there.links.send(ACCEPTER.node_id, address, describe())
        await settle()
        assert there.lost[0][0] == ACCEPTER.node_id
        assert here.received == []

    run_test(main())


def test_what_waits_for_a_dropped_node_is_forgotten() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        there.links.send(ACCEPTER.node_id, address, describe())
        there.unwelcome.add(ACCEPTER.node_id)
        there.links.drop(ACCEPTER.node_id, "expelled")
        await settle()
        assert there.lost == [(ACCEPTER.node_id, "expelled")]
        assert here.received == []

    run_test(main())
