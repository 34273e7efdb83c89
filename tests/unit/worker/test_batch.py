"""Which engine is told that a step is likely to come. On an engine that only listens."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from potluck.core.errors import OutOfKvMemory
from potluck.engine.shard_engine import ShardEngine, Step, StepResult
from potluck.wire.messages import Stage
from potluck.wire.work import RunBatch, WorkItem
from potluck.wire.worker_settings import WorkerSettings
from potluck.worker.batch import BatchRunner
from potluck.worker.session import WorkerSession
from potluck.worker.worker import Worker


class ListeningEngine:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def forward(self, steps: list[Step], roundings: object) -> list[StepResult]:
        return [StepResult(np.zeros((step.count, 4), np.float32), None) for step in steps]

    def expect(self, session: int) -> None:
        self.heard.append(f"expect {session}")

    def claim_device(self) -> None:
        self.heard.append("claim")


@pytest.fixture
def engine() -> ListeningEngine:
    return ListeningEngine()


def session_on(engine: ListeningEngine, number: int) -> WorkerSession:
    return WorkerSession(cast(ShardEngine, cast(Any, engine)), number, Stage(0, 2, True, False), None, 100, (), None)


def item(session: bytes, count: int) -> WorkItem:
    return WorkItem(session, 0, count, None, "fp32", False, 4 * count)


def test_the_session_that_decodes_is_expected_and_claims_the_device_while_it_lives(engine: ListeningEngine) -> None:
    sessions = {b"a": session_on(engine, 7)}
    batches = BatchRunner(sessions, 1e6)
    batches.run(RunBatch(1, (item(b"a", 1),)), bytes(4))
    assert batches.look_ahead() == RunBatch(2, (WorkItem(b"a", 1, 1, None, "fp32", False, 4),))
    batches.claim_device()
    sessions.clear()
    assert batches.look_ahead() is None
    batches.claim_device()
    assert engine.heard == ["expect 7", "claim"]


@pytest.mark.parametrize("counts", [[5], [1, 1]], ids=["a piece of a prompt", "several sessions"])
def test_nobody_is_expected_after_anything_else(engine: ListeningEngine, counts: list[int]) -> None:
    names = [bytes([97 + i]) for i in range(len(counts))]
    batches = BatchRunner({name: session_on(engine, i) for i, name in enumerate(names)}, 1e6)
    items = tuple(item(name, count) for name, count in zip(names, counts, strict=True))
    batches.run(RunBatch(1, items), bytes(4 * sum(counts)))
    assert batches.look_ahead() is None
    batches.claim_device()
    assert engine.heard == []


def test_what_goes_wrong_while_looking_ahead_is_left_to_the_step_itself(
    engine: ListeningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(session: int) -> None:
        raise OutOfKvMemory("no memory for the next page")

    monkeypatch.setattr(engine, "expect", fails)
    batches = BatchRunner({b"a": session_on(engine, 7)}, 1e6)
    batches.run(RunBatch(1, (item(b"a", 1),)), bytes(4))
    batches.look_ahead()


def test_beside_an_item_that_was_refused_no_batch_is_expected(engine: ListeningEngine) -> None:
    batches = BatchRunner({b"a": session_on(engine, 7)}, 1e6)
    batches.run(RunBatch(1, (item(b"a", 1), item(b"gone", 1))), bytes(8))
    assert batches.look_ahead() is None


def test_after_a_prompt_that_chooses_the_session_is_expected_and_no_batch(engine: ListeningEngine) -> None:
    batches = BatchRunner({b"a": session_on(engine, 7)}, 1e6)
    batches._last = RunBatch(1, (item(b"a", 5),))
    batches._decoding = b"a"
    assert batches.look_ahead() is None
    assert engine.heard == ["expect 7"]


def test_it_is_known_for_how_much_of_a_batch_the_thread_had_a_core(
    engine: ListeningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, own_clock = iter([10.0, 10.5]), iter([3.0, 3.2])
    times = SimpleNamespace(perf_counter=lambda: next(clock), thread_time=lambda: next(own_clock))
    monkeypatch.setattr("potluck.worker.batch.time", times)
    batches = BatchRunner({b"a": session_on(engine, 7)}, 1e6)
    batches.run(RunBatch(1, (item(b"a", 1),)), bytes(4))
    assert (batches.compute_s, batches.on_core_s) == pytest.approx((0.5, 0.2))


def test_a_worker_tells_how_long_a_batch_took_and_then_how_much_of_that_was_its_own() -> None:
    worker = Worker(WorkerSettings(model_path="x", source="a" * 64))
    worker._batches.compute_s, worker._batches.on_core_s = 0.5, 0.2
    assert worker.times_of_batch == (0.5, 0.2)
