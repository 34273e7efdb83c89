"""Links by node: who is dialled, and where a node loses its welcome: cut at once, and not taken up again."""

import asyncio
from collections.abc import Callable

import pytest

from potluck.core.errors import WrongPeer
from potluck.identity.keys import NodeKey
from potluck.net import peers
from potluck.net.link import LinkHandler, admit_anyone
from potluck.net.memory import MemoryLink, MemoryNetwork, MemoryTransport, Route
from potluck.net.peers import _MAX_WAITING, MAX_DIALS, PeerLinks
from potluck.wire.effects import SendTo
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.handshake import Ticket
from potluck.wire.messages import Message
from tests.support.link_ends import ACCEPTER, DIALER, OTHER, run_test
from tests.support.wire_messages import describe, step


class CountingTransport(MemoryTransport):
    """Counts what it dials; where `is_dark`, nothing that it dials ever answers."""

    def __init__(self, network: MemoryNetwork, node: bytes) -> None:
        super().__init__(network, node, admit_anyone)
        self.dialled: list[str] = []
        self.is_dark = False
        self._light = asyncio.Event()

    async def dial(
        self, address: str, node: bytes | None, handler: LinkHandler, timeout_s: float, ticket: Ticket | None = None
    ) -> MemoryLink:
        self.dialled.append(address)
        if self.is_dark:
            await self._light.wait()
        return await super().dial(address, node, handler, timeout_s, ticket)

    def light_up(self) -> None:
        self.is_dark = False
        self._light.set()


class End:
    """A node with its links, which remembers what it was told."""

    def __init__(self, network: MemoryNetwork, key: NodeKey) -> None:
        self.received: list[bytes] = []
        self.messages: list[Message] = []
        self.lost: list[tuple[bytes, str]] = []
        self.unwelcome: set[bytes] = set()
        self.transport = CountingTransport(network, key.node_id)
        self.links = PeerLinks(key.node_id, self.transport, self._on_message, self._on_lost, self._may_link)

    async def listen(self) -> str:
        return (await self.transport.listen("memory:0", self.links)).address

    def _on_message(self, node: bytes, message: Message, body: bytes) -> None:
        self.received.append(node)
        self.messages.append(message)

    def _on_lost(self, node: bytes, reason: str) -> None:
        self.lost.append((node, reason))

    def _may_link(self, node: bytes) -> bool:
        return node not in self.unwelcome


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


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


def test_a_node_that_is_found_twice_keeps_its_one_link() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        for _ in range(3):
            assert await there.links.connect(address) == ACCEPTER.node_id
            there.links.send(ACCEPTER.node_id, None, describe())
            await settle()
        assert len(here.received) == 3
        assert [len(links) for end in (here, there) for links in end.links._links.values()] == [1, 1]
        assert here.lost == there.lost == []
        await there.links.close()
        await settle()

    run_test(main())


def test_whoever_sends_hears_of_a_loss_afterwards() -> None:
    """A head that heard of it in the middle would begin anew, and then go on with what it was about to send before."""

    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        await there.links.connect(address)
        [link] = there.links._links[ACCEPTER.node_id]
        link.close()
        there.links.send(ACCEPTER.node_id, None, describe())
        assert there.lost == []
        await settle()
        assert [node for node, _ in there.lost] == [ACCEPTER.node_id]
        there.transport.is_dark = True
        for _ in range(_MAX_WAITING + 1):
            there.links.send(OTHER.node_id, "memory:9", describe())
        assert len(there.lost) == 1
        await settle()
        assert there.lost[1:] == [(OTHER.node_id, "too much waits for its link")]
        await there.links.close()

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
        assert there.transport.dialled == [address]
        there.links.send(ACCEPTER.node_id, address, describe())
        assert there.lost == []  # whoever sends hears of it afterwards, as of any dial that fails
        await settle()
        assert there.lost == [(ACCEPTER.node_id, "it may have no link with this node")]
        assert there.transport.dialled == [address]
        assert here.received == []

    run_test(main())


def test_only_so_many_nodes_are_dialled_at_a_time() -> None:
    """Whoever makes a node send to ever new nodes at ever new addresses does not get all its file handles, nor a port scanner."""

    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        there.transport.is_dark = True
        nodes = [number.to_bytes(32, "big") for number in range(MAX_DIALS + 10)]
        for node in nodes:
            there.links.send(node, "memory:nowhere", describe())
            there.links.send(node, "memory:nowhere", describe())
        assert there.lost == []
        await settle()
        assert len(there.transport.dialled) == MAX_DIALS
        assert set(there.lost) == {(node, "too many nodes are being dialled") for node in nodes[MAX_DIALS:]}
        there.links.drop(nodes[0], "of no interest any more")
        there.links.send(ACCEPTER.node_id, address, describe())
        await settle()
        assert len(there.transport.dialled) == MAX_DIALS  # a dial that nobody waits for is one all the same
        there.transport.light_up()
        await settle()
        assert {node for node, reason in there.lost if reason.startswith("cannot be reached")} == set(
            nodes[1:MAX_DIALS]
        )
        there.links.send(ACCEPTER.node_id, address, describe())
        await settle()
        assert here.received == [DIALER.node_id]
        await there.links.close()
        await settle()

    run_test(main())


def test_nodes_that_dial_each_other_in_the_same_moment_keep_the_order_of_what_they_send() -> None:
    """The second link is no reason to leave the first, on which something long may still be under way."""

    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address, back = await here.listen(), await there.listen()
        await there.links.connect(address)
        await here.links.connect(back, DIALER.node_id)
        there.links.send(ACCEPTER.node_id, None, step(position=0), bytes(12 << 20))  # more than goes out at once
        here.links.send(DIALER.node_id, None, describe())  # makes the second link known there
        await until(lambda: bool(there.messages))
        there.links.send(ACCEPTER.node_id, None, step(position=1))
        await until(lambda: len(here.messages) == 2)
        assert [message.position for message in here.messages] == [0, 1]  # type: ignore[union-attr]

    run_test(main())


def test_whoever_dials_again_later_has_lost_the_link_that_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address, back = await here.listen(), await there.listen()
        await there.links.connect(address)
        there.links.send(ACCEPTER.node_id, None, describe())
        await settle()
        first = there.links._links[ACCEPTER.node_id]
        monkeypatch.setattr(peers, "_SETTLED_S", 0.0)
        await here.links.connect(back, DIALER.node_id)
        here.links.send(DIALER.node_id, None, describe())
        await settle()
        assert there.links._links[ACCEPTER.node_id][:-1] == first

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


def test_a_foreseen_step_goes_where_any_would() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        foreseen, told = ForeseenStep(step(1, 7), 1, 4), []
        assert not there.links.send_foreseen(ACCEPTER.node_id, foreseen, step().spent, b"body")
        there.links.foresee(ACCEPTER.node_id, foreseen, told.append)  # nobody to expect it from
        await there.links.connect(await here.listen())
        there.links.send(ACCEPTER.node_id, None, describe())
        await settle()
        here.links.foresee(DIALER.node_id, foreseen, told.append)
        assert there.links.send_foreseen(ACCEPTER.node_id, foreseen, step().spent, b"body")
        await settle()
        assert told == [b"body"]
        assert here.messages == [describe(), step(1, 7)]
        await there.links.close()
        await settle()

    run_test(main())


def test_a_foreseen_step_for_a_full_link_shows_as_a_lost_node() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        await there.links.connect(await here.listen())
        there.links.send(ACCEPTER.node_id, None, describe())
        await settle()
        network.freeze(ACCEPTER.node_id)
        foreseen = ForeseenStep(step(1, 7), 1, 60_000)
        for _ in range(20_000):
            if not there.links.send_foreseen(ACCEPTER.node_id, foreseen, step().spent, bytes(60_000)):
                break
            await asyncio.sleep(0)
        assert [node for node, _ in there.lost] == [ACCEPTER.node_id]
        assert not there.links.is_linked(ACCEPTER.node_id)
        network.thaw(ACCEPTER.node_id)
        await there.links.close()
        await here.links.close()
        await settle()

    run_test(main())


def test_a_foreseen_step_that_does_not_fit_is_not_sent_and_costs_no_link() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        await there.links.connect(await here.listen())
        foreseen = ForeseenStep(step(1, 7), 1, 4)
        assert not there.links.send_foreseen(ACCEPTER.node_id, foreseen, bytes(13), b"body")
        await settle()
        assert there.links.is_linked(ACCEPTER.node_id)
        assert (there.lost, here.lost, here.messages) == ([], [], [])
        await there.links.close()
        await settle()

    run_test(main())


def test_what_is_for_oneself_keeps_its_order_also_beside_a_link_to_oneself() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.set_route(ACCEPTER.node_id, ACCEPTER.node_id, Route(0.01))  # what went that way would come last
        end = End(network, ACCEPTER)
        await end.links.connect(await end.listen())
        assert not end.links.send_foreseen(ACCEPTER.node_id, ForeseenStep(step(1, 6), 1, 4), step().spent, b"body")
        end.links.send_all([SendTo(ACCEPTER.node_id, None, step(1, 6), b"body")])
        end.links.send(ACCEPTER.node_id, None, step(1, 7))
        await until(lambda: len(end.messages) == 2)
        assert end.messages == [step(1, 6), step(1, 7)]
        await end.links.close()
        await settle()

    run_test(main())


def test_a_foreseen_step_leaves_on_the_link_that_everything_leaves_on() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        links = [await there.transport.dial(address, ACCEPTER.node_id, there.links, 5.0) for _ in range(2)]
        for link in links:
            link.send(describe())  # each is adopted when its first message comes
        await settle()
        arrived: list[object] = []
        by_link = there.links.on_message
        there.links.on_message = lambda link, message, body: (arrived.append(link), by_link(link, message, body))[1]  # type: ignore[method-assign]
        here.links.send(DIALER.node_id, None, step(1, 6))
        assert here.links.send_foreseen(DIALER.node_id, ForeseenStep(step(1, 7), 1, 4), step().spent, b"body")
        here.links.send_all([SendTo(DIALER.node_id, None, step(1, 8), b"body")])
        await settle()
        assert there.messages == [step(1, 6), step(1, 7), step(1, 8)]
        assert len(set(map(id, arrived))) == 1
        await here.links.close()
        await settle()

    run_test(main())


def test_who_has_sent_the_one_step_that_is_waited_for_gives_up_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[int] = []
    monkeypatch.setattr(peers, "give_way_where_few", lambda: given_up.append(1))

    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        await there.links.connect(await here.listen())
        node = ACCEPTER.node_id
        assert there.links.send_foreseen(node, ForeseenStep(step(1, 7), 1, 4), step().spent, b"body")
        assert len(given_up) == 1
        there.links.send_all([SendTo(node, None, step(1, 8), b"body")])
        assert len(given_up) == 2
        there.links.send_all([SendTo(node, None, step(1, position), b"body") for position in range(9, 17)])
        assert len(given_up) == 2, "with several answers on their way there is more to send"
        await settle()
        await there.links.close()
        await settle()

    run_test(main())


def test_a_foreseen_step_is_expected_on_every_link_of_its_node() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = End(network, ACCEPTER), End(network, DIALER)
        address = await here.listen()
        told: list[bytes] = []
        links = [await there.transport.dial(address, ACCEPTER.node_id, there.links, 5.0) for _ in range(2)]
        for link in links:
            link.send(describe())
        await settle()
        here.links.foresee(DIALER.node_id, ForeseenStep(step(1, 7), 1, 4), told.append)
        for link in links:
            link.send(step(1, 7), b"body")
        await settle()
        assert told == [b"body", b"body"]
        for link in links:
            link.close()
        await settle()

    run_test(main())
