"""A worker as its daemon sees it, without a process: what is written to it; when it is pinged; one that lives and finishes nothing."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.shard import worker_process
from potluck.shard.worker_process import PING_INTERVAL_S, WorkerProcess
from potluck.wire.messages import Stage
from potluck.wire.work import BatchDone, FromWorker, Load, Loaded, RunBatch, ToWorker
from potluck.wire.work_frames import encode, frame_start

MOST = 5
STAGE = Stage(0, 2, True, True)


class Bench:
    """A worker without a process, and all that is written to it, also as pings."""

    def __init__(self) -> None:
        self.killed = 0
        self.worker = WorkerProcess(lambda message, body: None, lambda reason: None)
        process: Any = SimpleNamespace(pid=7, poll=lambda: None, kill=self._count_kill, returncode=None)
        self.worker._process = process
        self.written = self.asked = b""
        self.ended: list[str] = []
        self.is_closing = False
        transport: Any = SimpleNamespace(
            write=self._write,
            writelines=lambda parts: self._write(b"".join(parts)),
            is_closing=lambda: self.is_closing,
            abort=lambda: self.ended.append("messages"),
        )
        self.worker.connection_made(transport)
        pulse: Any = SimpleNamespace(
            write=self._ask, is_closing=lambda: False, abort=lambda: self.ended.append("pulse")
        )
        self.worker._pulse.connection_made(pulse)

    def end(self) -> None:
        if self.worker._reap_timer is not None:
            self.worker._reap_timer.cancel()

    def _write(self, data: bytes) -> None:
        self.written += data

    def _ask(self, data: bytes) -> None:
        self.asked += data

    def _count_kill(self) -> None:
        self.killed += 1

    def send(self, message: ToWorker) -> None:
        self.worker.send(message)

    def hear(self, message: FromWorker) -> None:
        self.worker.data_received(b"".join(encode(message)))

    def silence(self, seconds: float) -> None:
        """So long it has said nothing when it is time to look."""
        if self.worker._ping_timer is not None:
            self.worker._ping_timer.cancel()
        self.worker.last_sign_of_life = self.worker._loop.time() - seconds
        self.worker._ping_if_busy()

    def pings(self, count: int) -> None:
        """So many intervals go by, and each ping is answered."""
        for _ in range(count):
            self.silence(PING_INTERVAL_S)
            self.worker._pulse.data_received(b"?")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(worker_process, "_MOST_FRUITLESS", MOST)
    with asyncio.Runner() as runner:

        async def made() -> Bench:
            return Bench()

        yield runner.run(made())


def test_one_that_finishes_nothing_is_ended_though_it_answers(bench: Bench) -> None:
    bench.send(RunBatch(1, ()))
    bench.pings(MOST)
    assert not bench.killed
    bench.pings(1)
    assert bench.killed == 1


def test_only_one_that_is_silent_at_work_is_pinged(bench: Bench) -> None:
    bench.silence(60.0)
    assert bench.asked == b"", "it owes nothing"
    bench.send(RunBatch(1, ()))
    bench.silence(0.002)
    assert bench.asked == b"", "it has just said something"
    bench.silence(0.04)
    timer = bench.worker._ping_timer
    assert timer is not None
    silent_s = timer.when() - bench.worker.last_sign_of_life
    assert silent_s < PING_INTERVAL_S + 0.03, "and is asked when it has been silent for so long, not later"
    bench.silence(PING_INTERVAL_S)
    assert bench.asked == b"?"
    assert bench.written == b"".join(encode(RunBatch(1, ()))), "on a stream of their own"


def test_an_answered_ping_is_a_sign_of_life_and_no_result(bench: Bench) -> None:
    bench.send(RunBatch(1, ()))
    bench.silence(PING_INTERVAL_S)
    before = bench.worker.last_sign_of_life
    assert not bench.worker.has_spoken
    bench.worker._pulse.data_received(b"?")
    assert bench.worker.last_sign_of_life > before
    assert bench.worker.has_spoken
    assert bench.worker.is_busy
    bench.hear(BatchDone(1, (), 0))
    assert not bench.worker.is_busy


def test_only_pings_without_an_answer_in_a_row_end_it(bench: Bench) -> None:
    bench.worker._most_unanswered = 2
    bench.send(Load(STAGE))
    bench.pings(5)
    assert not bench.killed, "it answered each of them"
    for _ in range(3):
        bench.silence(PING_INTERVAL_S)
    assert bench.killed == 1


def test_both_streams_end_with_it() -> None:
    async def main() -> None:
        bench = Bench()
        bench.worker.abandon("enough")
        assert sorted(bench.ended) == ["messages", "pulse"]
        bench.end()

    asyncio.run(main())


def test_every_result_gives_it_as_long_again(bench: Bench) -> None:
    for number in range(4):
        bench.send(RunBatch(number, ()))
        bench.pings(MOST)
        bench.hear(BatchDone(number, (), 0))
    assert not bench.killed


def test_loading_may_take_as_long_as_it_takes(bench: Bench) -> None:
    bench.send(Load(STAGE))
    bench.pings(5 * MOST)
    assert not bench.killed
    bench.hear(Loaded(STAGE, 1, 1, 1))
    bench.send(RunBatch(1, ()))
    bench.pings(MOST + 1)
    assert bench.killed == 1


@pytest.mark.parametrize("size", [0, 2304, 64 << 10, 1 << 20])
def test_a_batch_that_was_encoded_beforehand_is_a_batch_like_any(bench: Bench, size: int) -> None:
    body = bytes(range(256)) * (size // 256)
    bench.worker.send(RunBatch(1, ()), body)
    usual, bench.written = bench.written, b""
    assert bench.worker.send_batch(frame_start(RunBatch(1, ()), len(body)), body)
    assert bench.written == usual
    for number in (1, 2):
        assert bench.worker.is_busy, "two answers are owed"
        bench.hear(BatchDone(number, (), 0))
    assert not bench.worker.is_busy


def test_a_worker_that_is_gone_takes_no_batch(bench: Bench) -> None:
    bench.is_closing = True
    assert not bench.worker.send_batch(frame_start(RunBatch(1, ()), 0), b"")
    assert bench.written == b""
    assert not bench.worker.is_busy


def test_one_that_is_abandoned_is_lost_at_once_and_not_heard_any_more() -> None:
    async def main() -> None:
        bench = Bench()
        heard: list[FromWorker] = []
        lost: list[str] = []
        bench.worker._on_message = lambda message, body: (heard.append(message), bench.worker.abandon("a mistake"))[0]
        bench.worker._on_lost = lost.append
        bench.worker.data_received(b"".join(b"".join(encode(BatchDone(number, (), 0))) for number in (1, 2)))
        assert heard == [BatchDone(1, (), 0)], "what came with it was not heard"
        assert lost == ["a mistake"]
        assert bench.killed == 1
        bench.worker.connection_lost(None)
        assert len(lost) == 1
        bench.end()

    asyncio.run(main())
