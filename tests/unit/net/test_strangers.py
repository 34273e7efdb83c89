"""What strangers can do to a listening node, on TCP and TLS: nothing that costs much, and nothing that others notice."""

import asyncio
import os
import ssl
import struct
from collections.abc import Callable
from typing import Any

import pytest

from potluck.core.errors import DialFailed, PeerRefused, ProtocolViolation, WrongPeer
from potluck.identity.keys import NodeKey
from potluck.net.connection import Accepter, Connection
from potluck.net.host_limits import HostLimits
from potluck.net.link import Admits, LinkHandler, admit_anyone
from potluck.net.tcp import MAX_HALF_OPEN, TcpListener, TcpTransport
from potluck.net.tls import TlsTransport
from potluck.wire.frame_writer import FrameWriter
from potluck.wire.frames import HEADER, HEADER_BYTES, Kind
from potluck.wire.handshake import (
    AUTH_BYTES,
    HELLO_BYTES,
    VERDICT_BYTES,
    AccepterHandshake,
    DialerHandshake,
    PresentedTicket,
)
from tests.support.link_ends import ACCEPTER, DIALER, OTHER, PATIENCE_S, Recorder, run_test
from tests.support.wire_messages import one_of_every_message, step

TRANSPORTS: dict[str, type[TcpTransport]] = {"tcp": TcpTransport, "tls": TlsTransport}


@pytest.fixture(params=list(TRANSPORTS))
def kind(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


class Stranger:
    """A bare connection to a listener, with TLS where the listener has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, kind: str, address: str) -> "Stranger":
        host, port = address.rsplit(":", 1)
        options: dict[str, Any] = {}
        if kind == "tls":
            options = {"ssl": unverified(), "server_hostname": ""}
        return cls(*await asyncio.open_connection(host, int(port), **options))

    async def read(self, size: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readexactly(size)

    async def is_cut_off(self) -> bool:
        """Whether the connection ends without another byte."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.reader.read(1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    async def last_words(self) -> bytes:
        """Everything until the connection ends."""
        said = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while data := await self.reader.read(1 << 16):
                    said += data
        except (ConnectionError, ssl.SSLError):
            pass
        return said

    async def authenticate(self, key: NodeKey) -> None:
        handshake = DialerHandshake(key, None, os.urandom(32))
        self.writer.write(handshake.auth(await self.read(HELLO_BYTES)))
        handshake.check_verdict(await self.read(VERDICT_BYTES))

    def leave(self) -> None:
        self.writer.transport.abort()


def unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def listen(
    kind: str,
    handler: LinkHandler,
    admits: Admits = admit_anyone,
    handshake_timeout_s: float = 5.0,
    limits: HostLimits | None = None,
) -> TcpListener:
    return await TRANSPORTS[kind](ACCEPTER, admits, handshake_timeout_s, limits).listen("127.0.0.1:0", handler)


async def assert_serves(kind: str, listener: TcpListener) -> None:
    """An honest node still gets in."""
    link = await TRANSPORTS[kind](OTHER, admit_anyone).dial(listener.address, ACCEPTER.node_id, Recorder(), PATIENCE_S)
    link.close()


async def settle(listener: TcpListener) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while listener.half_open:  # noqa: ASYNC110 - nobody else wants an event for this
            await asyncio.sleep(0.01)


def test_wrong_signature(kind: str) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler)
        stranger = await Stranger.connect(kind, listener.address)
        auth = bytearray(DialerHandshake(DIALER, None, os.urandom(32)).auth(await stranger.read(HELLO_BYTES)))
        auth[-1] ^= 1
        stranger.writer.write(auth)
        assert await stranger.is_cut_off()
        await assert_serves(kind, listener)
        assert handler.received == handler.lost == []
        stranger.leave()
        listener.close()

    run_test(main())


def test_replayed_auth(kind: str) -> None:
    """What an eavesdropper on plain TCP has recorded is worth nothing later."""

    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler)
        honest = await Stranger.connect(kind, listener.address)
        recorded = DialerHandshake(DIALER, None, os.urandom(32)).auth(await honest.read(HELLO_BYTES))
        honest.writer.write(recorded)
        await honest.read(VERDICT_BYTES)
        replay = await Stranger.connect(kind, listener.address)
        await replay.read(HELLO_BYTES)
        replay.writer.write(recorded)
        assert await replay.is_cut_off()
        honest.leave()
        replay.leave()
        await asyncio.sleep(0.01)
        listener.close()

    run_test(main())


RUBBISH = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * AUTH_BYTES,
    "zeros": bytes(AUTH_BYTES),
    "a megabyte": b"\xff" * (1 << 20),
    "frames": b"PLK1" + HEADER.pack(Kind.MESSAGE, 0, 0, 1, 100, 100, 0, 0) * 20,
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_before_authentication(kind: str, name: str) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler)
        stranger = await Stranger.connect(kind, listener.address)
        await stranger.read(HELLO_BYTES)
        stranger.writer.write(RUBBISH[name])
        assert await stranger.is_cut_off()
        await assert_serves(kind, listener)
        assert handler.received == handler.lost == []
        stranger.leave()
        listener.close()

    run_test(main())


def test_rubbish_instead_of_tls() -> None:
    async def main() -> None:
        listener = await listen("tls", Recorder())
        stranger = await Stranger.connect("tcp", listener.address)
        stranger.writer.write(b"hello, is this the right door?" * 100)
        # OpenSSL says goodbye with an alert of a few bytes; nothing of ours is sent.
        async with asyncio.timeout(PATIENCE_S):
            try:
                answer = await stranger.reader.read()
            except ConnectionError:
                answer = b""
        assert len(answer) < 10
        await assert_serves("tls", listener)
        stranger.leave()
        listener.close()

    run_test(main())


def test_older_tls_is_refused() -> None:
    async def main() -> None:
        listener = await listen("tls", Recorder())
        host, port = listener.address.rsplit(":", 1)
        context = unverified()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=context, server_hostname="")
        await assert_serves("tls", listener)
        listener.close()

    run_test(main())


def test_frames_ahead_of_the_verdict_are_not_parsed(kind: str) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler)
        stranger = await Stranger.connect(kind, listener.address)
        writer = FrameWriter()
        writer.push(step())
        auth = DialerHandshake(DIALER, None, os.urandom(32)).auth(await stranger.read(HELLO_BYTES))
        stranger.writer.write(auth + b"".join(writer.take(1)))
        assert await stranger.is_cut_off()
        assert handler.received == handler.lost == []
        stranger.leave()
        listener.close()

    run_test(main())


def test_refused_peer_cannot_say_anything(kind: str) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler, lambda node, ticket: "no")
        stranger = await Stranger.connect(kind, listener.address)
        with pytest.raises(PeerRefused):
            await stranger.authenticate(DIALER)
        writer = FrameWriter()
        writer.push(step())
        stranger.writer.write(b"".join(writer.take(1)))
        assert await stranger.is_cut_off()
        assert handler.received == handler.lost == []
        stranger.leave()
        listener.close()

    run_test(main())


def watch_connections(listener: TcpListener) -> list[Connection]:
    """Every connection that the listener takes from now on."""
    taken: list[Connection] = []
    make = listener._make_connection

    def make_and_keep(on_settled: Callable[[Connection], None]) -> Connection:
        taken.append(make(on_settled))
        return taken[-1]

    listener._make_connection = make_and_keep
    return taken


@pytest.mark.parametrize("attempt", ["before HELLO", "instead of AUTH", "with AUTH", "after the refusal"])
def test_of_an_unadmitted_peer_no_message_of_any_type_is_parsed(kind: str, attempt: str) -> None:
    """Not one byte reaches the frame decoder, whenever the peer sends them, and whatever it sends."""

    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler, lambda node, ticket: "not a member", limits=HostLimits(failures=1000))
        taken = watch_connections(listener)
        messages = one_of_every_message()
        assert len(messages) >= 19
        for message in messages:
            writer = FrameWriter()
            writer.push(message)
            frames = b"".join(writer.take(1 << 20))
            stranger = await Stranger.connect(kind, listener.address)
            if attempt == "before HELLO":
                stranger.writer.write(frames.ljust(AUTH_BYTES, b"\0"))
            auth = DialerHandshake(DIALER, None, os.urandom(32)).auth(await stranger.read(HELLO_BYTES))
            if attempt == "instead of AUTH":
                stranger.writer.write(frames.ljust(AUTH_BYTES, b"\0"))
            elif attempt == "with AUTH":
                stranger.writer.write(auth + frames)
                await stranger.read(VERDICT_BYTES)
            elif attempt == "after the refusal":
                stranger.writer.write(auth)
                await stranger.read(VERDICT_BYTES)
                stranger.writer.write(frames)
            assert await stranger.is_cut_off()
            stranger.leave()
        await settle(listener)
        assert len(taken) == len(messages) == listener.refused
        assert [connection._channel.received_bytes for connection in taken] == [0] * len(messages)
        assert handler.received == handler.lost == []
        listener.close()

    run_test(main())


def test_a_host_that_keeps_failing_waits_at_the_door_and_is_forgiven(kind: str) -> None:
    async def main() -> None:
        limits = HostLimits(failures=3, forgiven_per_s=0.001)
        listener = await TRANSPORTS[kind](ACCEPTER, admit_anyone, 5.0, limits).listen("127.0.0.1:0", Recorder())
        for _ in range(5):
            stranger = await Stranger.connect("tcp", listener.address)
            stranger.writer.write(bytes(1000))
            assert len(await stranger.last_words()) < HELLO_BYTES + 10
            stranger.leave()
            await settle(listener)
        assert (listener.refused, listener.limited) == (3, 2)
        limits.forgiven_per_s = 1e6
        await asyncio.sleep(0.01)  # the loop's clock counts whole milliseconds, and none may have passed
        await assert_serves(kind, listener)
        listener.close()

    run_test(main())


def test_a_host_pushes_out_its_own_half_open_connections() -> None:
    async def main() -> None:
        limits = HostLimits(half_open=4)
        listener = await TcpTransport(ACCEPTER, admit_anyone, 5.0, limits).listen("127.0.0.1:0", Recorder())
        strangers = [await Stranger.connect("tcp", listener.address) for _ in range(6)]
        for stranger in strangers[:2]:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await stranger.read(HELLO_BYTES + 1)
        assert listener.half_open == 4
        assert limits.hosts == 0  # being pushed out is not held against anybody
        await assert_serves("tcp", listener)
        for stranger in strangers:
            stranger.leave()
        listener.close()
        await asyncio.sleep(0.01)

    run_test(main())


def test_slow_handshakes_end_by_themselves(kind: str) -> None:
    """A byte now and then does not keep a connection half open."""

    async def main() -> None:
        listener = await listen(kind, Recorder(), handshake_timeout_s=0.3)
        stranger = await Stranger.connect(kind, listener.address)
        start = asyncio.get_running_loop().time()
        await stranger.read(HELLO_BYTES)

        async def drip() -> None:
            for _ in range(60):
                stranger.writer.write(b"P")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        assert await stranger.is_cut_off()
        assert asyncio.get_running_loop().time() - start < 2.0
        dripping.cancel()
        stranger.leave()
        assert listener.half_open == 0
        assert listener.refused == 1
        listener.close()

    run_test(main())


def test_tls_that_never_starts_ends_by_itself() -> None:
    async def main() -> None:
        listener = await listen("tls", Recorder(), handshake_timeout_s=0.3)
        stranger = await Stranger.connect("tcp", listener.address)
        assert await stranger.is_cut_off()
        await settle(listener)
        stranger.leave()
        listener.close()

    run_test(main())


@pytest.mark.parametrize("silent_in", ["tcp", "tls"])
def test_too_many_half_open_connections(silent_in: str) -> None:
    """Those who connect and say nothing push each other out; an honest node gets in meanwhile. No file handle is left."""

    async def main() -> None:
        handles = len(os.listdir("/proc/self/fd"))
        listener = await listen("tls", Recorder())
        strangers = [await Stranger.connect(silent_in, listener.address) for _ in range(MAX_HALF_OPEN * 2)]
        await asyncio.sleep(0.05)
        assert listener.half_open <= MAX_HALF_OPEN
        await assert_serves("tls", listener)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(stranger.is_cut_off() for stranger in strangers[:MAX_HALF_OPEN]))
        for stranger in strangers:
            stranger.leave()
        await settle(listener)
        listener.close()
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= handles + 2  # the loop's own

    run_test(main())


def test_closing_the_listener_ends_half_open_connections(kind: str) -> None:
    async def main() -> None:
        listener = await listen(kind, Recorder())
        stranger = await Stranger.connect(kind, listener.address)
        await stranger.read(HELLO_BYTES)
        silent = await Stranger.connect("tcp", listener.address)
        if kind == "tcp":
            await silent.read(HELLO_BYTES)
        await asyncio.sleep(0.05)
        listener.close()
        assert await stranger.is_cut_off()
        assert await silent.is_cut_off()
        stranger.leave()
        silent.leave()

    run_test(main())


@pytest.mark.parametrize("failing", ["sock_accept", "connect_accepted_socket"])
def test_a_loop_that_fails_does_not_end_the_listening(
    kind: str, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """uvloop has said of a handle that another transport uses it, and that is no error of the system's."""

    async def main() -> None:
        limits = HostLimits()
        listener = await listen(kind, Recorder(), limits=limits)
        loop = asyncio.get_running_loop()
        works, failures = getattr(loop, failing), 0

        async def fail_twice(*args: Any, **options: Any) -> Any:
            nonlocal failures
            failures += 1
            if failures > 2:
                return await works(*args, **options)
            raise RuntimeError("File descriptor 7 is used by transport")

        setattr(loop, failing, fail_twice)
        strangers = [
            await Stranger.connect("tcp", listener.address) for _ in range(3)
        ]  # the first ends the call under way
        async with asyncio.timeout(PATIENCE_S):
            while failures < 2:  # noqa: ASYNC110 - nobody else wants an event for this
                await asyncio.sleep(0.01)
        await assert_serves(kind, listener)
        assert "is used by transport" in caplog.text
        assert limits.hosts == 0  # none of that is the host's fault
        for stranger in strangers:
            stranger.leave()
        await settle(listener)
        listener.close()
        await asyncio.sleep(0.01)
        assert listener._accepting.cancelled()

    run_test(main())


BAD_FRAMES = {
    "oversize": HEADER.pack(Kind.MESSAGE, 0, 0, 1, 1 << 20, 50, 0xFFFFFFFF, 0),
    "unknown kind": HEADER.pack(77, 0, 0, 0, 0, 0, 0, 0),
    "not a message": HEADER.pack(Kind.MESSAGE, 0, 0, 1, 4, 4, 0, 0) + b"\xc0\xc0\xc0\xc0",
    "credit for nothing": HEADER.pack(Kind.CREDIT, 0, 0, 5, 0, 0, 0, 1),
    "noise": struct.pack("<64Q", *range(2**63, 2**63 + 64)),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_member_that_breaks_the_protocol_loses_its_link_and_nobody_else(kind: str, name: str) -> None:
    async def main() -> None:
        handler = Recorder(lambda link, message, body: link.send(message, body))
        listener = await listen(kind, handler)
        honest = Recorder()
        link = await TRANSPORTS[kind](OTHER, admit_anyone).dial(listener.address, ACCEPTER.node_id, honest, PATIENCE_S)
        member = await Stranger.connect(kind, listener.address)
        await member.authenticate(DIALER)
        member.writer.write(BAD_FRAMES[name])
        assert await member.is_cut_off()
        assert len(handler.lost) == 1
        assert handler.lost[0].startswith("protocol violation: ")
        link.send(step(4), b"still here")
        await honest.until_count(1)
        member.leave()
        link.close()
        listener.close()

    run_test(main())


def test_a_node_with_too_many_links_loses_its_oldest_and_nobody_else_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        handler = Recorder(lambda link, message, body: link.send(message, body))
        listener = await listen(kind, handler)
        honest, greedy = Recorder(), [Recorder() for _ in range(6)]
        link = await TRANSPORTS[kind](OTHER, admit_anyone).dial(listener.address, ACCEPTER.node_id, honest, PATIENCE_S)
        transport = TRANSPORTS[kind](DIALER, admit_anyone)
        links = [await transport.dial(listener.address, None, each, PATIENCE_S) for each in greedy]
        for each in greedy[:2]:
            await each.until(lambda recorder: bool(recorder.lost))
        assert handler.lost == ["too many links of one node"] * 2
        for each, recorder in [(link, honest), *zip(links[2:], greedy[2:], strict=True)]:
            each.send(step(4), b"still here")
            await recorder.until_count(1)
        for each in [link, *links[2:]]:
            each.close()
        await handler.until(lambda recorder: len(recorder.lost) == 7)
        assert not listener._links
        listener.close()

    monkeypatch.setattr("potluck.net.tcp.MAX_LINKS_OF_ONE_NODE", 4)
    run_test(main())


def begun(session: int, size: int) -> bytes:
    """The first frame of a message that is never finished."""
    writer = FrameWriter()
    writer.push(step(session), bytes(size))
    return b"".join(writer.take_frame())


def test_messages_that_a_node_never_finishes_count_over_all_its_links(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await listen(kind, handler)
        links = [await Stranger.connect(kind, listener.address) for _ in range(4)]
        for link, key in zip(links, (DIALER, DIALER, DIALER, OTHER), strict=True):
            await link.authenticate(key)
        for link in (links[0], links[1], links[3]):
            link.writer.write(begun(1, 3 << 20))
            await link.read(HEADER_BYTES)  # the credit for the first frame
        links[2].writer.write(begun(1, 3 << 20))
        assert await links[2].is_cut_off()
        assert handler.lost == ["protocol violation: too many messages begun and not finished"]
        links[0].leave()  # and what it had begun is forgotten
        await handler.until(lambda recorder: len(recorder.lost) == 2)
        links[1].writer.write(begun(2, 3 << 20))
        assert len(await links[1].read(HEADER_BYTES)) == HEADER_BYTES
        for link in links:
            link.leave()
        await handler.until(lambda recorder: len(recorder.lost) == 4)
        assert not listener._half_received
        listener.close()

    monkeypatch.setattr("potluck.net.tcp.MAX_HALF_RECEIVED_OF_ONE_NODE_BYTES", 7 << 20)
    run_test(main())


# ---------------------------------------------------------------- strangers who are dialled


async def impostor(kind: str, certificate: NodeKey, speak: Callable[[bytes], bytes], first: bytes) -> asyncio.Server:
    """A server that shows `certificate` on TLS, says `first`, and answers AUTH as `speak` has it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        try:
            writer.write(speak(await reader.readexactly(AUTH_BYTES)))
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        writer.transport.abort()

    context = TlsTransport(certificate, admit_anyone)._accepter_context() if kind == "tls" else None
    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


def address_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    return f"{host}:{port}"


def test_accepter_that_claims_anothers_id(kind: str) -> None:
    """OTHER answers where ACCEPTER is expected, and says it were ACCEPTER."""

    async def main() -> None:
        handshake = AccepterHandshake(OTHER, os.urandom(32))

        def speak(auth: bytes) -> bytes:
            handshake._key = ACCEPTER  # for the statement only
            handshake.check_auth(auth)
            handshake._key = OTHER
            return handshake.verdict(None)

        claim = handshake.hello[:8] + ACCEPTER.node_id + handshake.hello[40:]
        server = await impostor(kind, OTHER, speak, claim)
        with pytest.raises(WrongPeer):
            await TRANSPORTS[kind](DIALER, admit_anyone).dial(
                address_of(server), ACCEPTER.node_id, Recorder(), PATIENCE_S
            )
        with pytest.raises(WrongPeer):
            await TRANSPORTS[kind](DIALER, admit_anyone).dial(address_of(server), None, Recorder(), PATIENCE_S)
        server.close()
        await asyncio.sleep(0.05)

    run_test(main())


@pytest.mark.parametrize(
    "first", [b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 100, bytes(HELLO_BYTES), b"PLK1" + b"\xff" * 500]
)
def test_something_else_answers(kind: str, first: bytes) -> None:
    async def main() -> None:
        server = await impostor(kind, ACCEPTER, lambda auth: b"", first)
        with pytest.raises(ProtocolViolation):
            await TRANSPORTS[kind](DIALER, admit_anyone).dial(address_of(server), None, Recorder(), PATIENCE_S)
        server.close()
        await asyncio.sleep(0.05)

    run_test(main())


def test_accepter_that_says_nothing(kind: str) -> None:
    async def main() -> None:
        server = await impostor(kind, ACCEPTER, lambda auth: b"", b"")
        start = asyncio.get_running_loop().time()
        with pytest.raises(DialFailed, match="did not answer"):
            await TRANSPORTS[kind](DIALER, admit_anyone).dial(address_of(server), None, Recorder(), 0.2)
        assert asyncio.get_running_loop().time() - start < 2.0
        server.close()
        await asyncio.sleep(0.05)

    run_test(main())


@pytest.mark.parametrize("address", ["no\0name:7777", "a..b:7777", f"{'x' * 64}.example:7777"])
def test_an_address_that_cannot_be_is_one_that_cannot_be_reached(kind: str, address: str) -> None:
    """With asyncio's own loop as well, which is all that some systems have."""

    async def main() -> None:
        with pytest.raises(DialFailed):
            await TRANSPORTS[kind](DIALER, admit_anyone).dial(address, None, Recorder(), PATIENCE_S)

    run_test(main())
    asyncio.run(main())


def test_no_tls_where_tls_is_expected() -> None:
    async def main() -> None:
        server = await impostor("tcp", ACCEPTER, lambda auth: b"", b"not a TLS record at all, sorry" * 10)
        with pytest.raises(DialFailed):
            await TlsTransport(DIALER, admit_anyone).dial(address_of(server), None, Recorder(), PATIENCE_S)
        server.close()
        await asyncio.sleep(0.05)

    run_test(main())


def test_the_accepters_part_never_admits_without_a_proof() -> None:
    asked: list[bytes] = []

    def admits(node: bytes, ticket: PresentedTicket | None) -> str | None:
        asked.append(node)
        return None

    with pytest.raises(ProtocolViolation):
        Accepter(ACCEPTER, admits).advance(bytes(AUTH_BYTES))
    assert asked == []
