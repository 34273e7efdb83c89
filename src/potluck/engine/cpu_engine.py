"""The CPU engine: sessions over one shard of a model, and batches of their steps through its layers.

Knows no network, no text and no sampling. One caller at a time; kernels run on a team of threads with the GIL released.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadRequest
from potluck.core.exactness import Exactness
from potluck.core.layers import LayerRange
from potluck.engine.decoder import Decoder, OutputHead
from potluck.engine.kernels.attention import SPAN_POSITIONS, TILE_ROWS
from potluck.engine.kernels.compiler_pages import give_back_compiler_pages
from potluck.engine.kernels.library import KernelLibrary
from potluck.engine.kernels.memory import (
    BATCH_ATTENTION_TASKS,
    BATCH_ROWS,
    BATCH_SPANS,
    BATCH_TILE_COUNT,
    BATCH_TILES,
    BATCH_WORDS,
    TILE_WORDS,
)
from potluck.engine.kernels.schedule import run_alone
from potluck.engine.kv_cache import KvCache, KvShape
from potluck.engine.kv_format import PAGE_POSITIONS, uses_half_kv
from potluck.engine.packed_cache import PackedCache
from potluck.engine.program import Program
from potluck.engine.shard_engine import (
    EngineSession,
    EngineSettings,
    Notice,
    Round,
    Rounding,
    ShardEngine,
    Step,
    StepResult,
    at_ends,
)
from potluck.engine.shard_weights import ShardWeights
from potluck.engine.threads import Governor, IdleCores, ThreadTeam
from potluck.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]
_BUFFER_FLOATS = 4 << 20  # bound on the widest buffer, which sets how many rows go through the layers at once
_MAX_ROWS, _MIN_ROWS = 256, 32
_OUTPUT_FLOATS = 2 << 20
_FEW_SLOTS = 4096  # attention is cut into spans as tasks of their own only while their partial sums stay this few


class _Expected(NamedTuple):
    """One more token of a session, made ready: its page is there, its place is in the batch, its program is found."""

    session: int
    position: int
    held: EngineSession
    program: Program
    has_logits: bool
    kv_changes: int


@dataclass
class _Row:
    """A piece of a step that goes through the layers in one run."""

    index: int
    first: int
    count: int


class CpuEngine(ShardEngine):
    """The arithmetic of docs/arithmetic.md: what a token gives depends on the tokens before it and on nothing else."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings, notice: Notice | None = None) -> None:
        facts = checkpoint.facts
        super().__init__(facts, settings)
        if settings.cache_folder is not None and settings.source is None:
            raise BadRequest("packed weights can be kept only under the hash of the model that they come from")
        cache = PackedCache(settings.cache_folder, settings.source or "")
        weights = ShardWeights(
            checkpoint,
            settings.layers,
            has_embedding=settings.has_embedding,
            has_output=settings.has_output,
            cache=cache,
        )
        self._weights = weights
        kv_shape = KvShape(facts.kv_head_count, facts.head_size, uses_half_kv(facts, checkpoint.tensors))
        self.kv = KvCache(kv_shape, settings.kv_budget_bytes)
        self.max_rows = settings.max_rows or max(_MIN_ROWS, min(_MAX_ROWS, _BUFFER_FLOATS // facts.feed_forward_size))
        library = KernelLibrary(settings.processor, notice)
        self._decoder = Decoder(weights, library, kv_shape, self.max_rows)
        self._head = None
        if settings.has_output:
            self._head = OutputHead(weights, library, max(1, min(32, _OUTPUT_FLOATS // facts.vocabulary_size)))
        self._processor = library.processor
        self._team = ThreadTeam(settings.threads)
        self._governor = Governor(settings.threads, IdleCores(), time.monotonic)
        self._tokens_per_tile = max(1, TILE_ROWS // (facts.head_count // facts.kv_head_count))
        self._batch = np.zeros(BATCH_WORDS, np.int64)
        self._tiles = np.zeros((self.max_rows, TILE_WORDS), np.int64)
        self._batch[BATCH_TILES] = self._tiles.ctypes.data
        self._batch_address = int(self._batch.ctypes.data)
        self._row = self._decoder.hidden[:1]
        self._expected: _Expected | None = None
        self._alone_size, self._alone_until_s = (
            0,
            0.0,
        )  # work that is one thread's until then, without asking the governor

    @property
    def processor(self) -> str:
        return self._processor

    @property
    def exactness(self) -> Exactness:
        return "bitwise"

    def settle(self) -> None:
        self._weights.settle()
        give_back_compiler_pages()

    def close(self) -> None:
        """Ends the threads; the engine cannot be used afterwards."""
        for session in list(self._sessions):
            self.close_session(session)
        self._team.close()

    # ------------------------------------------------------------ steps

    def expect(self, session: int) -> None:
        """Plain decoding only: one token, through all of the session's layers at once, and with logits where they come out."""
        held = self._session(session)
        layers, position = held.layers, held.kv.length
        self._expected = None
        if layers is None or position >= min(self.facts.context_length, held.kv.reserved_pages * PAGE_POSITIONS):
            return
        self.kv.extend(held.kv, 1)
        self._decoder.reserve_positions(position + 1)
        head = self._head if self._ends_with(held) else None
        program = self._decoder.program_for(layers.start, layers.stop, layers.start, head)
        self._describe([Step(session, position, tokens=(0,))], [_Row(0, 0, 1)])
        self._expected = _Expected(session, position, held, program, head is not None, self.kv.changes)

    def _forward_expected(self, expected: _Expected, step: Step) -> StepResult | None:
        """None where the step is not the expected one. What `expect` has seen to need not be looked at again."""
        kv = expected.held.kv
        if (
            step.session != expected.session
            or not step.position == expected.position == kv.length
            or step.count != 1
            or expected.kv_changes != self.kv.changes
            or tuple(step.logits) != ((0,) if expected.has_logits else ())
        ):
            return None
        self._check_input(step, expected.held)
        self._row[:] = self._input(step, None)
        self._run(expected.program, 1, 1)
        kv.length += 1
        return self._decoded(step, 0, self._row)

    def _decoded(self, step: Step, row: int, hidden: Floats) -> StepResult:
        """What a run that included the logits has left in `row`."""
        if not step.logits:
            return StepResult(hidden, None)
        assert self._head is not None
        logits = self._head.logits[row]
        if not step.is_greedy:
            return StepResult(hidden, logits[None].copy())
        token = int(logits.argmax())  # of the first that is not a number, where there is one
        return StepResult(hidden, None, (token if logits.item(token) > -math.inf else -1,))

    def forward(self, steps: Sequence[Step], roundings: Sequence[Rounding] = ()) -> list[StepResult]:
        expected, self._expected = self._expected, None
        if expected is not None and not roundings and len(steps) == 1:
            result = self._forward_expected(expected, steps[0])
            if result is not None:
                return [result]
        self._check(steps)
        for step in steps:
            self.kv.extend(self._session(step.session).kv, step.count)
        self._decoder.reserve_positions(max(step.position + step.count for step in steps))
        layers = self._session(steps[0].session).layers
        before_layers, before_output = at_ends(layers, roundings)
        inputs = self._inputs(steps, before_layers)
        outputs = [np.empty_like(rows) for rows in inputs]
        runs = self._cut(steps)
        head = self._head if before_output is None and len(runs) == 1 and self._chooses_in_every_row(steps) else None
        self._decoder.make_room()
        programs = self._programs(layers, roundings, head)
        for pieces in runs:
            self._run_layers(steps, pieces, programs, inputs, outputs)
        for step in steps:
            self._session(step.session).kv.length += step.count
        if head is not None and programs:
            return [self._decoded(step, i, outputs[i]) for i, step in enumerate(steps)]
        logits = self._logits(steps, outputs, before_output)
        return [StepResult(rows, chosen) for rows, chosen in zip(outputs, logits, strict=True)]

    def _chooses_in_every_row(self, steps: Sequence[Step]) -> bool:
        """Whether this is plain decoding, whose layers and logits can be one run."""
        fits = self._head is not None and len(steps) <= self._head.max_rows
        return fits and all(step.count == 1 and step.logits == (0,) for step in steps)

    def _programs(
        self, layers: LayerRange | None, roundings: Sequence[Rounding], head: OutputHead | None
    ) -> list[tuple[Program, Callable[[Floats], Floats] | None]]:
        """Programs to run one after the other, each with what is done to the rows before it."""
        if layers is None:
            return []
        inside = {
            rounding.layer: rounding.apply for rounding in roundings if layers.start < rounding.layer < layers.stop
        }
        edges = [layers.start, *sorted(inside), layers.stop]
        return [
            (
                self._decoder.program_for(first, stop, layers.start, head if stop == layers.stop else None),
                inside.get(first),
            )
            for first, stop in itertools.pairwise(edges)
        ]

    def _inputs(self, steps: Sequence[Step], rounded: Round | None) -> list[Floats]:
        """Of every step. Tokens of several are looked up together: each time costs more than each token."""
        if len(steps) == 1 or rounded is not None or any(step.tokens is None for step in steps):
            return [self._input(step, rounded) for step in steps]
        assert self._weights.embedding is not None
        rows = self._weights.embedding.look_up([token for step in steps for token in step.tokens or ()])
        ends = itertools.accumulate(step.count for step in steps)
        return [rows[end - step.count : end] for step, end in zip(steps, ends, strict=True)]

    def _input(self, step: Step, rounded: Round | None) -> Floats:
        if step.hidden is not None:
            return step.hidden
        assert self._weights.embedding is not None
        assert step.tokens is not None
        rows = self._weights.embedding.look_up(step.tokens)
        return rows if rounded is None else rounded(rows)

    def _cut(self, steps: Sequence[Step]) -> list[list[_Row]]:
        """Runs of at most `max_rows` rows. A later piece of a long step comes in a later run."""
        runs: list[list[_Row]] = [[]]
        left = self.max_rows
        for index, step in enumerate(steps):
            first = 0
            while first < step.count:
                if left == 0:
                    runs.append([])
                    left = self.max_rows
                count = min(left, step.count - first)
                runs[-1].append(_Row(index, first, count))
                first += count
                left -= count
        return runs

    def _run_layers(
        self, steps: Sequence[Step], pieces: list[_Row], programs: list[tuple[Program, Callable[[Floats], Floats] | None]],
        inputs: list[Floats], outputs: list[Floats],
    ) -> None:  # fmt: skip
        hidden = self._decoder.hidden
        row = 0
        for piece in pieces:
            hidden[row : row + piece.count] = inputs[piece.index][piece.first : piece.first + piece.count]
            row += piece.count
        self._describe(steps, pieces)
        for program, rounded in programs:
            if rounded is not None:
                hidden[:row] = rounded(hidden[:row])
            self._run(program, row, 1)
        row = 0
        for piece in pieces:
            outputs[piece.index][piece.first : piece.first + piece.count] = hidden[row : row + piece.count]
            row += piece.count

    def _describe(self, steps: Sequence[Step], pieces: list[_Row]) -> None:
        """Fills in the batch: tiles of tokens, and how attention's work is cut into tasks."""
        row = tiles = longest = 0
        for piece in pieces:
            pages = self._session(steps[piece.index].session).kv.table_address
            for first in range(0, piece.count, self._tokens_per_tile):
                count = min(self._tokens_per_tile, piece.count - first)
                position = steps[piece.index].position + piece.first + first
                self._tiles[tiles] = (row + first, count, position, pages)
                tiles += 1
            row += piece.count
            longest = max(longest, steps[piece.index].position + piece.first + piece.count)
        spans = -(-longest // SPAN_POSITIONS)
        tasks = tiles * self.facts.kv_head_count
        # Few tiles over a long context: let threads share the context. Many tiles: each goes through all of it.
        is_worth_it = self.settings.threads > 1 and tasks < 8 * self.settings.threads
        if not is_worth_it or row * self.facts.head_count * spans > _FEW_SLOTS:
            spans = 1
        self._decoder.reserve_slots(row * self.facts.head_count * spans)
        self._batch[BATCH_ROWS], self._batch[BATCH_TILE_COUNT] = row, tiles
        self._batch[BATCH_SPANS], self._batch[BATCH_ATTENTION_TASKS] = spans, tasks * spans

    def _run(self, program: Program, rows: int, kind: int) -> None:
        self._batch[BATCH_ROWS] = rows
        if self.settings.threads == 1:
            run_alone(program.table_address, program.length, self._batch_address)
            return
        size = (rows << 24) | (program.length << 1) | kind  # what the governor compares: equal work only
        if size == self._alone_size and time.monotonic() < self._alone_until_s:
            run_alone(program.table_address, program.length, self._batch_address)
            return
        threads = self._governor.choose(size)
        if self._governor.is_settled(size, threads):
            self._alone_size, self._alone_until_s = size, self._governor.next_look_s(size)
            run_alone(program.table_address, program.length, self._batch_address)
            return
        start, used = time.perf_counter(), time.process_time()
        self._team.run(program.table_address, program.length, self._batch_address, program.sync_address, threads)
        self._governor.record(size, threads, time.perf_counter() - start, time.process_time() - used)

    @property
    def output_rows(self) -> int:
        return self._head.max_rows if self._head is not None else 0

    def project(self, session: int, rows: Floats, roundings: Sequence[Rounding] = ()) -> Floats:
        held = self._session(session)
        self._check_projection(held, len(rows))
        assert self._head is not None
        _, rounded = at_ends(held.layers, roundings)
        self._expected = None
        self._head.hidden[: len(rows)] = rows if rounded is None else rounded(rows)
        self._run(self._head.program, len(rows), 0)
        return self._head.logits[: len(rows)].copy()

    def _logits(self, steps: Sequence[Step], outputs: list[Floats], rounded: Round | None) -> list[Floats | None]:
        wanted = [(index, place) for index, step in enumerate(steps) for place in step.logits]
        results = [
            np.empty((len(step.logits), self.facts.vocabulary_size), np.float32) if step.logits else None
            for step in steps
        ]
        filled = [0] * len(steps)
        head = self._head
        for first in range(0, len(wanted), head.max_rows if head is not None else 1):
            assert head is not None
            part = wanted[first : first + head.max_rows]
            for row, (index, place) in enumerate(part):
                head.hidden[row] = outputs[index][place]
            if rounded is not None:
                head.hidden[: len(part)] = rounded(head.hidden[: len(part)])
            self._run(head.program, len(part), 0)
            for row, (index, _) in enumerate(part):
                target = results[index]
                assert target is not None
                target[filled[index]] = head.logits[row]
                filled[index] += 1
        return results
