"""How a worker says what it died of, and what it does beside handling messages. Without a process."""

import errno
import os
from collections.abc import Sequence

import pytest

from potluck.wire.messages import Stage
from potluck.wire.work import Attend, BatchDone, FromWorker, RunBatch, ToWorker, Unload
from potluck.wire.worker_settings import OUT_OF_MEMORY_STATUS, WorkerSettings
from potluck.worker.process import exit_status, serve


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class ArrayMemoryError(MemoryError):
    pass


@pytest.mark.parametrize(
    "error", [MemoryError(), ArrayMemoryError(), OSError(errno.ENOMEM, "no memory"), OutOfMemoryError("CUDA")]
)
def test_running_out_of_memory_has_an_exit_status_of_its_own(error: Exception) -> None:
    assert exit_status(error) == OUT_OF_MEMORY_STATUS


@pytest.mark.parametrize("error", [RuntimeError(), OSError(errno.ENOSPC, "no room"), KeyError("x")])
def test_anything_else_is_a_bug(error: Exception) -> None:
    assert exit_status(error) == 70


class ScriptedChannel:
    """What a daemon sends, and what is done about it."""

    has_more = True

    def __init__(self, messages: Sequence[ToWorker]) -> None:
        self._messages = list(messages)
        self.done: list[object] = []

    def receive(self) -> tuple[ToWorker, bytes]:
        return self._messages.pop(0), b""

    def send(self, message: FromWorker, *parts: bytes) -> None:
        self.done.append(message)

    def give_way_where_few(self) -> None:
        self.done.append("gave way")

    def look_for(self, look_s: float) -> None:
        self.done.append(look_s)


class CrowdedWorker:
    """Has a core for a third of the time that its batches take."""

    is_finished = False
    times_of_batch = 1.0, 0.3

    def __init__(self, settings: WorkerSettings, notice: object) -> None: ...

    def handle(self, message: ToWorker, body: bytes) -> list[tuple[FromWorker, tuple[bytes, ...]]]:
        self.is_finished = isinstance(message, Unload)
        return [(BatchDone(message.batch, (), 5), ())] if isinstance(message, RunBatch) else []


def test_a_worker_attends_when_told_to_until_it_finds_out_that_somebody_else_computes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where: dict[int, set[int]] = {0: {0, 1}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: set(where[task]), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", where.__setitem__, raising=False)
    monkeypatch.setattr("potluck.worker.worker.Worker", CrowdedWorker)
    stage = Stage(0, 1, False, False)
    channel = ScriptedChannel([Attend(0.003), RunBatch(1, ()), Attend(0.0), Unload(stage)])
    settings = WorkerSettings(model_path="x", source="a" * 64, device="cuda")
    serve(channel, settings)  # type: ignore[arg-type]
    assert channel.done == ["gave way", 0.003, BatchDone(1, (), 5), "gave way", 0.0, "gave way", 0.0, "gave way"]
