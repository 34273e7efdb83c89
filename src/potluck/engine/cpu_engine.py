"""The CPU engine: sessions over one shard of a model, and batches of their steps through its layers.

Knows no network, no text and no sampling. One caller at a time; kernels run on a team of threads with the GIL released.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadRequest, ContextLengthExceeded, UnknownArchitecture
from potluck.core.layers import LayerRange
from potluck.engine.decoder import Decoder, OutputHead
from potluck.engine.kernels.attention import SPAN_POSITIONS, TILE_ROWS
from potluck.engine.kernels.library import KernelLibrary, Notice
from potluck.engine.kernels.memory import (
    BATCH_ATTENTION_TASKS,
    BATCH_ROWS,
    BATCH_SPANS,
    BATCH_TILE_COUNT,
    BATCH_TILES,
    BATCH_WORDS,
    TILE_WORDS,
)
from potluck.engine.kv_cache import KvCache, KvSession, KvShape
from potluck.engine.packed_cache import PackedCache
from potluck.engine.program import Program
from potluck.engine.shard_weights import ShardWeights, uses_half_kv
from potluck.engine.threads import Governor, IdleCores, ThreadTeam
from potluck.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]
_Round = Callable[[Floats], Floats]
_BUFFER_FLOATS = 4 << 20  # bound on the widest buffer, which sets how many rows go through the layers at once
_MAX_ROWS, _MIN_ROWS = 256, 32
_OUTPUT_FLOATS = 2 << 20
_FEW_SLOTS = 4096  # attention is cut into spans as tasks of their own only while their partial sums stay this few


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a shard. `processor` forces a kind of kernel (tests); `cache_folder` None keeps packed weights in memory."""

    layers: LayerRange | None  # None: no layers, only the embedding or the output
    has_embedding: bool = True
    has_output: bool = True
    threads: int = 1
    kv_budget_bytes: int = 1 << 30
    cache_folder: Path | None = None
    source: str | None = None  # identifies the model's content; a cache folder needs it
    processor: str | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class Step:
    """Some consecutive tokens of one session: token ids where the shard owns the embedding, hidden rows where it does not.

    `position` must be the session's length. `logits` lists which of the step's tokens to return logits for.
    """

    session: int
    position: int
    tokens: Sequence[int] | None = None
    hidden: Floats | None = None
    logits: Sequence[int] = ()

    @property
    def count(self) -> int:
        if self.tokens is not None:
            return len(self.tokens)
        return len(self.hidden) if self.hidden is not None and self.hidden.ndim else 0


@dataclass(frozen=True)
class StepResult:
    """`hidden`: (tokens, hidden size) out of the shard's last layer; `logits`: (chosen tokens, vocabulary)."""

    hidden: Floats
    logits: Floats | None


@dataclass(frozen=True)
class Rounding:
    """What a link at this place would have done to the activations that enter `layer`; see the session's boundaries."""

    layer: int
    apply: Callable[[Floats], Floats]


@dataclass(frozen=True)
class _Session:
    """A session's part of the shard's layers, and its keys and values there."""

    layers: LayerRange | None
    kv: KvSession

    @property
    def begins_with_tokens(self) -> bool:
        return self.layers is None or self.layers.start == 0


@dataclass
class _Row:
    """A piece of a step that goes through the layers in one run."""

    index: int
    first: int
    count: int


class CpuEngine:
    """`open / forward / truncate / fork / close` on sessions of one shard."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings, notice: Notice | None = None) -> None:
        facts = checkpoint.facts
        if settings.layers is not None and settings.layers.stop > facts.layer_count:
            raise BadRequest(f"layers {settings.layers} go past the last one: this model has 0-{facts.layer_count - 1}")
        if facts.has_feed_forward_bias:
            raise UnknownArchitecture(
                facts.name, "feed-forward bias", "biases in the feed-forward part are not supported"
            )
        self.facts, self.settings = facts, settings
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
        self.processor = library.processor
        self._team = ThreadTeam(settings.threads)
        self._governor = Governor(settings.threads, IdleCores(), time.monotonic)
        self._tokens_per_tile = max(1, TILE_ROWS // (facts.head_count // facts.kv_head_count))
        self._batch = np.zeros(BATCH_WORDS, np.int64)
        self._tiles = np.zeros((self.max_rows, TILE_WORDS), np.int64)
        self._batch[BATCH_TILES] = self._tiles.ctypes.data
        self._batch_address = int(self._batch.ctypes.data)
        self._sessions: dict[int, _Session] = {}
        self._next_session = 1

    def __repr__(self) -> str:
        return f"<CpuEngine {self.facts.name} {self.settings.layers} {self.processor}, {len(self._sessions)} sessions>"

    # ------------------------------------------------------------ sessions

    def open(self, positions: int, layers: LayerRange | None = None) -> int:
        """Reserves KV for `positions` in `layers` (all of the shard's by default); refuses at once where there is no room."""
        self._require_context(positions)
        part = layers if layers is not None else self.settings.layers
        if part is not None:
            self._require_own(part)
        return self._register(_Session(part, self.kv.open(positions, 0 if part is None else len(part))))

    def fork(self, session: int, positions: int) -> int:
        """A session that continues from all of `session`'s positions, sharing their KV."""
        self._require_context(positions)
        parent = self._session(session)
        return self._register(_Session(parent.layers, self.kv.fork(parent.kv, positions)))

    def _require_context(self, positions: int) -> None:
        if positions > self.facts.context_length:
            raise ContextLengthExceeded(
                f"{positions} positions are more than this model's context of {self.facts.context_length}"
            )

    def truncate(self, session: int, length: int) -> None:
        self.kv.truncate(self._session(session).kv, length)

    def close_session(self, session: int) -> None:
        self.kv.close(self._session(session).kv)
        del self._sessions[session]

    def length(self, session: int) -> int:
        return self._session(session).kv.length

    def export_kv(self, session: int, layers: LayerRange) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """Keys and values of `layers` (counted in the model), each (layers, positions, heads, head size)."""
        held, first, stop = self._within(session, layers)
        return self.kv.export(held, first, stop)

    def import_kv(
        self, session: int, layers: LayerRange, keys: npt.NDArray[np.generic], values: npt.NDArray[np.generic]
    ) -> None:
        held, first, stop = self._within(session, layers)
        self.kv.import_(held, first, stop, keys, values)

    def close(self) -> None:
        """Ends the threads; the engine cannot be used afterwards."""
        for session in list(self._sessions):
            self.close_session(session)
        self._team.close()

    def _register(self, session: _Session) -> int:
        number = self._next_session
        self._next_session += 1
        self._sessions[number] = session
        return number

    def _session(self, number: int) -> _Session:
        try:
            return self._sessions[number]
        except KeyError:
            raise BadRequest(f"there is no session {number}") from None

    def _require_own(self, layers: LayerRange) -> None:
        mine = self.settings.layers
        if mine is None or layers.start < mine.start or layers.stop > mine.stop:
            raise BadRequest(f"layers {layers} are not all in this shard, which holds {mine or 'none'}")

    def _within(self, session: int, layers: LayerRange) -> tuple[KvSession, int, int]:
        held = self._session(session)
        if held.layers is None or layers.start < held.layers.start or layers.stop > held.layers.stop:
            raise BadRequest(f"layers {layers} are not all in session {session}, which has {held.layers or 'none'}")
        return held.kv, layers.start - held.layers.start, layers.stop - held.layers.start

    # ------------------------------------------------------------ steps

    def forward(self, steps: Sequence[Step], roundings: Sequence[Rounding] = ()) -> list[StepResult]:
        """Runs all steps (of different sessions on the same layers) as one batch. Every step is checked before any is run.

        `roundings` are applied to what enters their layers, and to what enters the output where they name the layer after the
        last; hidden states that the caller brings are its own business.
        """
        self._check(steps)
        for step in steps:
            self.kv.extend(self._session(step.session).kv, step.count)
        self._decoder.reserve_positions(max(step.position + step.count for step in steps))
        layers = self._session(steps[0].session).layers
        before_layers, before_output = _at_ends(layers, roundings)
        inputs = [self._input(step, before_layers) for step in steps]
        outputs = [np.empty_like(rows) for rows in inputs]
        runs = self._cut(steps)
        head = self._head if before_output is None and len(runs) == 1 and self._chooses_in_every_row(steps) else None
        programs = self._programs(layers, roundings, head)
        for pieces in runs:
            self._run_layers(steps, pieces, programs, inputs, outputs)
        for step in steps:
            self._session(step.session).kv.length += step.count
        if head is not None and programs:
            return [StepResult(rows, head.logits[i : i + 1].copy()) for i, rows in enumerate(outputs)]
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

    def _check(self, steps: Sequence[Step]) -> None:
        if not steps:
            raise BadRequest("a batch needs at least one step")
        if len({step.session for step in steps}) != len(steps):
            raise BadRequest("a session can take part in a batch only once")
        if len({self._session(step.session).layers for step in steps}) != 1:
            raise BadRequest("all sessions of a batch must use the same layers")
        for step in steps:
            self._check_step(step)

    def _check_step(self, step: Step) -> None:
        session = self._session(step.session)
        if step.position != session.kv.length:
            raise BadRequest(
                f"step at position {step.position}, but session {step.session} has {session.kv.length} positions"
            )
        if step.count < 1:
            raise BadRequest("a step needs at least one token")
        if step.position + step.count > self.facts.context_length:
            raise ContextLengthExceeded(
                f"position {step.position + step.count - 1} is past {self.facts.context_length}"
            )
        self.kv.require_room(session.kv, step.count)
        self._check_input(step, session)
        if step.logits and (self._head is None or not self._ends_with(session)):
            raise BadRequest("this shard does not own the output head")
        if not all(0 <= index < step.count for index in step.logits):
            raise BadRequest(f"logits were asked for tokens that this step of {step.count} does not have")

    def _ends_with(self, session: _Session) -> bool:
        """Whether the session goes through the shard's last layer, after which the output comes."""
        return (
            session.layers is None or self.settings.layers is None or session.layers.stop == self.settings.layers.stop
        )

    def _check_input(self, step: Step, session: _Session) -> None:
        if (step.hidden is None) == (step.tokens is None):
            raise BadRequest("a step has either token ids or hidden states")
        if step.tokens is not None:
            if self._weights.embedding is None or not session.begins_with_tokens:
                raise BadRequest("this shard takes hidden states, not token ids")
            if not all(0 <= token < self.facts.vocabulary_size for token in step.tokens):
                raise BadRequest(f"token ids must be from 0 to {self.facts.vocabulary_size - 1}")
        elif step.hidden is not None and (
            step.hidden.dtype != np.float32
            or step.hidden.ndim != 2
            or step.hidden.shape[1:] != (self.facts.hidden_size,)
        ):
            raise BadRequest(f"hidden states must be float32 rows of {self.facts.hidden_size}")

    def _input(self, step: Step, rounded: _Round | None) -> Floats:
        if step.hidden is not None:
            return step.hidden
        assert self._weights.embedding is not None
        rows = self._weights.embedding.look_up(np.asarray(step.tokens, np.int64))
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
            pages = int(self._session(steps[piece.index].session).kv.addresses.ctypes.data)
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
        place = (program.table_address, len(program), self._batch_address, program.sync_address)
        if self.settings.threads == 1:
            self._team.run(*place, 1)
            return
        size = (rows << 24) | (len(program) << 1) | kind  # what the governor compares: equal work only
        threads = self._governor.choose(size)
        start, used = time.perf_counter(), time.process_time()
        self._team.run(*place, threads)
        self._governor.record(size, threads, time.perf_counter() - start, time.process_time() - used)

    @property
    def output_rows(self) -> int:
        """How many rows `project` takes at once."""
        return self._head.max_rows if self._head is not None else 0

    def project(self, session: int, rows: Floats, roundings: Sequence[Rounding] = ()) -> Floats:
        """Logits of some rows that `forward` has given for this session, with the bits that it would have given itself."""
        held = self._session(session)
        if self._head is None or not self._ends_with(held):
            raise BadRequest("this shard does not own the output head")
        if not 1 <= len(rows) <= self.output_rows:
            raise BadRequest(f"logits of {len(rows)} rows were asked for; at most {self.output_rows} go at once")
        _, rounded = _at_ends(held.layers, roundings)
        self._head.hidden[: len(rows)] = rows if rounded is None else rounded(rows)
        self._run(self._head.program, len(rows), 0)
        return self._head.logits[: len(rows)].copy()

    def _logits(self, steps: Sequence[Step], outputs: list[Floats], rounded: _Round | None) -> list[Floats | None]:
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


def _at_ends(layers: LayerRange | None, roundings: Sequence[Rounding]) -> tuple[_Round | None, _Round | None]:
    """What is done to embedded tokens before the first layer, and to rows between the last layer and the output.

    Without layers in between there is a link on one side, which has rounded already.
    """
    if layers is None:
        return None, None
    by_layer = {rounding.layer: rounding.apply for rounding in roundings}
    return by_layer.get(layers.start), by_layer.get(layers.stop)
