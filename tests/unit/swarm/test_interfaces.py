"""Which interfaces discovery uses."""

import pytest

from potluck.swarm.interfaces import Interface, choose_interfaces, lasting_ipv6

LOOPBACK, LAN, WIFI = Interface("lo", "127.0.0.1"), Interface("eth0", "192.168.0.7"), Interface("wlan0", "192.168.1.7")
DOCKER, TUNNEL = Interface("docker0", "172.17.0.1"), Interface("wg0", "10.8.0.2")


def test_real_interfaces_only_where_there_are_any() -> None:
    assert choose_interfaces([LOOPBACK, DOCKER, WIFI, TUNNEL, LAN]) == [LAN, WIFI]


def test_virtual_ones_before_loopback_and_loopback_before_nothing() -> None:
    assert choose_interfaces([LOOPBACK, DOCKER]) == [DOCKER]
    assert choose_interfaces([LOOPBACK]) == [LOOPBACK]
    assert choose_interfaces([]) == []


def test_what_is_down_is_not_used() -> None:
    assert choose_interfaces([Interface("eth0", "192.168.0.7", is_up=False), LOOPBACK]) == [LOOPBACK]


def test_what_people_name_wins() -> None:
    assert choose_interfaces([LOOPBACK, DOCKER, LAN], ["docker0"]) == [DOCKER]
    assert choose_interfaces([LOOPBACK, DOCKER, LAN], ["127.0.0.1"]) == [LOOPBACK]
    assert choose_interfaces([LAN], ["eth7"]) == []


def test_ipv4_comes_before_ipv6() -> None:
    lan6 = Interface("eth0", "fd00::7")
    assert choose_interfaces([lan6, WIFI, LAN]) == [LAN, WIFI, lan6]
    assert (LAN.family, lan6.family) == (4, 6)


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["fe80::1%eth0"], None),  # means nothing to whoever is told it
        (["fe80::1%eth0", "2a01::9", "2a01::1"], "2a01::1"),
        (["2a01::1", "fd00::5"], "fd00::5"),
        (["::1"], "::1"),
        ([], None),
    ],
)
def test_the_ipv6_address_that_others_are_told_is_one_that_they_can_dial(addresses: list[str], chosen: str) -> None:
    assert lasting_ipv6(addresses) == chosen
