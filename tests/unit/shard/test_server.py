"""What a served shard knows of its loading. No worker: its messages are what a test says."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import msgspec
import pytest

from potluck.core.errors import OutOfDeviceMemory, ShardUnavailable
from potluck.shard.effects import Work
from potluck.shard.server import ShardServer
from potluck.shard.worker_process import WorkerProcess
from potluck.shard.worker_supervisor import WorkerState
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.messages import Close, Credit, Fault, Rewire, Stage, Step
from potluck.wire.work import Attend, BatchDone, Loaded, LoadFailed, RunBatch, SessionOpened, ToWorker, WorkOutput
from potluck.wire.work_frames import encode
from potluck.wire.worker_settings import WorkerSettings
from tests.support.link_ends import run_test
from tests.support.shard_cores import AFTER, BEFORE, HEAD, MIDDLE, SHARD, opening, session_id, settings_of, wiring_of

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


def test_a_wrong_step_that_has_left_ends_the_session_and_nothing_follows_it() -> None:
    """Through the real supervisor, whose worker is a process in name only."""

    async def main() -> None:
        links = NoLinks()
        server = ShardServer(
            SHARD, settings_of(MIDDLE), WorkerSettings(model_path="x", source="a" * 64), links, Metrics()
        )
        server._on_worker_message(Loaded(MIDDLE, 1, 1, 1), b"")
        process = WorkerProcess(server.supervisor._deliver, server.supervisor._lost)
        process._transport = SimpleNamespace(  # type: ignore[assignment]
            write=lambda data: None, is_closing=lambda: False, abort=lambda: None
        )
        server.supervisor._worker = process
        session = session_id(1)
        server.deliver(HEAD, opening(MIDDLE), b"")
        server._on_worker_message(SessionOpened(session), b"")
        server.deliver(BEFORE, Step(session, 0, 0, 1, 3, "fp32", True, session_id(1000)), bytes(4))
        links.sent.clear()
        server._ahead._left = SendTo(
            AFTER, "after:1", Step(session_id(1001), 0, 0, 1, 6, "fp32", True, session), b"what"
        )
        done = b"".join(encode(BatchDone(1, (WorkOutput(session, 4, None, None, (), "", ""),), 5), b"body"))
        process.data_received(done + done)
        assert [(sent.node, type(sent.message)) for sent in links.sent] == [(HEAD, Fault)]
        assert server.core.session_count == 0
        assert server.supervisor.state is WorkerState.WAITING
        assert server.core.counters == {"wrong_foresight": 1, "worker_lost": 1}, "and the second answer was not heard"
        await server.stop()

    run_test(main())


class ForeseeingLinks(NoLinks):
    """Remembers what it was told to expect, and what left early."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[tuple[bytes, bytes]] = []

    def foresee(self, node: bytes, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        self.on_arrival = on_arrival

    def send_foreseen(self, node: bytes, step: ForeseenStep, spent: bytes, body: bytes) -> bool:
        self.early.append((node, step.frame(spent, body)))
        return True


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
        await asyncio.sleep(0)
        links.sent.clear()
        server._on_worker_message(BatchDone(2, (msgspec.structs.replace(output, size_bytes=4),), 5), b"rows")
        assert [node for node, _ in links.early] == [AFTER]
        assert links.sent == []
        await asyncio.sleep(0)
        links.on_arrival(b"next")
        assert early == [b"tokn", b"next"], "round after round"
        server.deliver(HEAD, Step(session, 0, 5, 1, 0, None, True), b"next")
        server._on_worker_message(BatchDone(3, (msgspec.structs.replace(output, size_bytes=4),), 5), b"rows")
        assert server.core.counters == {}
        server._look_ahead()
        await server.stop()
        links.on_arrival(b"late")
        assert len(early) == 2

    run_test(main())


def test_whether_one_answer_has_the_shard_to_itself_is_told_while_its_prompt_is_not_being_read() -> None:
    async def main() -> None:
        server = ShardServer(
            SHARD, settings_of(STAGE), WorkerSettings(model_path="x", source="a" * 64), ForeseeingLinks(), Metrics()
        )
        told: list[tuple[int, bool]] = []
        server.on_load_changed = lambda: told.append((server.session_count, server.decodes_alone))
        session = session_id(1)
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        server.deliver(HEAD, opening(STAGE), b"")
        server._on_worker_message(SessionOpened(session), b"")
        output = WorkOutput(session, 0, None, None, (), "", "")
        batches = iter(range(1, 100))

        async def compute(epoch: int, position: int, count: int) -> None:
            """With time to look around during it and after it."""
            server.deliver(HEAD, Step(session, epoch, position, count, 0, None, True), bytes(4 * count))
            await asyncio.sleep(0.001)
            done = msgspec.structs.replace(output, size_bytes=4 * count)
            server._on_worker_message(BatchDone(next(batches), (done,), 5), bytes(4 * count))
            await asyncio.sleep(0.001)

        await compute(0, 0, 4)
        await compute(0, 4, 4)
        assert told == [(1, False)]
        await compute(0, 8, 1)
        await compute(0, 9, 1)
        assert told == [(1, False), (1, True)]
        server.deliver(HEAD, Rewire(session, 1, 0, wiring_of(STAGE)), b"")
        await compute(1, 0, 4)
        assert told == [(1, False), (1, True), (1, False)], "it is read again, after a loss"
        await compute(1, 4, 1)
        server.deliver(HEAD, Close(session), b"")
        assert told == [(1, False), (1, True), (1, False), (1, True), (0, False)]
        await server.stop()

    run_test(main())


@pytest.mark.parametrize(("look_s", "stays_awake"), [(60.0, True), (1e-9, False), (0.0, False)])
def test_with_one_answer_on_its_way_what_comes_soon_is_not_slept_for(
    look_s: float, stays_awake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the daemon nor by its worker; from the second time on, as the first tells how soon it comes."""

    async def main() -> None:
        settings = msgspec.structs.replace(settings_of(STAGE), look_s=look_s)
        worker = WorkerSettings(model_path="x", source="a" * 64)
        server = ShardServer(SHARD, settings, worker, ForeseeingLinks(), Metrics())
        told: list[ToWorker] = []
        server.supervisor.send = lambda message, *parts: told.append(message)  # type: ignore[method-assign]
        server.on_load_changed = lambda: server.attend(server.session_count == 1 and server.decodes_alone)
        session = session_id(1)
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        server.deliver(HEAD, opening(STAGE), b"")
        server._on_worker_message(SessionOpened(session), b"")
        output = WorkOutput(session, 4, None, None, (), "", "")
        awake: list[bool] = []
        asked_s: list[float] = []
        stay_awake = server._spinner.stay_awake
        server._spinner.stay_awake = lambda seconds: (asked_s.append(seconds), stay_awake(seconds))[1]  # type: ignore[method-assign]
        for position in range(4):
            server.deliver(HEAD, Step(session, 0, position, 1, 0, None, True), bytes(4))
            await asyncio.sleep(0.001)
            awake.append("turning" in repr(server._spinner))
            server._on_worker_message(BatchDone(position + 1, (output,), 5), bytes(4))
            await asyncio.sleep(0.001)
            awake.append("turning" in repr(server._spinner))
        assert [message for message in told if isinstance(message, Attend)] == ([Attend(look_s)] if look_s else [])
        assert awake[4:] == [stays_awake] * 4
        assert set(asked_s) == ({look_s} if stays_awake else set())
        monkeypatch.setattr("potluck.shard.server.CROWD", SimpleNamespace(is_there=True))
        asked_s.clear()
        server.deliver(HEAD, Step(session, 0, 4, 1, 0, None, True), bytes(4))
        server._on_worker_message(BatchDone(5, (output,), 5), bytes(4))
        assert asked_s == [], "somebody else wants the core"
        monkeypatch.setattr("potluck.shard.server.CROWD", SimpleNamespace(is_there=False))
        server.on_load_changed = lambda: None
        server.attend(False)
        server.deliver(HEAD, Step(session, 0, 5, 1, 0, None, True), bytes(4))
        server._on_worker_message(BatchDone(6, (output,), 5), bytes(4))
        assert asked_s == [], "it does not attend any more"
        server.attend(bool(look_s))
        server.on_load_changed = lambda: server.attend(server.session_count == 1 and server.decodes_alone)
        assert not any(awake[:2])
        server.deliver(HEAD, Close(session), b"")
        last = [message for message in told if isinstance(message, Attend)][1:]
        assert last == ([Attend(0.0), Attend(look_s), Attend(0.0)] if look_s else [])
        await server.stop()

    run_test(main())


def test_a_shard_that_is_its_own_next_does_not_look_for_what_it_has_sent_itself() -> None:
    """Its next step is with the worker before the answer to the last one has been dealt with."""

    async def main() -> None:
        whole = Stage(0, 6, True, True)
        settings = msgspec.structs.replace(settings_of(whole), look_s=60.0)
        server = ShardServer(SHARD, settings, WorkerSettings(model_path="x", source="a" * 64), NoLinks(), Metrics())
        server.supervisor.send = lambda message, *parts: None  # type: ignore[method-assign]
        session = session_id(1)
        server._on_worker_message(Loaded(whole, 1, 1, 1), b"")
        server.deliver(HEAD, opening(whole, wiring=wiring_of(whole, ring=True, stages=1)), b"")
        server._on_worker_message(SessionOpened(session), b"")
        server.deliver(HEAD, Credit(session, 0, 9), b"")
        server.deliver(HEAD, Step(session, 0, 0, 1, 0, None, True), bytes(4))
        server.attend(True)
        server._on_worker_message(BatchDone(1, (WorkOutput(session, 0, 7, None, (), "", ""),), 5), b"")
        assert list(server.core._batches.running) == [2]
        assert "waiting" in repr(server._until_answer)
        assert "waiting" not in repr(server._until_step)
        await server.stop()

    run_test(main())


def test_nothing_is_looked_for_once_it_has_stopped() -> None:
    async def main() -> None:
        links = ForeseeingLinks()
        server = ShardServer(
            SHARD, settings_of(STAGE), WorkerSettings(model_path="x", source="a" * 64), links, Metrics()
        )
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        server.deliver(HEAD, opening(STAGE), b"")
        looked: list[int] = []
        server._ahead.look = lambda: looked.append(1)  # type: ignore[method-assign]
        await server.stop()
        await asyncio.sleep(0)
        assert looked == []

    run_test(main())
