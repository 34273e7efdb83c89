"""What a steward makes of layers that cannot be loaded: it tries ever more rarely, and others get them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.swarm.upkeep import ShardPhase
from potluck.wire.messages import Stage
from tests.support.link_ends import run_test
from tests.support.stewards import FakeServer, Roster, duty_of, make, record
from tests.support.swarm_records import WEIGHTS


@pytest.mark.parametrize("has_old_range", [False, True])
def test_a_range_that_cannot_be_loaded_is_tried_ever_more_rarely_and_then_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_old_range: bool
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        clock = [1000.0]
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: clock[0]))
        old: Any = FakeServer(Stage(0, 4, True, False), sessions=0)
        new: Any = FakeServer(Stage(4, 8, False, True), sessions=0)
        if has_old_range:
            duty.shards[old] = ShardPhase.SERVING
        pauses_s = []
        for _ in range(5):
            duty.shards[new], duty.is_loading = ShardPhase.LOADING, True
            for _ in range(100):  # longer than what is well is watched
                steward._look_after_workers(duty)
                clock[0] += 1.0
            del duty.shards[new]
            duty.is_loading = False
            steward._failed(duty, "there is no memory")
            pauses_s.append(duty.retry_at_s - clock[0])
            assert duty.is_unwell(clock[0]) == (len(pauses_s) > 1)
            while clock[0] < duty.retry_at_s:
                steward._look_after_workers(duty)
                clock[0] += 1.0
        assert pauses_s == [2.0, 10.0, 30.0, 60.0, 60.0]

    run_test(main())


def test_failures_are_forgotten_when_something_has_been_served_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        steward, _ = make(tmp_path, Roster(record()), [])
        duty = steward.duties[WEIGHTS] = duty_of(monkeypatch, record())
        clock = [1000.0]
        monkeypatch.setattr(steward, "_loop", SimpleNamespace(time=lambda: clock[0]))
        steward._failed(duty, "there is no memory")
        clock[0] = 2000.0
        server: Any = FakeServer(Stage(0, 8, True, True), sessions=0)
        duty.serves(server, clock[0])
        for clock[0], failures in ((2001.0, 1), (2059.0, 1), (2060.0, 0)):
            steward._look_after_workers(duty)
            assert duty.failures == failures

    run_test(main())
