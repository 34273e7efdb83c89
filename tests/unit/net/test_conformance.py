"""What every kind of link promises, tested on every kind of link."""

import asyncio
import contextlib
import gc
import random
from collections.abc import Iterator

import pytest

from potluck.core.errors import BadRequest, DialFailed, LinkClosed, LinkFull, PeerRefused, WireMisuse, WrongPeer
from potluck.identity.keys import NodeKey
from potluck.net.link import Link
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.frames import MAX_BODY_BYTES, MAX_QUEUED_BYTES
from potluck.wire.handshake import PresentedTicket
from potluck.wire.messages import Message
from tests.support.link_ends import ACCEPTER, DIALER, NETS, OTHER, PATIENCE_S, Net, Recorder, connect, run_test
from tests.support.wire_messages import close, describe, opening, session_id, session_of, step

MIB = 1 << 20


@pytest.fixture(params=list(NETS))
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    yield NETS[request.param]()
    gc.collect()  # so that an exception nobody retrieved is this test's


def echo(link: Link, message: Message, body: bytes) -> None:
    link.send(message, body)


# ---------------------------------------------------------------- messages


def test_messages_go_both_ways(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        sent = [(step(1), b"x" * 2304), (describe(5), b""), (opening(2, 50), b""), (step(3), b"body"), (close(1), b"")]
        for message, body in sent:
            ends.link.send(message, body)
        await ends.dialer.until_count(len(sent))
        assert ends.dialer.received == ends.accepter.received == sent
        assert ends.link.peer == ACCEPTER.node_id
        assert ends.there.peer == DIALER.node_id
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_order_within_each_of_many_sessions(net: Net) -> None:
    async def main() -> None:
        chance = random.Random(4)
        ends = await connect(net)
        sent = []
        for number in range(400):
            size = (
                chance.choice((0, 100, 5000, 70_000, 70_000, MIB + 9))
                if number % 10 == 0
                else chance.choice((0, 100, 5000))
            )
            sent.append((step(chance.randrange(20), number), chance.randbytes(size)))
            ends.link.send(*sent[-1])
            if chance.random() < 0.05:
                await asyncio.sleep(0)
        await ends.accepter.until_count(400)
        for session in range(20):
            mine = session_id(session)
            received = [each for each in ends.accepter.received if session_of(each[0]) == mine]
            assert received == [each for each in sent if session_of(each[0]) == mine]
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_large_bodies_interleave_and_arrive_whole(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        bodies = {session: random.Random(session).randbytes(5 * MIB + session) for session in range(1, 5)}
        for session, body in bodies.items():
            ends.link.send(step(session), body)
        await ends.dialer.until_count(4)
        assert {session_of(message): body for message, body in ends.dialer.received} == {
            session_id(session): body for session, body in bodies.items()
        }
        assert ends.link.queued_bytes == 0
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_body_beyond_the_window(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        body = random.Random(1).randbytes(MIB) * 40
        ends.link.send(step(1), body)
        await ends.accepter.until_count(1)
        assert ends.accepter.received == [(step(1), body)]
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_urgent_overtakes_bulk(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        for position in range(3):
            ends.link.send(step(1, position), bytes(10 * MIB))
        ends.link.send(step(2), b"urgent")
        await ends.accepter.until_count(4)
        assert ends.accepter.messages == [step(2), *(step(1, position) for position in range(3))]
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_many_sessions_at_once(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        for session in range(1000):
            ends.link.send(step(session), b"z" * 500)
        await ends.dialer.until_count(1000)
        assert ends.dialer.messages == [step(session) for session in range(1000)]
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_two_links_between_two_nodes_and_one_to_oneself(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        second, own = Recorder(), Recorder()
        another = await net.transport(DIALER).dial(ends.listener.address, None, second, PATIENCE_S)
        to_oneself = await net.transport(ACCEPTER).dial(ends.listener.address, ACCEPTER.node_id, own, PATIENCE_S)
        for link, session in ((ends.link, 1), (another, 2), (to_oneself, 3)):
            link.send(step(session))
        for recorder, session in ((ends.dialer, 1), (second, 2), (own, 3)):
            await recorder.until_count(1)
            assert recorder.messages == [step(session)]
        for link in (ends.link, another, to_oneself):
            link.close()
        ends.listener.close()

    run_test(main())


# ---------------------------------------------------------------- flow control


def test_slow_reader_stops_its_writer_and_nobody_else(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        ends.link.send(describe())
        await ends.accepter.until_count(1)
        ends.there.hold(session_id(1))
        for position in range(30):
            ends.link.send(step(1, position), bytes(MIB // 2))
        for position in range(30):
            ends.link.send(step(2, position), bytes(MIB // 2))
        ends.link.send(step(3), b"urgent")
        await ends.accepter.until(lambda recorder: step(2, 29) in recorder.messages and step(3) in recorder.messages)
        held = [message for message in ends.accepter.messages if session_of(message) == session_id(1)]
        assert held == [step(1, position) for position in range(16)]
        assert 7 * MIB < ends.link.queued_bytes < 8 * MIB
        ends.there.release(session_id(1))
        await ends.accepter.until(lambda recorder: step(1, 29) in recorder.messages)
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_queue_is_bounded(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        ends.link.send(describe())
        await ends.accepter.until_count(1)
        ends.there.hold(session_id(1))
        body = bytes(MAX_QUEUED_BYTES // 4)
        for _ in range(4):
            with contextlib.suppress(LinkFull):  # how much has left already is not for us to say
                ends.link.send(step(1), body)
        with pytest.raises(LinkFull):
            ends.link.send(step(1), body)
        ends.link.send(close(1))  # for this there is always room
        ends.link.abort()
        ends.listener.close()

    run_test(main())


def test_impossible_body_is_misuse_and_harms_nobody(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        with pytest.raises(WireMisuse):
            ends.link.send(step(), memoryview(bytes(MAX_BODY_BYTES + 1)))
        ends.link.send(step(2))
        await ends.accepter.until_count(1)
        assert ends.accepter.messages == [step(2)]
        ends.link.close()
        ends.listener.close()

    run_test(main())


# ---------------------------------------------------------------- ends


def test_close_sends_what_is_queued_then_the_other_side_loses_the_link(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        ends.link.send(step(1), bytes(30 * MIB))
        ends.link.send(step(1, 1), b"last")
        ends.link.close()
        with pytest.raises(LinkClosed):
            ends.link.send(step(1, 2))
        await ends.accepter.until(lambda recorder: bool(recorder.lost))
        assert ends.accepter.messages == [step(1), step(1, 1)]
        assert len(ends.accepter.lost) == 1
        assert ends.dialer.lost == []  # it closed the link itself
        with pytest.raises(LinkClosed):
            ends.there.send(step(1))
        ends.link.close()
        ends.link.abort()
        ends.listener.close()

    run_test(main())


def test_abort_is_noticed_at_once(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        ends.link.send(step(1))
        await ends.dialer.until_count(1)
        start = asyncio.get_running_loop().time()
        ends.there.abort()
        await ends.dialer.until(lambda recorder: bool(recorder.lost))
        assert asyncio.get_running_loop().time() - start < 1.0
        assert len(ends.dialer.lost) == 1
        assert ends.accepter.lost == []
        with pytest.raises(LinkClosed):
            ends.link.send(step(1))
        ends.listener.close()

    run_test(main())


def test_no_callback_after_closing_inside_a_callback(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, lambda link, message, body: link.close())
        for position in range(5):
            ends.link.send(step(1, position))
        await ends.dialer.until(lambda recorder: bool(recorder.lost))
        assert ends.accepter.messages == [step(1, 0)]
        assert ends.accepter.lost == []
        ends.listener.close()

    run_test(main())


def test_both_close_at_once(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        ends.link.send(step(1))
        await ends.dialer.until_count(1)
        ends.there.close()
        ends.link.close()
        await asyncio.sleep(0.05)
        assert ends.dialer.lost == ends.accepter.lost == []
        ends.listener.close()

    run_test(main())


def test_close_while_the_other_side_sends_bulk(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        ends.link.send(step(9))
        await ends.accepter.until_count(1)
        for session in range(5):
            ends.there.send(step(session), bytes(5 * MIB))
        await ends.dialer.until_count(1)
        ends.link.send(step(9, 1), b"last words")
        ends.link.close()
        await ends.accepter.until(lambda recorder: bool(recorder.lost))
        assert ends.accepter.messages == [step(9), step(9, 1)]
        assert ends.accepter.lost == ["closed by the other side"]
        ends.listener.close()

    run_test(main())


def test_closed_listener_accepts_no_more_and_keeps_its_links(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net, echo)
        ends.listener.close()
        with pytest.raises(DialFailed):
            await net.transport(OTHER).dial(ends.listener.address, None, Recorder(), PATIENCE_S)
        ends.link.send(step(1))
        await ends.dialer.until_count(1)
        ends.link.close()

    run_test(main())


# ---------------------------------------------------------------- who is there


def test_wrong_id_is_found_before_anything_is_said(net: Net) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", handler)
        with pytest.raises(WrongPeer):
            await net.transport(DIALER).dial(listener.address, OTHER.node_id, Recorder(), PATIENCE_S)
        await asyncio.sleep(0.01)
        assert handler.received == []
        assert handler.lost == []
        listener.close()

    run_test(main())


def test_any_id_is_reported_where_none_is_expected(net: Net) -> None:
    async def main() -> None:
        listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", Recorder())
        link = await net.transport(DIALER).dial(listener.address, None, Recorder(), PATIENCE_S)
        assert link.peer == ACCEPTER.node_id
        link.close()
        listener.close()

    run_test(main())


def test_refused_peer_is_told_why(net: Net) -> None:
    async def main() -> None:
        asked: list[bytes] = []

        def admits(node: bytes, ticket: PresentedTicket | None) -> str | None:
            asked.append(node)
            return None if node == OTHER.node_id else "not a member"

        handler = Recorder()
        listener = await net.transport(ACCEPTER, admits).listen("127.0.0.1:0", handler)
        with pytest.raises(PeerRefused) as caught:
            await net.transport(DIALER).dial(listener.address, ACCEPTER.node_id, Recorder(), PATIENCE_S)
        assert caught.value.reason == "not a member"
        link = await net.transport(OTHER).dial(listener.address, ACCEPTER.node_id, Recorder(), PATIENCE_S)
        assert asked == [DIALER.node_id, OTHER.node_id]
        assert handler.lost == []
        link.close()
        listener.close()

    run_test(main())


def test_nobody_there(net: Net) -> None:
    async def main() -> None:
        listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", Recorder())
        listener.close()
        with pytest.raises(DialFailed):
            await net.transport(DIALER).dial(listener.address, None, Recorder(), PATIENCE_S)

    run_test(main())


def test_address_in_use(net: Net) -> None:
    async def main() -> None:
        listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", Recorder())
        with pytest.raises(BadRequest):
            await net.transport(OTHER).listen(listener.address, Recorder())
        listener.close()

    run_test(main())


def test_many_dial_at_once(net: Net) -> None:
    async def main() -> None:
        handler = Recorder(echo)
        listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", handler)
        dialers = [net.transport(NodeKey.from_seed(bytes([number]) * 32)) for number in (11, 12, 13, 14)]
        recorders = [Recorder() for _ in range(40)]
        dialling = [
            dialers[number % 4].dial(listener.address, ACCEPTER.node_id, recorder, PATIENCE_S)
            for number, recorder in enumerate(recorders)
        ]
        links = await asyncio.gather(*dialling)
        for number, link in enumerate(links):
            link.send(step(number))
        for number, recorder in enumerate(recorders):
            await recorder.until_count(1)
            assert recorder.messages == [step(number)]
        for link in links:
            link.close()
        listener.close()

    run_test(main())


def test_cancelled_dial_leaves_nothing(net: Net) -> None:
    async def main() -> None:
        handler = Recorder()
        listener = await net.transport(ACCEPTER).listen("127.0.0.1:0", handler)
        for turns in range(12):
            dialling = asyncio.ensure_future(net.transport(DIALER).dial(listener.address, None, Recorder(), PATIENCE_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            dialling.cancel()
            result = (await asyncio.gather(dialling, return_exceptions=True))[0]
            if not isinstance(result, BaseException):
                result.close()
        await asyncio.sleep(0.05)
        assert handler.received == []
        listener.close()

    run_test(main())


def test_links_print_their_state(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        assert "open" in repr(ends.link)
        assert "\n" not in repr(ends.link)
        ends.link.abort()
        assert "closed" in repr(ends.link)
        ends.listener.close()

    run_test(main())


# ---------------------------------------------------------------- steps that were foreseen


def test_a_foreseen_step_is_told_before_it_is_delivered(net: Net) -> None:
    async def main() -> None:
        told: list[tuple[str, bytes]] = []
        ends = await connect(net, lambda link, message, body: told.append(("delivered", body)))
        ends.link.send(describe(1))
        await ends.accepter.until_count(1)
        foreseen = ForeseenStep(step(1, 7), 1, 4)
        ends.there.foresee(foreseen, lambda body: told.append(("foreseen", body)))
        ends.link.send_foreseen(foreseen, step().spent, b"body")
        await ends.accepter.until_count(2)
        assert told[1:] == [("foreseen", b"body"), ("delivered", b"body")]
        assert ends.accepter.received[1] == (step(1, 7), b"body")
        ends.link.send_foreseen(foreseen, step().spent, b"more")
        await ends.accepter.until_count(3)
        assert told[3:] == [("delivered", b"more")], "it was expected once"
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_anything_else_that_comes_first_ends_the_expectation(net: Net) -> None:
    async def main() -> None:
        told: list[bytes] = []
        ends = await connect(net)
        ends.link.send(describe(1))
        await ends.accepter.until_count(1)
        ends.there.foresee(ForeseenStep(step(1, 7), 1, 4), told.append)
        ends.link.send(step(1, 6), b"body")
        await ends.accepter.until_count(2)
        ends.link.send(step(1, 7), b"body")
        await ends.accepter.until_count(3)
        assert told == []
        assert ends.accepter.messages[1:] == [step(1, 6), step(1, 7)]
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_the_last_expectation_holds(net: Net) -> None:
    async def main() -> None:
        told: list[tuple[str, bytes]] = []
        ends = await connect(net)
        ends.link.send(describe(1))
        await ends.accepter.until_count(1)
        for name in ("first", "second"):
            ends.there.foresee(ForeseenStep(step(1, 7), 1, 4), lambda body, name=name: told.append((name, body)))
        ends.link.send(step(1, 7), b"body")
        await ends.accepter.until_count(2)
        assert told == [("second", b"body")]
        ends.link.close()
        ends.listener.close()

    run_test(main())


def test_a_closed_link_takes_no_foreseen_step_and_expects_none(net: Net) -> None:
    async def main() -> None:
        told: list[bytes] = []
        ends = await connect(net)
        ends.link.send(describe(1))
        await ends.accepter.until_count(1)
        foreseen = ForeseenStep(step(1, 7), 1, 4)
        ends.there.foresee(foreseen, told.append)
        ends.there.close()
        with contextlib.suppress(LinkClosed):
            ends.link.send_foreseen(foreseen, step().spent, b"body")
        with pytest.raises(LinkClosed):
            ends.there.send_foreseen(foreseen, step().spent, b"body")
        await ends.dialer.until(lambda recorder: bool(recorder.lost))
        assert told == []
        assert len(ends.accepter.received) == 1
        ends.listener.close()

    run_test(main())


def test_foreseen_steps_are_refused_when_too_much_waits(net: Net) -> None:
    async def main() -> None:
        ends = await connect(net)
        foreseen = ForeseenStep(step(1, 7), 1, 60_000)

        def send_for_ever() -> None:
            for _ in range(MAX_QUEUED_BYTES // 1000):
                ends.link.send_foreseen(foreseen, step().spent, bytes(60_000))

        with pytest.raises(LinkFull):
            send_for_ever()
        ends.link.abort()
        ends.listener.close()

    run_test(main())
