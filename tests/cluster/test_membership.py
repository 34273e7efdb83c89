"""Swarm services on real links (TLS on loopback): they find each other, agree on who is there, and notice who goes."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.core.errors import PeerRefused
from potluck.identity.keys import NodeKey
from potluck.identity.signed import Signed
from potluck.net.peers import PeerLinks
from potluck.net.tls import TlsTransport
from potluck.swarm.discovery import DiscoverySettings
from potluck.swarm.events import Outcome
from potluck.swarm.interfaces import Interface
from potluck.swarm.service import SwarmService, SwarmSettings
from potluck.swarm.view import View
from potluck.wire.messages import Message
from tests.support.link_ends import run_test
from tests.support.swarm_records import KEYS, People, advert, member_record, shard

SOON_S = 15.0


class Machine:
    """A node's links and its membership, without shards."""

    def __init__(self, key: NodeKey, home: Path, members: tuple[NodeKey, ...], finds: bool = False) -> None:
        self.key, self.home, self.finds = key, home, finds
        self.people = People(*members)
        self.views: list[View] = []
        transport = TlsTransport(key, lambda node, ticket: None if node in self.people.members else "not a member")
        self.links = PeerLinks(key.node_id, transport, self._on_message, self._on_lost)
        self._transport = transport
        self.service: SwarmService

    async def start(self, *bootstrap: str, records: tuple[Signed, ...] = ()) -> "Machine":
        self.listener = await self._transport.listen("127.0.0.1:0", self.links)
        port = int(self.listener.address.rpartition(":")[2])
        discovery = DiscoverySettings(b"swarm-id", self.key.node_id, port) if self.finds else None
        settings = SwarmSettings(
            peers_file=self.home / "peers.json", incarnation_file=self.home / "incarnation", bootstrap=bootstrap,
            discovery=discovery,
        )  # fmt: skip
        self.service = SwarmService(
            self.key, self.links, self.people.trust(), settings, self.views.append,
            interfaces=lambda: [Interface("lo", "127.0.0.1")],
        )  # fmt: skip
        await self.service.start(records)
        self.service.publish(advert(self.key, addresses=(self.listener.address,), shards=(shard(),)))
        return self

    def _on_message(self, sender: bytes, message: Message, body: bytes) -> None:
        self.service.on_message(sender, message)  # type: ignore[arg-type]

    def _on_lost(self, node: bytes, reason: str) -> None:
        self.service.on_lost(node, reason)

    def sees(self, *keys: NodeKey) -> bool:
        """Its last view shows exactly these, linked."""
        nodes = self.views[-1].nodes if self.views else {}
        linked = {node for node, seen in nodes.items() if seen.is_connected or seen.is_own}
        return set(nodes) == linked == {key.node_id for key in keys}

    async def stop(self) -> None:
        await self.service.stop()
        self.listener.close()
        await self.links.close()
        assert self.service.failure is None

    async def die(self) -> None:
        """Without a word."""
        self.service._is_stopping = True
        for task in list(self.service._tasks):
            task.cancel()
        self.listener.close()
        for node in self.links.linked():
            self.links.drop(node, "dead")
        await self.links.close()


async def until(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_done():  # noqa: ASYNC110  # what is waited for are several nodes' views
            await asyncio.sleep(0.02)


def test_a_swarm_forms_from_one_address_and_follows_what_happens(tmp_path: Path) -> None:
    async def main() -> None:
        members = KEYS[:4]
        first = await Machine(KEYS[0], tmp_path / "0", members).start()
        others = [
            await Machine(key, tmp_path / str(number), members).start(first.listener.address)
            for number, key in enumerate(KEYS[1:4], start=1)
        ]
        await until(lambda: all(machine.sees(*members) for machine in (first, *others)))
        await others[2].die()
        await until(lambda: all(machine.sees(*KEYS[:3]) for machine in (first, *others[:2])))
        await others[1].stop()
        await until(lambda: all(machine.sees(*KEYS[:2]) for machine in (first, others[0])))
        back = await Machine(KEYS[2], tmp_path / "2", members).start()  # no address given: it remembers
        await until(lambda: all(machine.sees(*KEYS[:3]) for machine in (first, others[0], back)))
        assert back.service.membership.incarnation == 2
        offers = first.views[-1].offers()
        assert {offer.node for offer in offers} == {key.node_id for key in KEYS[:3]}
        for machine in (first, others[0], back):
            await machine.stop()

    run_test(main())


def test_an_expelled_member_is_cut_off_and_cannot_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        members = KEYS[:3]
        first = await Machine(KEYS[0], tmp_path / "0", members).start()
        second = await Machine(KEYS[1], tmp_path / "1", members).start(first.listener.address)
        third = await Machine(KEYS[2], tmp_path / "2", members).start(first.listener.address)
        await until(lambda: all(machine.sees(*members) for machine in (first, second, third)))
        first.service.add_records([member_record(KEYS[2], "expulsion")])
        await until(lambda: all(machine.sees(*KEYS[:2]) for machine in (first, second)))
        assert not first.links.is_linked(KEYS[2].node_id)
        assert not second.links.is_linked(KEYS[2].node_id)
        refusal = None
        with contextlib.suppress(PeerRefused):
            refusal = await third.links.connect(second.listener.address)
        assert refusal is None
        for machine in (third, second, first):
            await machine.stop()

    run_test(main())


def test_members_find_each_other_by_mdns_and_strangers_get_no_link(tmp_path: Path) -> None:
    from tests.cluster.test_discovery import needs_multicast

    needs_multicast()

    async def main() -> None:
        first = await Machine(KEYS[0], tmp_path / "0", KEYS[:2], finds=True).start()
        second = await Machine(KEYS[1], tmp_path / "1", KEYS[:2], finds=True).start()
        stranger = await Machine(KEYS[4], tmp_path / "4", KEYS[:5], finds=True).start()
        await until(lambda: first.sees(*KEYS[:2]) and second.sees(*KEYS[:2]))
        assert not first.links.is_linked(KEYS[4].node_id)
        for machine in (first, second, stranger):
            await machine.stop()

    run_test(main())


def test_a_tick_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first = await Machine(KEYS[0], tmp_path / "0", KEYS[:2]).start()
        tick, failed = first.service.membership.tick, asyncio.Event()

        def fail_once(now_s: float) -> Outcome:
            if failed.is_set():
                return tick(now_s)
            failed.set()
            raise ValueError("what nobody thought of")

        monkeypatch.setattr(first.service.membership, "tick", fail_once)
        await failed.wait()
        second = await Machine(KEYS[1], tmp_path / "1", KEYS[:2]).start(first.listener.address)
        await until(lambda: all(machine.sees(*KEYS[:2]) for machine in (first, second)))
        await second.die()
        await until(lambda: first.sees(KEYS[0]))  # it noticed, which takes ticks
        first.service.failure = None
        await first.stop()

    run_test(main())
