"""Failed handshakes per host, on a clock that the test holds."""

import pytest

from potluck.net.host_limits import MAX_HOSTS, HostLimits, host_group


def test_a_host_may_fail_so_often_and_is_forgiven_with_time() -> None:
    limits = HostLimits(failures=3, forgiven_per_s=0.5)
    for _ in range(3):
        assert limits.may_try("10.0.0.1", 100.0)
        limits.failed("10.0.0.1", 100.0)
    assert not limits.may_try("10.0.0.1", 100.0)
    assert limits.may_try("10.0.0.2", 100.0)
    assert limits.may_try("10.0.0.1", 102.1)
    limits.failed("10.0.0.1", 102.1)
    assert not limits.may_try("10.0.0.1", 102.2)
    assert limits.may_try("10.0.0.1", 200.0)
    assert limits.hosts == 0


def test_failing_on_does_not_make_the_wait_longer() -> None:
    limits = HostLimits(failures=3, forgiven_per_s=1.0)
    for _ in range(1000):
        limits.failed("10.0.0.1", 0.0)
    assert limits.may_try("10.0.0.1", 1.1)


def test_the_table_is_bounded() -> None:
    limits = HostLimits(failures=1)
    for number in range(MAX_HOSTS * 3):
        limits.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert limits.hosts == MAX_HOSTS


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_host_is_its_network(host: str, group: str) -> None:
    assert host_group(host) == group
    assert host_group(group) == group
