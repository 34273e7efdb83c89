"""Where a node is reached, while networks come, go and change: what it tells the swarm, and what commands find."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli.swarm_up import _Session
from potluck.core.errors import BadRequest
from potluck.node import own_addresses
from potluck.node.identity_file import own_run_file
from potluck.node.own_addresses import OwnAddresses
from potluck.node.own_statement import StewardSettings
from potluck.node.swarm_node import SwarmNode, SwarmNodeSettings
from potluck.swarm.interfaces import Interface
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.swarm_file import SwarmFile
from potluck.weights.store import ModelStore
from tests.support.link_ends import PATIENCE_S, run_test
from tests.support.swarm_records import KEYS

LOOPBACK, WIFI = Interface("lo", "127.0.0.1"), Interface("wlan0", "192.168.1.7")
MOVED, LAN = Interface("wlan0", "192.168.1.9"), Interface("eth0", "192.168.0.7")


class Machine:
    """Its interfaces are what a test says."""

    def __init__(self, *interfaces: Interface) -> None:
        self.has = interfaces
        self.problem: Exception | None = None

    def read(self) -> tuple[Interface, ...]:
        if self.problem is not None:
            raise self.problem
        return self.has


def followed(machine: Machine, named: tuple[str, ...] = ()) -> tuple[OwnAddresses, list[tuple[str, ...]]]:
    told: list[tuple[str, ...]] = []
    return OwnAddresses("0.0.0.0:7475", named, told.append, machine.read), told


def test_addresses_that_come_later_or_change_are_told_once() -> None:
    machine = Machine(LOOPBACK)
    addresses, told = followed(machine)
    assert addresses.current == ("127.0.0.1:7475",)
    for machine.has in ((LOOPBACK,), (LOOPBACK, WIFI), (LOOPBACK, WIFI), (LOOPBACK, MOVED), (LOOPBACK, LAN, MOVED)):
        addresses.look()
    assert told == [("192.168.1.7:7475",), ("192.168.1.9:7475",), ("192.168.0.7:7475", "192.168.1.9:7475")]
    assert addresses.current == told[-1]


def test_while_the_network_is_away_the_addresses_of_before_are_kept() -> None:
    machine = Machine(LOOPBACK, WIFI)
    addresses, told = followed(machine)
    for machine.has in ((LOOPBACK,), (), (LOOPBACK, WIFI)):
        addresses.look()
    named, told_of_named = followed(machine, ("wlan0",))
    machine.has = (LOOPBACK, LAN)
    named.look()
    machine.problem = OSError("it vanished")
    addresses.look()
    assert addresses.current == named.current == ("192.168.1.7:7475",)
    assert told == told_of_named == []


def test_without_any_interface_a_node_does_not_begin() -> None:
    with pytest.raises(BadRequest, match="no network interface"):
        followed(Machine())


def test_an_interface_that_there_is_not_is_named_with_those_there_are() -> None:
    with pytest.raises(BadRequest, match="no interface nosuch; there are lo, wlan0"):
        followed(Machine(LOOPBACK, WIFI), ("nosuch",))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - adverts and looks have no events
            await asyncio.sleep(0.001)


def test_a_look_that_fails_is_not_the_last_and_none_is_left_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_addresses, "LOOK_S", 0.0)

    async def main() -> None:
        machine = Machine(LOOPBACK, WIFI)
        addresses, told = followed(machine)
        looks = 0

        def read() -> tuple[Interface, ...]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise ValueError("what nobody thought of")
            return machine.has

        addresses._interfaces = read
        addresses.start()
        machine.has = (MOVED,)
        await until(lambda: told == [("192.168.1.9:7475",)])
        await addresses.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        fixed = OwnAddresses("127.0.0.1:7475", (), told.append, machine.read)
        fixed.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}  # one address for good: there is nothing to look at

    run_test(main())


def swarm_node(folder: Path, machine: Machine, say: Callable[[str], None]) -> SwarmNode:
    keeper = SwarmKeeper.found(KEYS[0], SwarmFile(folder / "node.swarm"))
    steward = StewardSettings(memory_total_bytes=1 << 30, memory_budget_bytes=1 << 29, bytes_per_s=8e9)
    settings = SwarmNodeSettings(listen="0.0.0.0:0", folder=folder, steward=steward, uses_discovery=False)
    return SwarmNode(KEYS[0], keeper, ModelStore(folder / "models"), settings, say=say, interfaces=machine.read)


def test_the_next_advert_has_the_addresses_that_a_node_got_since_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_addresses, "LOOK_S", 0.01)

    async def main() -> None:
        machine, said = Machine(LOOPBACK), list[str]()
        swarm = swarm_node(tmp_path, machine, said.append)

        def advertised() -> list[str]:
            service = swarm.service
            own = None if service is None else service.membership.gossip.advert(swarm.node.id)
            return [] if own is None else [address.rpartition(":")[0] for address in own.addresses]

        try:
            await swarm.start()
            await until(lambda: advertised() == ["127.0.0.1"])
            machine.has = (LOOPBACK, WIFI)
            await until(lambda: advertised() == ["192.168.1.7"])
        finally:
            await swarm.stop()
        assert [line for line in said if "192.168.1.7" in line] == [
            f"reachable at {', '.join(swarm.steward.statement.addresses)} now"
        ]

    run_test(main())


def test_commands_find_the_addresses_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    keeper = SwarmKeeper.found(KEYS[0], SwarmFile(tmp_path / "node.swarm"))
    steward = SimpleNamespace(statement=SimpleNamespace(addresses=("127.0.0.1:7475",)))
    swarm: Any = SimpleNamespace(steward=steward, node=SimpleNamespace(id=KEYS[0].node_id), on_addresses=[])

    def found() -> tuple[str, ...] | None:
        running = own_run_file().read()
        return None if running is None else running.addresses

    options: Any = SimpleNamespace(as_json=True)
    with own_run_file().held():
        _Session(options, KEYS[0], keeper, ModelStore(tmp_path / "models"), 0.0)._announce(swarm, None)
        assert found() == ("127.0.0.1:7475",)
        for listener in swarm.on_addresses:
            listener(("192.168.1.7:7475",))
        assert found() == ("192.168.1.7:7475",)
        monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "gone"))
        for listener in swarm.on_addresses:  # a file that cannot be written ends nothing
            listener(("192.168.1.9:7475",))
        assert "the addresses of before" in capsys.readouterr().err
