"""The test kit's hosts: they reach each other, and not when they are unplugged or parted."""

import subprocess
import sys

import pytest

from potluck.testing.namespaces import Hosts, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

_LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
while True:
    server.accept()[0].close()
"""
_DIAL = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=0.7)"


def reaches(hosts: Hosts, number: int, address: str) -> bool:
    command = hosts.command(number, [sys.executable, "-c", _DIAL, address])
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


def test_hosts_reach_each_other_until_they_are_unplugged_or_parted() -> None:
    with Hosts(3) as hosts:
        command = hosts.command(0, [sys.executable, "-c", _LISTEN, hosts.addresses[0]])
        listener = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == b"ready\n"
            assert reaches(hosts, 1, hosts.addresses[0])
            hosts.unplug(1)
            assert not reaches(hosts, 1, hosts.addresses[0])
            hosts.plug(1)
            assert reaches(hosts, 1, hosts.addresses[0])
            hosts.part([[0, 1], [2]])
            assert reaches(hosts, 1, hosts.addresses[0])
            assert not reaches(hosts, 2, hosts.addresses[0])
            hosts.part([[0, 1, 2]])
            assert reaches(hosts, 2, hosts.addresses[0])
        finally:
            listener.kill()
            listener.wait()
            assert listener.stdout is not None
            listener.stdout.close()
