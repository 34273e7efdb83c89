"""Connections as they are dialled, on TCP and TLS."""

import socket

import pytest

from potluck.core.errors import DialFailed
from potluck.net.connection import Connection
from potluck.net.link import admit_anyone
from potluck.net.sockets import KEEPALIVE_IDLE_S, UNACKNOWLEDGED_TIMEOUT_S
from potluck.net.tcp import TcpTransport
from potluck.net.tls import TlsTransport
from tests.support.link_ends import ACCEPTER, DIALER, PATIENCE_S, Recorder, run_test


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
@pytest.mark.parametrize("kind", [TcpTransport, TlsTransport])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_peer_that_vanishes_without_a_word_is_noticed_on_links_that_were_dialled(
    kind: type[TcpTransport], host: str
) -> None:
    async def look() -> None:
        listener = await kind(ACCEPTER, admit_anyone).listen("127.0.0.1:0", Recorder())
        port = listener.address.rpartition(":")[2]
        link: Connection = await kind(DIALER, admit_anyone).dial(
            f"{host}:{port}", ACCEPTER.node_id, Recorder(), PATIENCE_S
        )
        assert link._transport is not None
        tcp = link._transport.get_extra_info("socket")
        names = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
        shown = [tcp.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        assert shown == [1, KEEPALIVE_IDLE_S, UNACKNOWLEDGED_TIMEOUT_S * 1000]
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        link.abort()
        listener.close()

    run_test(look())


def test_a_failure_is_told_in_the_systems_words() -> None:
    async def dial() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        await TlsTransport(DIALER, admit_anyone).dial(address, None, Recorder(), PATIENCE_S)

    with pytest.raises(DialFailed, match=r"^cannot reach 127.0.0.1:\d+: Connection refused$"):
        run_test(dial())


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.local"])
def test_a_name_that_cannot_be_one_is_a_failed_dial(host: str) -> None:
    with pytest.raises(DialFailed):
        run_test(TcpTransport(DIALER, admit_anyone).dial(f"{host}:7777", None, Recorder(), PATIENCE_S))
