"""Links over plain TCP: authenticated like any, but neither secret nor safe from tampering.

For loopback, tests and measurements; tls.py adds what a network needs.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

from potluck.core.errors import DialFailed
from potluck.identity.keys import NodeKey, short_id
from potluck.net.addresses import parse_address
from potluck.net.connection import Accepter, Connection, Dialer
from potluck.net.framed_link import CLOSE_TIMEOUT_S
from potluck.net.host_limits import HostLimits, host_group
from potluck.net.link import Admits, LinkHandler
from potluck.net.sockets import bind, bound_address, tune_socket
from potluck.wire.frame_decoder import HalfReceived
from potluck.wire.frames import MAX_HALF_RECEIVED_BYTES
from potluck.wire.handshake import Ticket

_LOG = logging.getLogger(__name__)
HANDSHAKE_TIMEOUT_S = 5.0
MAX_HALF_OPEN = 64
MAX_LINKS_OF_ONE_NODE = 16  # that it dialled: some for steps, some for bulk, some that are dead without our knowing
# Of what has begun to arrive on them: as much as an honest node may have on one link, and as much again on one that is dead.
MAX_HALF_RECEIVED_OF_ONE_NODE_BYTES = 2 * MAX_HALF_RECEIVED_BYTES
_ACCEPT_PAUSE_S = 0.1


class TcpTransport:
    """Makes links for one node. Subclasses add TLS."""

    def __init__(
        self,
        key: NodeKey,
        admits: Admits,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        limits: HostLimits | None = None,
    ) -> None:
        """`admits`: asked about each dialer once its id is proven, and before anything else of it is parsed."""
        self._limits = limits or HostLimits()
        self._key = key
        self._admits = admits
        self._handshake_timeout_s = handshake_timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {short_id(self._key.node_id)}>"

    async def dial(
        self, address: str, node: bytes | None, handler: LinkHandler, timeout_s: float, ticket: Ticket | None = None
    ) -> Connection:
        """See Transport.dial."""
        connection = Connection(Dialer(self._key, node, ticket), handler, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect(address, connection, timeout_s)
                await connection.opened
        except TimeoutError as error:
            connection.abort()
            raise DialFailed(f"{address} did not answer within {timeout_s:g} s") from error
        except OSError as error:
            connection.abort()
            raise DialFailed(f"cannot reach {address}: {error.strerror or error}") from error
        except ValueError as error:  # labels that no name may have, or a zero byte
            connection.abort()
            raise DialFailed(f"{address} cannot be the name of a machine") from error
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self, address: str, connection: Connection, timeout_s: float) -> None:
        host, port = parse_address(address)
        context = self._dialer_context()
        name = "" if context else None  # no name is sent: the node's id is what counts
        options = _tls_options(context, timeout_s)
        loop = asyncio.get_running_loop()
        # Not with a socket of our own: a loop that shares one with Python watches a number that may be somebody else's by then.
        transport, _ = await loop.create_connection(lambda: connection, host, port, server_hostname=name, **options)
        tcp = transport.get_extra_info("socket")
        if tcp is not None and tcp.fileno() >= 0:  # it may be gone again
            tune_socket(tcp)

    async def listen(self, address: str, handler: LinkHandler) -> "TcpListener":
        """See Transport.listen."""
        context, timeout_s = self._accepter_context(), self._handshake_timeout_s
        options = _tls_options(context, timeout_s)

        def connection(on_settled: Callable[[Connection], None]) -> Connection:
            return Connection(Accepter(self._key, self._admits), handler, timeout_s, on_settled)

        return TcpListener(await bind(address), connection, options, self._limits)

    def _dialer_context(self) -> ssl.SSLContext | None:
        return None

    def _accepter_context(self) -> ssl.SSLContext | None:
        return None


class TcpListener:
    """Accepts connections until closed. Those that have not authenticated are few, and the oldest makes room for the next.

    Few in all and few for each host. A host whose handshakes keep failing is cut off before the next one, and forgiven with time.
    A node has so many links at most, of which the oldest makes room: no member can take all the handles there are, and by messages
    that it begins on all of them and never finishes, not all the memory.
    """

    def __init__(
        self, listening: socket.socket, make_connection: "_MakeConnection", options: dict[str, Any], limits: HostLimits
    ) -> None:
        """`options`: what asyncio needs to know for TLS."""
        self.address = bound_address(listening)
        self.refused = 0  # connections that ended before they were links
        self.limited = 0  # connections that were not even tried, because their host fails too often
        self._limits = limits
        self._listening = listening
        self._make_connection = make_connection
        self._options = options
        self._half_open: dict[Connection, _HalfOpen] = {}  # oldest first
        self._links: dict[bytes, list[Connection]] = {}  # by node, oldest first
        self._half_received: dict[bytes, HalfReceived] = {}  # by node
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}, {len(self._half_open)} half open>"

    @property
    def half_open(self) -> int:
        """Connections that have not authenticated yet."""
        return len(self._half_open)

    def close(self) -> None:
        self._accepting.cancel()
        self._listening.close()
        for connection in list(self._half_open):
            self._drop(connection)

    async def _accept(self) -> None:
        """Until it is cancelled, whatever fails: a node that nobody can reach is lost to its swarm, and would not know."""
        told = ""
        while True:
            try:
                await self._accept_one()
            except OSError:  # out of file handles; those that wait keep waiting
                await asyncio.sleep(_ACCEPT_PAUSE_S)
            except Exception as error:  # a loop that takes the handle for another's, say
                if str(error) != told:  # it may be the same ten times a second
                    told = str(error)
                    _LOG.exception("a connection could not be accepted; %s goes on listening", self.address)
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    async def _accept_one(self) -> None:
        tcp, remote = await asyncio.get_running_loop().sock_accept(self._listening)
        self._take(tcp, host_group(remote[0]))

    def _take(self, tcp: socket.socket, host: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._limits.may_try(host, loop.time()):
            self.limited += 1
            tcp.close()
            return
        self._make_room(host)
        connection = self._make_connection(self._settled)
        task = loop.create_task(self._set_up(connection, tcp))
        self._half_open[connection] = _HalfOpen(task, tcp, host)

    def _make_room(self, host: str) -> None:
        """A host that has its share half open loses its own oldest; only a full house costs others theirs."""
        same_host = [connection for connection, each in self._half_open.items() if each.host == host]
        if len(same_host) >= self._limits.half_open:
            self._drop(same_host[0])
        elif len(self._half_open) >= MAX_HALF_OPEN:
            self._drop(next(iter(self._half_open)))

    async def _set_up(self, connection: Connection, tcp: socket.socket) -> None:
        try:
            tune_socket(tcp)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, tcp, **self._options)
        except OSError:  # no TLS, not in time, or gone already: whoever it was gets no answer
            connection.abort()
            tcp.close()
        except Exception:
            _LOG.exception("a connection that was accepted could not be set up")
            self._half_open.pop(connection, None)  # before it ends, which would be held against its host
            connection.abort()
            tcp.close()

    def _settled(self, connection: Connection) -> None:
        half_open = self._half_open.pop(connection, None)
        if connection.peer:
            self._keep(connection)
            return
        self.refused += 1
        if half_open is not None:
            self._limits.failed(half_open.host, asyncio.get_running_loop().time())

    def _keep(self, connection: Connection) -> None:
        links = self._links.setdefault(connection.peer, [])
        links.append(connection)
        new = HalfReceived(MAX_HALF_RECEIVED_OF_ONE_NODE_BYTES)
        connection.share_memory(self._half_received.setdefault(connection.peer, new))
        connection.on_ended = self._forget
        if len(links) > MAX_LINKS_OF_ONE_NODE:
            links[0].cut("too many links of one node")

    def _forget(self, connection: Connection) -> None:
        links = self._links[connection.peer]
        links.remove(connection)
        if not links:
            del self._links[connection.peer], self._half_received[connection.peer]

    def _drop(self, connection: Connection) -> None:
        # Not held against its host: it was pushed out, perhaps by the one stranger among many who share an address.
        half_open = self._half_open.pop(connection)
        connection.abort()
        if not half_open.task.done():  # perhaps it never ran
            half_open.task.cancel()
            half_open.tcp.close()


class _HalfOpen(NamedTuple):
    task: asyncio.Task[None]
    tcp: socket.socket
    host: str


_MakeConnection = Callable[[Callable[[Connection], None]], Connection]


def _tls_options(context: ssl.SSLContext | None, timeout_s: float) -> dict[str, Any]:
    if context is None:
        return {}
    return {"ssl": context, "ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": CLOSE_TIMEOUT_S}
