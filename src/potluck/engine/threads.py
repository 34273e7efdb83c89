"""A worker's threads: the caller and some helpers, who sleep between runs; and the choice of how many to use.

Bits do not depend on the number of threads, so it may change from one run to the next: where another program keeps a core busy,
fewer threads are faster, and the governor finds that out by looking at the clock.
"""

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable

import psutil

from potluck.engine.kernels.schedule import prepare_run, run_alone, run_together


class ThreadTeam:
    """Runs programs with up to `count` threads, the caller included. The GIL is released while kernels run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._generation = 0
        self._job: tuple[int, int, int, int, int, int] | None = None
        self._bells: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(count - 1)]
        self._helpers = [
            threading.Thread(target=self._help, args=(bell,), name=f"potluck-compute-{i + 1}", daemon=True)
            for i, bell in enumerate(self._bells)
        ]
        for helper in self._helpers:
            helper.start()
        # Programs without operations, so that neither way of running is loaded when the machine becomes busy, in the middle of an answer.
        run_alone(0, 0, 0)
        prepare_run(0, 0, 0)
        run_together(0, 0, 0, 0, 0, 1)

    def run(self, program: int, operations: int, batch: int, sync: int, threads: int) -> None:
        """All arguments but the last are addresses and counts of a Program; their memory outlives the team."""
        if threads == 1:
            run_alone(program, operations, batch)
            return
        self._generation += 2
        prepare_run(operations, sync, self._generation)
        self._job = (program, operations, batch, sync, self._generation, threads)
        for bell in self._bells[: threads - 1]:
            bell.put(self._generation)
        run_together(*self._job)
        # A helper may still be walking through finished phases; it must not take chunks of the next batch for its own.
        prepare_run(operations, sync, self._generation + 1)

    def _help(self, bell: "queue.SimpleQueue[int]") -> None:
        while True:
            generation = bell.get()
            if generation < 0:
                return
            job = self._job
            if job is not None and job[4] == generation:  # otherwise that run is long over
                run_together(*job)

    def close(self) -> None:
        for bell in self._bells:
            bell.put(-1)
        for helper in self._helpers:
            helper.join()


class Governor:
    """Chooses the number of threads for the next run from how runs of that size went.

    All threads are used until they do not get the processors they need (their time on a processor falls short of the time that
    passed), or runs take much longer than such runs used to. Then fewer are tried, and what is fastest is kept until the machine
    has idle cores again. `idle_cores` says how many, or None where the system does not tell; then it is tried from time to time.
    """

    SLOWER = 1.35  # times the usual before something is wrong
    STARVED = 0.8  # of the processor time that the threads should have had
    _FORGET = 0.25  # weight of the newest run in an average
    _TRIALS = 3  # runs with another number before it is judged
    _LOOK_S, _BLIND_LOOK_S = 0.5, 8.0  # between looks at the machine; between trials where it does not tell
    _FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024  # runs between trials that changed nothing

    def __init__(self, threads: int, idle_cores: Callable[[], float | None], clock: Callable[[], float]) -> None:
        self.choices = sorted({threads, max(1, threads // 2), 1}, reverse=True)
        self._idle_cores, self._clock = idle_cores, clock
        self._sizes: dict[int, _Experience] = {}

    def choose(self, size: int) -> int:
        """How many threads the next run of `size` (any key for runs of equal work) should use."""
        if len(self.choices) == 1:
            return self.choices[0]
        known = self._sizes.get(size) or self._first_of(size)
        if known.chosen == self.choices[0] and not known.on_trial:
            if not known.is_troubled(self):
                return known.chosen
            known.begin_trials(self.choices[1:])
        elif not known.on_trial and self._is_calm(known):
            known.restore(self.choices[0])
        if known.on_trial:
            return self._try(known)
        return known.chosen

    def is_settled(self, size: int, threads: int) -> bool:
        """Whether nothing is to be learnt from the next run: one thread does not wait for others, and is compared with none now."""
        known = self._sizes.get(size)
        return threads == 1 and (known is None or not known.on_trial)

    def next_look_s(self, size: int) -> float:
        """Until when, on its clock, runs of a size that is settled stay so."""
        known = self._sizes.get(size)
        return 0.0 if known is None else known.looked_s + self._LOOK_S

    def _first_of(self, size: int) -> "_Experience":
        known = self._sizes[size] = _Experience(self.choices[0])
        return known

    def _try(self, known: "_Experience") -> int:
        number = known.on_trial[0]
        if len(known.tried[number]) >= self._TRIALS:
            # Not their average: one run that another program was in the way of would keep all threads, and trials away for long.
            known.average[number] = statistics.median(known.tried[number])
            known.on_trial.pop(0)
            if not known.on_trial:
                return self._conclude(known)
            number = known.on_trial[0]
        return number

    def _conclude(self, known: "_Experience") -> int:
        known.chosen = min(known.average, key=lambda n: known.average[n])
        known.looked_s = self._clock()
        if known.chosen == self.choices[0]:
            # All threads are still the fastest: what looked like trouble is how things are now. Ask more rarely.
            known.best[known.chosen], known.share = known.average[known.chosen], 1.0
            known.pause = min(2 * known.pause, self._LONGEST_PAUSE)
            known.until_trial = known.pause
        return known.chosen

    def _is_calm(self, known: "_Experience") -> bool:
        now = self._clock()
        if now - known.looked_s < self._LOOK_S:
            return False
        idle = self._idle_cores()
        if idle is None:
            return now - known.looked_s >= self._BLIND_LOOK_S
        known.looked_s = now
        return idle >= 0.7 * (self.choices[0] - known.chosen)

    def record(self, size: int, threads: int, seconds: float, processor_s: float) -> None:
        """A run took `seconds`, in which all its threads together had `processor_s` of a processor."""
        if len(self.choices) > 1:
            known = self._sizes.get(size) or self._first_of(size)
            known.record(threads, seconds, processor_s / (threads * seconds) if seconds > 0 else 1.0, self._FORGET)


class _Experience:
    """How runs of one size went."""

    def __init__(self, threads: int) -> None:
        self.chosen = threads
        self.on_trial: list[int] = []
        self.average: dict[int, float] = {}
        self.best: dict[int, float] = {}
        self.share = 1.0  # of the processors, with the chosen number
        self.tried: dict[int, list[float]] = {}  # how long each run took with a number on trial
        self.pause = Governor._FIRST_PAUSE // 2
        self.until_trial = 0  # runs
        self.looked_s = 0.0

    def is_troubled(self, rules: Governor) -> bool:
        usual, best = self.average.get(self.chosen), self.best.get(self.chosen)
        if usual is None or best is None or self.until_trial > 0:
            return False
        return self.share < rules.STARVED or usual > rules.SLOWER * best

    def begin_trials(self, numbers: list[int]) -> None:
        self.on_trial = list(numbers)
        self.tried = {number: [] for number in numbers}
        for number in numbers:
            self.average.pop(number, None)  # of times long past

    def restore(self, threads: int) -> None:
        self.chosen, self.share = threads, 1.0
        self.average.pop(threads, None)

    def record(self, threads: int, seconds: float, share: float, forget: float) -> None:
        before = self.average.get(threads)
        self.average[threads] = seconds if before is None else before + forget * (seconds - before)
        # The best drifts upward slowly, so that a machine that has become slower for good is not called disturbed for ever.
        self.best[threads] = min(self.best.get(threads, seconds) * 1.001, seconds)
        if threads == self.chosen and not self.on_trial:
            self.share += forget * (min(share, 1.0) - self.share)
        if self.on_trial:
            self.tried.setdefault(threads, []).append(seconds)
        else:
            self.until_trial = max(0, self.until_trial - 1)


class IdleCores:
    """How many of our cores had nothing to do since the last time somebody asked; None the first time, and where nobody knows.

    Ours: those that this process may run on. Others being idle is of no use to it.
    """

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def __call__(self) -> float | None:
        idle, now = _idle_s(), time.monotonic()
        before = self._before
        if before is not None and now - before[0] < 0.1:
            return None  # too soon to tell; the measurement goes on
        self._before = (now, idle)
        return None if before is None else (idle - before[1]) / (now - before[0])


def _idle_s() -> float:
    """Seconds that our cores have been idle, all together."""
    affinity = getattr(os, "sched_getaffinity", None)
    ours = affinity(0) if affinity is not None else None
    each = psutil.cpu_times(percpu=True)
    mine = [times for core, times in enumerate(each) if ours is None or core in ours]
    # Cores that are switched off shift the numbers of the others: where they do not fit, all count.
    return float(sum(times.idle + getattr(times, "iowait", 0.0) for times in mine or each))
