"""Real mDNS between two discoveries on this machine, on whatever interfaces it has. Other nodes may be around, and seen."""

import asyncio
import secrets
import socket
from collections.abc import Callable

import pytest

from potluck.net.loop import run
from potluck.swarm.discovery import Discovery, DiscoverySettings
from potluck.swarm.interfaces import Interface, read_interfaces

LOOPBACK = Interface("lo", "127.0.0.1")
SWARM, OTHER_SWARM = secrets.token_bytes(16), secrets.token_bytes(16)
A, B, C = (secrets.token_bytes(32) for _ in range(3))
FOUND_WITHIN_S = 10.0


def multicast_problem(address: str) -> str:
    """Why multicast cannot be received on an address; empty where it can."""
    group, port = "239.255.77.77", 37677
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        try:
            receiver.bind(("", port))
            receiver.setsockopt(
                socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + socket.inet_aton(address)
            )
            receiver.settimeout(1.0)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            sender.sendto(b"x", (group, port))
            receiver.recv(16)
        except OSError as error:
            return str(error) or type(error).__name__
    return ""


def needs_multicast() -> None:
    if problem := multicast_problem(LOOPBACK.address):
        pytest.skip(f"NOT TESTED: multicast does not work on loopback here: {problem}")


def discovery(node: bytes, swarm: bytes | None, port: int | None, found: list[str], *more: Interface) -> Discovery:
    settings = DiscoverySettings(swarm, node, port)
    return Discovery(settings, found.append, lambda: [LOOPBACK, *more])


async def until(is_done: Callable[[], object], limit_s: float = FOUND_WITHIN_S) -> None:
    async with asyncio.timeout(limit_s):
        while not is_done():  # noqa: ASYNC110  # what is waited for is somebody else's list
            await asyncio.sleep(0.05)


def test_two_nodes_of_a_swarm_find_each_other_and_nobody_else() -> None:
    needs_multicast()

    async def main() -> None:
        by_a: list[str] = []
        by_b: list[str] = []
        by_c: list[str] = []
        parts = [
            discovery(A, SWARM, 7001, by_a),
            discovery(B, SWARM, 7002, by_b),
            discovery(C, OTHER_SWARM, 7003, by_c),
        ]
        for part in parts:
            await part.start()
        try:
            await until(lambda: by_a and by_b)
            await asyncio.sleep(0.5)
        finally:
            for part in parts:
                await part.stop()
        assert (set(by_a), set(by_b), set(by_c)) == ({"127.0.0.1:7002"}, {"127.0.0.1:7001"}, set())
        assert len(asyncio.all_tasks()) == 1

    run(main())


def test_somebody_who_is_about_to_join_sees_all_and_shows_nothing() -> None:
    needs_multicast()

    async def main() -> None:
        by_member: list[str] = []
        by_newcomer: list[str] = []
        member, newcomer = discovery(A, SWARM, 7001, by_member), discovery(B, None, None, by_newcomer)
        await member.start()
        await newcomer.start()
        try:
            await until(lambda: "127.0.0.1:7001" in by_newcomer)
        finally:
            await member.stop()
            await newcomer.stop()
        assert not by_member

    run(main())


def test_a_broken_interface_leaves_the_others_alone() -> None:
    needs_multicast()
    broken = Interface("broken0", "203.0.113.7")  # no interface of this machine has it

    async def main() -> None:
        by_a: list[str] = []
        by_b: list[str] = []
        settings = DiscoverySettings(SWARM, A, 7001, ("lo", "broken0"))
        one = Discovery(settings, by_a.append, lambda: [LOOPBACK, broken])
        other = discovery(B, SWARM, 7002, by_b)
        await one.start()
        await other.start()
        try:
            await until(lambda: by_a and by_b)
            assert one.active == [LOOPBACK]
            assert one.broken == [broken]
        finally:
            await one.stop()
            await other.stop()

    run(main())


def test_an_interface_that_goes_away_is_let_go() -> None:
    needs_multicast()

    async def main() -> None:
        present = [LOOPBACK]
        part = Discovery(DiscoverySettings(SWARM, A, 7001), lambda _: None, lambda: list(present))
        await part.start()
        assert part.active == [LOOPBACK]
        present.clear()
        await part.refresh()
        assert part.active == []
        present.append(LOOPBACK)
        await part.refresh()
        assert part.active == [LOOPBACK]
        await part.stop()

    run(main())


def test_this_machine_has_a_loopback_interface() -> None:
    assert any(each.is_loopback and each.is_up for each in read_interfaces())


def test_neighbours_are_found_by_ipv6_where_an_interface_has_it_and_shown_only_where_it_is_listened_on() -> None:
    ipv6 = [each for each in read_interfaces() if each.family == 6 and each.is_up and not each.is_loopback]
    if not ipv6:
        pytest.skip("NOT TESTED: no interface here has an IPv6 address that others could dial")

    async def main() -> None:
        by_both: list[str] = []
        by_old: list[str] = []
        both = Discovery(DiscoverySettings(SWARM, A, 7001, families=(4, 6)), by_both.append, lambda: ipv6[:1])
        old = Discovery(DiscoverySettings(SWARM, B, 7002), by_old.append, lambda: ipv6[:1])
        await both.start()
        await old.start()
        try:
            if both.broken:
                pytest.skip(f"NOT TESTED: mDNS over IPv6 does not work on {ipv6[0].name}")
            await until(lambda: by_old)
            await asyncio.sleep(0.5)
        finally:
            await both.stop()
            await old.stop()
        assert set(by_old) == {f"[{ipv6[0].address}]:7001"}
        assert not by_both  # the other one does not listen on IPv6

    run(main())
