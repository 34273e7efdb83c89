"""Which interfaces discovery uses."""

from potluck.swarm.interfaces import Interface, choose_interfaces

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
