"""Runs a program: a table of kernels in phases, by however many threads happen to show up.

Every operation is cut into chunks that threads take one at a time from an atomic counter; a phase begins when all chunks of the
one before are done. No thread is waited for unless it holds a chunk, so a helper that the system has put to sleep costs little,
and the bits cannot depend on who did what.
"""

from typing import Any

from numba import njit

from potluck.engine.kernels.memory import (
    BATCH_ATTENTION_TASKS,
    BATCH_ROWS,
    BATCH_TILE_COUNT,
    BATCH_WORDS,
    INLINE,
    atomic_add,
    atomic_load,
    atomic_swap_if,
    call_kernel,
    enter_ieee,
    fence,
    leave_ieee,
    relax,
    words,
)

# Words of an operation. `UNITS` is how finely BY_GROUPS work can be cut.
KERNEL_AT, ARGUMENTS_AT, POLICY, UNITS, STARTS_PHASE = range(5)
OPERATION_WORDS = 5
BY_GROUPS, BY_ROWS, BY_TILES, BY_TASKS = range(4)

SYNC_WORDS = 16  # per operation; taken and done counters on cache lines of their own
DONE = 8
_SHIFT = 24  # counters carry the run's generation above their count, so that a late thread of an old run finds out
# Chunks even out what one thread is slower at, but each begins a stream of weights anew. SmolLM2's layers, two threads of Zen 4, with 1, 2,
# 4 and 8 for each: one row 1.71, 1.79, 1.95, 2.27 ms; four 2.73, 2.86, 3.12, 3.55; eight 6.4, 6.7, 7.3, 7.7; 64 rows 20.6, 20.7, 21.4, 21.
CHUNKS_PER_THREAD = 2
MAX_CHUNKS = 64


@njit(**INLINE)
def chunk_count(operation: Any, batch: Any, threads: int) -> int:
    if threads == 1:
        return 1
    policy = operation[POLICY]
    if policy == BY_GROUPS:
        units = operation[UNITS]
    elif policy == BY_ROWS:
        units = batch[BATCH_ROWS]
    elif policy == BY_TILES:
        units = batch[BATCH_TILE_COUNT]
    else:
        units = batch[BATCH_ATTENTION_TASKS]
    return min(units, CHUNKS_PER_THREAD * threads, MAX_CHUNKS)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def run_alone(program, count, batch):
    before = enter_ieee()
    for index in range(count):
        operation = words(program + index * OPERATION_WORDS * 8, OPERATION_WORDS)
        call_kernel(operation[KERNEL_AT], operation[ARGUMENTS_AT], batch, 0, 1)
    leave_ieee(before)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def prepare_run(count, sync, generation):
    """Opens the counters for a run; with a generation that nobody runs it closes them to whoever is late."""
    for index in range(count):
        counters = words(sync + index * SYNC_WORDS * 8, SYNC_WORDS)
        counters[0] = generation << _SHIFT
        counters[DONE] = generation << _SHIFT
    fence()


@njit(**INLINE)
def _take(counter: int, generation: int, chunks: int) -> int:
    """The next chunk of an operation; -1 when none is left, -2 when this run is over."""
    while True:
        value = atomic_load(counter)
        if value >> _SHIFT != generation:
            return -2
        chunk = value - (generation << _SHIFT)
        if chunk >= chunks:
            return -1
        if atomic_swap_if(counter, value, value + 1):
            return chunk


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def run_together(program, count, batch, sync, generation, threads):
    """Takes part in a run until its last chunk is done (or, for a late thread, until it sees that the run is over)."""
    before = enter_ieee()
    _take_part(program, count, batch, sync, generation, threads)
    leave_ieee(before)


@njit(**INLINE)
def _take_part(program, count, batch, sync, generation, threads):
    batch_words = words(batch, BATCH_WORDS)
    phase = 0
    while phase < count:
        end = phase
        while True:
            operation = words(program + end * OPERATION_WORDS * 8, OPERATION_WORDS)
            counter = sync + end * SYNC_WORDS * 8
            chunks = chunk_count(operation, batch_words, threads)
            while True:
                chunk = _take(counter, generation, chunks)
                if chunk < 0:
                    break
                call_kernel(operation[KERNEL_AT], operation[ARGUMENTS_AT], batch, chunk, chunks)
                atomic_add(counter + DONE * 8, 1)
            if chunk == -2:
                return
            end += 1
            if end == count or words(program + end * OPERATION_WORDS * 8, OPERATION_WORDS)[STARTS_PHASE] != 0:
                break
        for index in range(phase, end):
            operation = words(program + index * OPERATION_WORDS * 8, OPERATION_WORDS)
            goal = (generation << _SHIFT) + chunk_count(operation, batch_words, threads)
            done = sync + index * SYNC_WORDS * 8 + DONE * 8
            while True:
                value = atomic_load(done)
                if value >= goal:
                    break
                relax()
        phase = end
