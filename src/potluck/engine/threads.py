"""A worker's threads: the caller and some helpers, who sleep between runs; and the choice of how many to use.

Bits do not depend on the number of threads, so it may change from one run to the next: where another program keeps a core busy,
fewer threads are faster, and the governor finds that out by looking at the clock.
"""

import queue
import threading

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
    """Chooses the number of threads for the next run from how long runs of that size took with each number.

    All threads are used until a run takes much longer than such runs used to; then fewer are tried, and what is fastest is kept,
    with a look at the others from time to time, ever more rarely.
    """

    SLOWER = 1.35  # times the usual before something is wrong
    _FORGET = 0.25  # weight of the newest run in an average
    _FIRST_LOOK, _LAST_LOOK = 8, 256  # runs between looks at another number

    def __init__(self, threads: int) -> None:
        self.choices = sorted({threads, max(1, threads // 2), 1}, reverse=True)
        self._average: dict[tuple[int, int], float] = {}
        self._best: dict[tuple[int, int], float] = {}
        self._until_look: dict[int, int] = {}
        self._pause: dict[int, int] = {}

    def choose(self, size: int) -> int:
        """How many threads the next run of `size` (any key for runs of similar work) should use."""
        if len(self.choices) == 1:
            return self.choices[0]
        full = self.choices[0]
        usual, best = self._average.get((size, full)), self._best.get((size, full))
        if usual is None or best is None:
            return full
        known = {n: self._average[size, n] for n in self.choices if (size, n) in self._average}
        if usual <= self.SLOWER * best and len(known) == 1:
            return full
        missing = next((n for n in self.choices if n not in known), None)
        if missing is not None:
            return missing
        return self._look_around(size, min(known, key=lambda n: known[n]))

    def _look_around(self, size: int, fastest: int) -> int:
        left = self._until_look.get(size, self._FIRST_LOOK) - 1
        self._until_look[size] = left
        if left > 0:
            return fastest
        pause = min(2 * self._pause.get(size, self._FIRST_LOOK), self._LAST_LOOK)
        self._pause[size], self._until_look[size] = pause, pause
        return next(n for n in self.choices if n != fastest)

    def record(self, size: int, threads: int, seconds: float) -> None:
        key = (size, threads)
        before = self._average.get(key)
        self._average[key] = seconds if before is None else before + self._FORGET * (seconds - before)
        # The best drifts upward slowly, so that a machine that has become slower for good is not called disturbed for ever.
        self._best[key] = min(self._best.get(key, seconds) * 1.001, seconds)
