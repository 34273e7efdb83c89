"""A worker that lives and finishes nothing: its pings are answered beside the computing, so they say nothing about that."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.shard import worker_process
from potluck.shard.worker_process import WorkerProcess
from potluck.wire.messages import Stage
from potluck.wire.work import BatchDone, FromWorker, Load, Loaded, Pong, RunBatch, ToWorker
from potluck.wire.work_frames import encode

MOST = 5
STAGE = Stage(0, 2, True, True)


class Bench:
    """A worker without a process. `pings`: so many intervals go by, and each ping is answered."""

    def __init__(self) -> None:
        self.killed = 0
        self.worker = WorkerProcess(lambda message, body: None, lambda reason: None)
        process: Any = SimpleNamespace(pid=7, poll=lambda: None, kill=self._count_kill, returncode=None)
        self.worker._process = process
        transport: Any = SimpleNamespace(writelines=lambda parts: None, is_closing=lambda: False)
        self.worker.connection_made(transport)

    def _count_kill(self) -> None:
        self.killed += 1

    def send(self, message: ToWorker) -> None:
        self.worker.send(message)

    def hear(self, message: FromWorker) -> None:
        self.worker.data_received(b"".join(encode(message)))

    def pings(self, count: int) -> None:
        for _ in range(count):
            if self.worker._ping_timer is not None:
                self.worker._ping_timer.cancel()
            self.worker._ping_if_busy()
            self.hear(Pong(1, 0))


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
