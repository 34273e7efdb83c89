"""The in-memory network's faults, on a loop whose clock jumps from one timer to the next."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from potluck.core.errors import DialFailed, LinkClosed
from potluck.net.link import Link
from potluck.net.memory import PIPE_BYTES, MemoryNetwork, Route
from potluck.wire.messages import Message
from tests.support.link_ends import Recorder
from tests.support.wire_messages import session_id, session_of, step

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes only when there is nothing to do, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_jumping(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main)


def echo(link: Link, message: Message, body: bytes) -> None:
    link.send(message, body)


async def connected(network: MemoryNetwork) -> tuple[Link, Recorder, Recorder]:
    """A link from A to B, A's handler, and B's, which echoes."""
    there, here = Recorder(echo), Recorder()
    await network.transport(B).listen("b", there)
    return await network.transport(A).dial("b", B, here, 10.0), here, there


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_delays_are_those_of_the_route() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.set_route(A, B, Route(delay_s=0.25))
        link, here, _ = await connected(network)
        assert now_s() == pytest.approx(0.5)
        link.send(step(1))
        await here.until_count(1)
        assert now_s() == pytest.approx(1.0)

    run_jumping(main())


@pytest.mark.parametrize("seed", range(5))
def test_jitter_reorders_streams_but_never_one_stream(seed: int) -> None:
    async def main() -> None:
        network = MemoryNetwork(seed)
        network.set_route(A, B, Route(0.01, 0.1))
        link, here, there = await connected(network)
        sent = [step(number % 5, number) for number in range(100)]
        for message in sent:
            link.send(message, random.Random(message.position).randbytes(100_000 if message.position % 7 == 0 else 10))
        await here.until_count(100)
        assert there.messages != sent
        for recorder in (here, there):
            for session in range(5):
                mine = session_id(session)
                received = [message for message in recorder.messages if session_of(message) == mine]
                assert received == [message for message in sent if message.session == mine]

    run_jumping(main())


def test_the_same_seed_gives_the_same_order() -> None:
    def order(seed: int) -> list[Message]:
        orders: list[Message] = []

        async def main() -> None:
            network = MemoryNetwork(seed)
            network.set_route(A, B, Route(0.0, 0.1))
            link, here, there = await connected(network)
            for session in range(30):
                link.send(step(session))
            await here.until_count(30)
            orders.extend(there.messages)

        run_jumping(main())
        return orders

    assert order(1) == order(1) != order(2)


def test_partition_is_silent_and_heals_without_loss() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        link, here, there = await connected(network)
        network.part(A, B)
        for position in range(10):
            link.send(step(1, position))
        await asyncio.sleep(100)
        assert there.received == []
        assert here.lost == there.lost == []
        with pytest.raises(DialFailed):
            await network.transport(A).dial("b", B, Recorder(), 5.0)
        network.heal(A, B)
        await here.until_count(10)
        assert here.messages == [step(1, position) for position in range(10)]

    run_jumping(main())


def test_a_frozen_node_is_silent_to_all_and_stops_its_writers() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        link, here, there = await connected(network)
        other, other_here = Recorder(echo), Recorder()
        await network.transport(C).listen("c", other)
        another = await network.transport(A).dial("c", C, other_here, 5.0)
        network.freeze(B)
        for position in range(100):
            link.send(step(1, position), bytes(60_000))
        another.send(step(2))
        await other_here.until_count(1)
        assert there.received == []
        assert 6_000_000 - PIPE_BYTES - link.queued_bytes + 100_000 > 0
        assert link.queued_bytes > 3_000_000
        network.thaw(B)
        await here.until_count(100)

    run_jumping(main())


def test_cut_is_noticed_on_both_sides_and_dialling_again_works() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        link, here, there = await connected(network)
        link.send(step(1))
        await here.until_count(1)
        network.cut(A, B)
        await there.until(lambda recorder: bool(recorder.lost))
        assert here.lost == there.lost == ["connection reset"]
        with pytest.raises(LinkClosed):
            link.send(step(1))
        again = await network.transport(A).dial("b", B, here, 1.0)
        again.send(step(2))
        await here.until_count(2)

    run_jumping(main())


def test_killed_node_is_lost_to_others_and_hears_nothing() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.set_route(A, B, Route(delay_s=0.5))
        link, here, there = await connected(network)
        link.send(step(1))
        network.kill(B)
        start = now_s()
        await here.until(lambda recorder: bool(recorder.lost))
        assert now_s() - start == pytest.approx(0.5)
        await asyncio.sleep(10)
        assert there.received == there.lost == []
        with pytest.raises(DialFailed):
            await network.transport(A).dial("b", B, Recorder(), 1.0)
        with pytest.raises(DialFailed):
            await network.transport(B).dial("a", A, Recorder(), 1.0)
        network.revive(B)
        await network.transport(B).listen("b", there)
        await network.transport(A).dial("b", B, here, 2.0)
        assert repr(network) == "<MemoryNetwork 1 listeners, 2 ends of links, 0 nodes dead>"

    run_jumping(main())


def test_a_death_behind_a_partition_is_noticed_after_it() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        _, here, _ = await connected(network)
        network.part(A, B)
        network.kill(B)
        await asyncio.sleep(50)
        assert here.lost == []
        network.heal(A, B)
        await here.until(lambda recorder: bool(recorder.lost))

    run_jumping(main())


def test_a_handler_that_raises_loses_its_link_and_is_reported() -> None:
    async def main() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

        def fail(link: Link, message: Message, body: bytes) -> None:
            raise ZeroDivisionError

        network = MemoryNetwork()
        there, here = Recorder(fail), Recorder()
        await network.transport(B).listen("b", there)
        link = await network.transport(A).dial("b", B, here, 1.0)
        link.send(step(1))
        await here.until(lambda recorder: bool(recorder.lost))
        assert there.lost == ["the handler failed"]
        assert len(problems) == 1

    run_jumping(main())
