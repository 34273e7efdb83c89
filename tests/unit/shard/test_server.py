"""What a served shard knows of its loading. No worker: its messages are what a test says."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from potluck.core.errors import OutOfDeviceMemory, ShardUnavailable
from potluck.shard.effects import Work
from potluck.shard.server import ShardServer
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.messages import Stage, Step
from potluck.wire.work import BatchDone, Loaded, LoadFailed, RunBatch, SessionOpened, ToWorker, WorkOutput
from potluck.wire.worker_settings import WorkerSettings
from tests.support.link_ends import run_test
from tests.support.shard_cores import HEAD, SHARD, opening, session_id, settings_of

STAGE = Stage(0, 4, True, False)


class NoLinks:
    """Reaches nobody; remembers what it was to send."""

    def __init__(self) -> None:
        self.sent: list[SendTo] = []

    def send_all(self, effects: Sequence[SendTo]) -> None:
        self.sent += effects

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        return

    def send_foreseen(self, node: bytes, step: ForeseenStep, spent: bytes, body: bytes) -> bool:
        return False


def test_why_it_could_not_be_loaded_is_known_until_it_could() -> None:
    async def main() -> None:
        worker = WorkerSettings(model_path="nowhere", source="a" * 64)
        server = ShardServer(bytes(32), settings_of(STAGE), worker, NoLinks(), Metrics())
        assert server.load_failure is None
        server._on_worker_message(LoadFailed(STAGE, "out_of_device_memory", "others took it"), b"")
        assert isinstance(server.load_failure, OutOfDeviceMemory)
        assert not (await server.health()).online
        server._on_worker_message(LoadFailed(STAGE, "weights_missing", "the file is gone"), b"")
        assert isinstance(server.load_failure, ShardUnavailable)
        assert "the file is gone" in str(server.load_failure)
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        assert server.load_failure is None
        await server.evict()
        assert (await server.health()).online, "it sleeps, and loads at the next question"
        await server.stop()

    run_test(main())


def test_a_worker_that_was_told_what_was_not_decided_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        links = NoLinks()
        worker = WorkerSettings(model_path="nowhere", source="a" * 64)
        server = ShardServer(SHARD, settings_of(STAGE), worker, links, Metrics())
        ended: list[str] = []
        server.supervisor.abandon = ended.append  # type: ignore[method-assign]
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        server._ahead._left = Work(RunBatch(1, ()), b"")
        server.deliver(HEAD, opening(STAGE), b"")
        assert len(ended) == 1
        assert server.core.counters["wrong_foresight"] == 1
        assert "not what was decided" in caplog.text
        await server.stop()

    run_test(main())


class ForeseeingLinks(NoLinks):
    """Remembers what it was told to expect."""

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        self.on_arrival = on_arrival


def test_a_batch_that_has_left_early_is_noted_like_any_and_not_sent_again() -> None:
    async def main() -> None:
        links = ForeseeingLinks()
        server = ShardServer(
            SHARD, settings_of(STAGE), WorkerSettings(model_path="x", source="a" * 64), links, Metrics()
        )
        given: list[ToWorker] = []
        early: list[bytes] = []
        noted: list[ToWorker] = []
        server.supervisor.send = lambda message, *parts: given.append(message)  # type: ignore[method-assign]
        server.supervisor.send_batch = lambda start, body: early.append(body) or True  # type: ignore[method-assign, func-returns-value]
        server._note_work = noted.append  # type: ignore[method-assign]
        session = session_id(1)
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        server.deliver(HEAD, opening(STAGE), b"")
        server._on_worker_message(SessionOpened(session), b"")
        server.deliver(HEAD, Step(session, 0, 0, 4, 0, None, True), bytes(16))
        output = WorkOutput(session, 16, None, None, (), "", "")
        server._on_worker_message(BatchDone(1, (output,), 5), bytes(16))
        await asyncio.sleep(0)
        given.clear()
        noted.clear()
        links.on_arrival(b"tokn")
        assert early == [b"tokn"]
        server.deliver(HEAD, Step(session, 0, 4, 1, 0, None, True), b"tokn")
        assert given == []
        assert [type(message) for message in noted] == [RunBatch]
        assert server.core.counters == {}
        await server.stop()
        links.on_arrival(b"late")
        assert early == [b"tokn"]

    run_test(main())
