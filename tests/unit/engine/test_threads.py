"""Teams of threads always finish every chunk of every phase; the governor finds the fastest number of threads."""

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from potluck.engine.kernels.memory import BATCH_ATTENTION_TASKS, BATCH_ROWS, BATCH_TILE_COUNT, BATCH_WORDS
from potluck.engine.kernels.schedule import BY_GROUPS, BY_ROWS, BY_TASKS, BY_TILES
from potluck.engine.threads import Governor, IdleCores, ThreadTeam
from tests.support.tiny_kernels import Mixing, MixingProgram

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))
RUNS = 100_000 if IS_LONG else 5_000


# ---------------------------------------------------------------- teams


@contextmanager
def team_of(count: int) -> Iterator[ThreadTeam]:
    team = ThreadTeam(count)
    try:
        yield team
    finally:
        team.close()


def random_program(chosen: random.Random) -> MixingProgram:
    """Phases of one to three operations, each reading an array that nobody writes in that phase."""
    arrays, operations = 6, []
    for _ in range(chosen.randint(1, 6)):
        targets = chosen.sample(range(arrays), chosen.randint(1, 3))
        sources = [array for array in range(arrays) if array not in targets]
        for index, target in enumerate(targets):
            operations.append(Mixing(chosen.choice(sources), target, index > 0))
    policies = [chosen.choice([BY_GROUPS, BY_ROWS, BY_TILES, BY_TASKS]) for _ in operations]
    return MixingProgram(operations, policies, arrays, count=chosen.choice([1, 2, 7, 64, 300, 8000]))


def run_many(team: ThreadTeam, runs: int, seed: int) -> None:
    """Programs alternate on one batch whose sizes change all the time, as decoder and output head do."""
    chosen, rng = random.Random(seed), np.random.default_rng(seed)
    programs = [random_program(chosen) for _ in range(8)]
    batch = np.zeros(BATCH_WORDS, np.int64)
    for number in range(runs):
        mixing = chosen.choice(programs)
        mixing.fill(rng)
        for word in (BATCH_ROWS, BATCH_TILE_COUNT, BATCH_ATTENTION_TASKS):
            batch[word] = chosen.randint(1, 40)
        program, threads = mixing.program, chosen.randint(1, team.count)
        team.run(program.table.ctypes.data, len(program), batch.ctypes.data, program.sync.ctypes.data, threads)
        assert np.array_equal(mixing.arrays, mixing.wanted), f"run {number} with {threads} threads"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_run_of_random_programs_is_complete(count: int) -> None:
    with team_of(count) as team:
        run_many(team, RUNS, seed=count)


@contextmanager
def disturbance() -> Iterator[None]:
    """A thread that holds the interpreter for long spells, so that helpers wake late or not at all before a run is over."""
    stopping = threading.Event()

    def spin() -> None:
        while not stopping.is_set():
            sum(range(2000))

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


def test_helpers_that_come_late_do_no_harm() -> None:
    with team_of(4) as team, disturbance():
        run_many(team, RUNS // 10, seed=9)


def test_the_interpreter_runs_on_while_kernels_compute() -> None:
    mixing = MixingProgram([Mixing(0, 1, False)] * 200, [BY_GROUPS] * 200, arrays=2, count=200_000)
    program, batch = mixing.program, np.ones(BATCH_WORDS, np.int64)
    started, finished = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        with team_of(2) as team:
            team.run(program.table.ctypes.data, len(program), batch.ctypes.data, program.sync.ctypes.data, 2)
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    turns = 0
    while not finished.is_set():
        turns += 1
    thread.join()
    assert turns > 1000


def test_two_teams_in_one_process_do_not_meet() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with team_of(2) as team:
                run_many(team, RUNS // 10, seed)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (21, 22)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_closing_ends_every_helper() -> None:
    before = threading.active_count()
    for count in (1, 2, 4):
        with team_of(count):
            assert threading.active_count() == before + count - 1
        assert threading.active_count() == before


# ---------------------------------------------------------------- the governor


class Machine:
    """Some cores and a clock that runs only while work is done. `others`: cores that another program keeps busy."""

    def __init__(self, cores: int = 2, *, is_blind: bool = False) -> None:
        self.cores, self.others, self.is_blind = cores, 0.0, is_blind
        self.now_s = 0.0
        self.work_s = 0.010  # what a run takes on one core
        self._used = 1.0  # cores that the last run kept busy

    def clock(self) -> float:
        return self.now_s

    def idle_cores(self) -> float | None:
        return None if self.is_blind else max(0.0, self.cores - self.others - self._used)

    def run(self, threads: int) -> tuple[float, float]:
        """How long a run takes, and how much processor time its threads get: phase by phase, the slowest one counts."""
        crowding = max(0.0, threads + self.others - self.cores)
        seconds = self.work_s / threads * (1.0 + 1.5 * crowding)
        self._used = min(threads, self.cores - self.others) if crowding else threads
        self.now_s += seconds
        return seconds, seconds * max(self._used, 0.5 * threads)

    def drive(self, governor: Governor, runs: int, size: int = 1) -> list[int]:
        """The number of threads that each of some runs used."""
        used = []
        for _ in range(runs):
            threads = governor.choose(size)
            governor.record(size, threads, *self.run(threads))
            used.append(threads)
        return used


def governor_of(machine: Machine, threads: int = 2) -> Governor:
    return Governor(threads, machine.idle_cores, machine.clock)


def test_one_thread_is_measured_only_where_it_is_compared() -> None:
    machine = Machine()
    assert governor_of(machine, 1).is_settled(1, 1)
    governor = governor_of(machine)
    assert not governor.is_settled(1, governor.choose(1))
    governor._sizes[1].begin_trials([1])
    assert not governor.is_settled(1, 1)
    governor._sizes[1].on_trial.clear()
    assert governor.is_settled(1, 1)


def time_of(machine: Machine, used: list[int]) -> float:
    return sum(machine.run(threads)[0] for threads in used)


def test_one_thread_leaves_nothing_to_choose() -> None:
    machine = Machine()
    assert set(machine.drive(governor_of(machine, 1), 50)) == {1}


@pytest.mark.parametrize("threads", [2, 3, 4, 8, 16])
def test_all_threads_are_used_while_nothing_is_wrong(threads: int) -> None:
    machine = Machine(cores=threads)
    assert set(machine.drive(governor_of(machine, threads), 500)) == {threads}


def test_small_differences_between_runs_change_nothing() -> None:
    chosen, machine = random.Random(1), Machine()
    governor, used = governor_of(machine), []
    for _ in range(2000):
        machine.work_s = 0.010 * chosen.uniform(0.9, 1.15)
        used += machine.drive(governor, 1)
    assert set(used) == {2}


def test_never_chooses_a_number_it_was_not_given() -> None:
    chosen = random.Random(2)
    for threads in (1, 2, 3, 5, 8):
        machine = Machine(cores=threads)
        governor = governor_of(machine, threads)
        for _ in range(300):
            machine.work_s, machine.others = chosen.uniform(0.001, 0.1), chosen.uniform(0, threads)
            machine.is_blind = chosen.random() < 0.3
            [used] = machine.drive(governor, 1)
            assert used in governor.choices
            assert 1 <= used <= threads


@pytest.mark.parametrize("quiet_runs", [0, 1, 100], ids=lambda runs: f"after {runs} quiet runs")
def test_with_a_busy_core_two_threads_cost_hardly_more_than_one(quiet_runs: int) -> None:
    machine = Machine()
    governor = governor_of(machine)
    machine.drive(governor, quiet_runs)
    machine.others = 1.0
    used = machine.drive(governor, 400)
    assert time_of(machine, used) <= 1.15 * time_of(machine, [1] * 400)


@pytest.mark.parametrize("is_blind", [False, True])
def test_all_threads_come_back_when_the_other_program_is_gone(is_blind: bool) -> None:
    machine = Machine(is_blind=is_blind)
    governor = governor_of(machine)
    machine.drive(governor, 100)
    machine.others = 1.0
    machine.drive(governor, 300)
    machine.others = 0.0
    gone_s = machine.now_s
    while machine.now_s < gone_s + (10.0 if is_blind else 1.5):
        machine.drive(governor, 1)
    assert set(machine.drive(governor, 200)) == {2}


def test_one_slow_first_run_is_soon_forgotten() -> None:
    """The first run compiles, and reads the weights from the disk; the second is what counts."""
    machine = Machine()
    governor = governor_of(machine)
    machine.work_s *= 40
    machine.drive(governor, 1)
    machine.work_s /= 40
    while machine.now_s < 2.0:
        machine.drive(governor, 1)
    assert set(machine.drive(governor, 200)) == {2}


def test_work_that_grows_with_the_context_is_no_disturbance() -> None:
    """Chunks of a long prompt: the same number of rows, and ever more positions to look at."""
    machine = Machine()
    governor, used = governor_of(machine), []
    for chunk in range(32):
        machine.work_s = 0.5 * (1 + chunk / 6)
        used += machine.drive(governor, 1)
    assert used.count(2) >= 26


def test_all_threads_stay_where_they_are_fastest_though_they_wait_a_little() -> None:
    machine = Machine()
    machine.others = 0.3  # two threads on 1.7 cores are still faster than one
    governor = governor_of(machine)
    seconds, processor_s = machine.run(2)
    assert processor_s < 0.9 * 2 * seconds
    used = []
    for _ in range(400):
        threads = governor.choose(1)
        governor.record(1, threads, 0.007 if threads == 2 else 0.010, 0.7 * threads * 0.007 if threads == 2 else 0.010)
        used.append(threads)
    assert used.count(2) >= 320


def test_one_run_that_was_disturbed_does_not_decide_a_trial() -> None:
    governor = Governor(2, lambda: 0.0, lambda: 0.0)
    for _ in range(20):
        governor.record(1, governor.choose(1), 1.0, 2.0)
    while (threads := governor.choose(1)) == 2:
        governor.record(1, threads, 1.6, 1.6)
    for seconds in (3.0, 1.2, 1.2):
        assert governor.choose(1) == 1
        governor.record(1, 1, seconds, seconds)
    assert [governor.choose(1) for _ in range(10)] == [1] * 10


def test_what_is_settled_stays_so_until_the_next_look_at_the_machine() -> None:
    now = [100.0]
    governor = Governor(2, lambda: 0.0, lambda: now[0])
    assert governor.next_look_s(1) == 0.0
    for _ in range(20):
        governor.record(1, governor.choose(1), 1.0, 2.0)
    while (threads := governor.choose(1)) == 2:
        governor.record(1, threads, 1.6, 1.6)
    while not governor.is_settled(1, governor.choose(1)):
        governor.record(1, 1, 1.2, 1.2)
    assert governor.next_look_s(1) == now[0] + Governor._LOOK_S
    now[0] += 10.0
    assert governor.choose(1) == 1  # it has looked, and nothing is idle
    assert governor.next_look_s(1) == now[0] + Governor._LOOK_S


def test_sizes_are_judged_apart() -> None:
    machine = Machine()
    governor = governor_of(machine)
    machine.drive(governor, 50, size=1)
    machine.work_s = 1.0
    machine.drive(governor, 5, size=2)
    assert governor.choose(1) == governor.choose(2) == 2
    machine.work_s, machine.others = 0.010, 1.0
    assert machine.drive(governor, 40, size=1)[-1] == 1
    assert governor.choose(2) == 2


def test_idle_cores_are_told_however_often_they_are_asked_for() -> None:
    idle_cores, answers = IdleCores(), []
    end_s = time.monotonic() + 0.4
    while time.monotonic() < end_s:
        answers.append(idle_cores())
    assert any(answer is not None for answer in answers)


def test_only_the_cores_that_the_process_may_use_can_be_idle_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a busy core that it must share, fourteen idle ones elsewhere are no reason to use more threads."""
    clock = iter([10.0, 12.0, 14.0])
    idle = iter([[0.0, 0.0, 0.0, 0.0], [2.0, 0.5, 2.0, 2.0], [4.0, 2.5, 4.0, 4.0]])
    monkeypatch.setattr("potluck.engine.threads.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(
        "potluck.engine.threads.psutil.cpu_times",
        lambda percpu: [SimpleNamespace(idle=seconds, iowait=0.0) for seconds in next(idle)],
    )
    monkeypatch.setattr("potluck.engine.threads.os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    idle_cores = IdleCores()
    assert [idle_cores(), idle_cores(), idle_cores()] == [None, 1.25, 2.0]
