"""The torch engine: sessions over one shard on a GPU. Single tokens of many sessions run together, chunks one after the other.

A chunk's numbers depend on its own session only, because it shares its products with nobody. One caller at a time.
"""

import gc
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from potluck.core.exactness import Exactness
from potluck.core.layers import LayerRange
from potluck.engine.cuda.batches import ChunkBatch
from potluck.engine.cuda.decoder import Decoder
from potluck.engine.cuda.device import describe, find_device, kv_budget, typed_errors
from potluck.engine.cuda.kv_pages import DeviceKvCache, DeviceKvShape
from potluck.engine.cuda.matrices import DenseMatrix
from potluck.engine.cuda.operations import Operations, PlainOperations
from potluck.engine.cuda.random_weights import RandomSource
from potluck.engine.cuda.row_runner import Head, Row, RowRunner
from potluck.engine.cuda.triton_limits import FEW_ROWS
from potluck.engine.cuda.weights import CheckpointSource, ShardWeights, WeightSource
from potluck.engine.kv_cache import KvSession
from potluck.engine.kv_format import PAGE_POSITIONS, uses_half_kv
from potluck.engine.shard_engine import (
    EngineSession,
    EngineSettings,
    Floats,
    Notice,
    Round,
    Rounding,
    ShardEngine,
    Step,
    StepResult,
    at_ends,
)
from potluck.weights.checkpoint import Checkpoint
from potluck.weights.device_memory import device_bytes
from potluck.weights.random_checkpoint import RandomCheckpoint

_CHUNK_TOKENS = 2048


class TorchEngine(ShardEngine):
    """Weights in bf16, fp16 or blocks, float32 between layers. See docs/adr/0008-cuda.md for what holds of its numbers."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings, notice: Notice | None = None) -> None:
        super().__init__(checkpoint.facts, settings)
        facts, layers = self.facts, settings.layers
        self.device = find_device(settings.device)
        wanted = device_bytes(checkpoint.tensors, facts, layers, settings.has_embedding, settings.has_output)
        count = 0 if layers is None else len(layers)
        shape = DeviceKvShape(facts.kv_head_count, facts.head_size, uses_half_kv(facts, checkpoint.tensors))
        budget = kv_budget(
            self.device, wanted, settings.kv_budget_bytes, shape.page_bytes(count), settings.device_budget_bytes
        )
        with typed_errors(), torch.no_grad():
            self._weights = ShardWeights(
                facts, _source(checkpoint, self.device), layers, has_embedding=settings.has_embedding,
                has_output=settings.has_output,
            )  # fmt: skip
            self.kv: DeviceKvCache = DeviceKvCache(shape, count, budget, facts.context_length, self.device)
            self.operations = self._operations()
            first_layer = 0 if layers is None else layers.start
            self._decoder = Decoder(self._weights, self.kv, self.operations, first_layer, self.device)
            self._rows = RowRunner(self._decoder, self.device)
        self.max_rows = settings.max_rows or _CHUNK_TOKENS

    def _operations(self) -> Operations:
        if self.device.type != "cuda" and self.settings.processor != "triton":  # its interpreter, in tests
            return PlainOperations()
        from potluck.engine.cuda.triton_operations import TritonOperations

        matrices = [matrix for layer in self._weights.layers.values() for matrix in layer.matrices]
        matrices += [self._weights.output] if self._weights.output is not None else []
        is_wide = any(isinstance(each, DenseMatrix) and each.weight.dtype == torch.float32 for each in matrices)
        return TritonOperations(
            torch.float32 if is_wide else torch.bfloat16, is_batch_invariant=self.settings.is_batch_invariant
        )

    @property
    def processor(self) -> str:
        return describe(self.device)

    @property
    def exactness(self) -> Exactness:
        return "batch-invariant" if self.settings.is_batch_invariant else "tolerance"

    @property
    def weight_bytes(self) -> int:
        return self._weights.size_bytes

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.kv.size_bytes

    @torch.no_grad()
    def prepare(self) -> None:
        """Captures the graphs of all layers for every number of rows up to 32, which compiles their kernels."""
        layers = self.settings.layers
        first, stop = (0, 0) if layers is None else (layers.start, layers.stop)
        head: Head = "likeliest" if self.settings.has_output else "none"
        self._rows.prepare(first, stop, takes_tokens=self.settings.has_embedding, head=head)

    def claim_device(self) -> None:
        """A GPU takes a tenth of a millisecond to turn to another process: with a kernel waiting, it does so while the step travels."""
        self._rows.claim_device()

    def close(self) -> None:
        for session in list(self._sessions):
            self.close_session(session)
        self._rows.close()
        # Everything that holds device memory goes; torch then gives it back.
        del self._rows, self._decoder, self._weights, self.operations
        self.kv.release()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ steps

    def forward(self, steps: Sequence[Step], roundings: Sequence[Rounding] = ()) -> list[StepResult]:
        if not roundings and 0 < len(steps) <= FEW_ROWS:
            results = self._forward_row(steps[0]) if len(steps) == 1 else self._forward_usual(steps)
            if results is not None:
                return results
        return self._forward(steps, roundings)

    def _forward_row(self, step: Step) -> list[StepResult] | None:
        """`_forward_usual` for a single row, where even the loops would count."""
        session = self._sessions.get(step.session)
        if session is None or not self._is_usual(step, session):
            return None
        kv, layers, head = session.kv, session.layers, _head_of(step)
        if kv.pages[kv.length // PAGE_POSITIONS].users != 1 or layers is None:
            return None
        row = Row(0 if step.tokens is None else step.tokens[0], step.position, self.kv.published_row(kv))
        if not self._rows.run_one(row, step.hidden, layers.start, layers.stop, head, gives_hidden=step.wants_hidden):
            return None
        kv.length += 1
        return self._row_results(1, head, gives_hidden=step.wants_hidden)

    def _forward_usual(self, steps: Sequence[Step]) -> list[StepResult] | None:
        """One token of each session through a graph that is there, with as little around it as can be: decoding is nothing else.

        None: it is something else, and nothing was done.
        """
        first = self._sessions.get(steps[0].session)
        if first is None or first.layers is None or not self._is_usual(steps[0], first):
            return None
        caches = self._caches_alike(steps, first)
        if caches is None:
            return None
        columns = (
            [0 if step.tokens is None else step.tokens[0] for step in steps],
            [kv.length for kv in caches],
            self.kv.publish(caches),
        )
        hidden = [step.hidden for step in steps if step.hidden is not None]
        head, wanted = _head_of(steps[0]), any(step.wants_hidden for step in steps)
        if not self._rows.run_again(columns, hidden, first.layers.start, first.layers.stop, head, gives_hidden=wanted):
            return None
        for kv in caches:
            kv.length += 1
        return self._row_results(len(steps), head, gives_hidden=wanted)

    def _caches_alike(self, steps: Sequence[Step], first: EngineSession) -> list[KvSession] | None:
        """The steps' keys and values, if each asks for what the first, which is usual, asks for, and can be run as it is."""
        sessions, vocabulary, limit = self._sessions, self.facts.vocabulary_size, self.facts.context_length
        layers, logits, is_greedy, takes_tokens = (
            first.layers,
            steps[0].logits,
            steps[0].is_greedy,
            steps[0].hidden is None,
        )
        caches = []
        for step in steps:
            session, tokens = sessions.get(step.session), step.tokens
            if session is None or step.logits != logits or step.is_greedy != is_greedy:
                return None
            kv = session.kv
            length, page = kv.length, kv.length // PAGE_POSITIONS
            if step.position != length or length >= limit or page >= len(kv.pages) or kv.pages[page].users != 1:
                return None
            if session.layers is not layers and session.layers != layers:
                return None
            if not takes_tokens:
                if not self._is_row(step):
                    return None
            elif step.hidden is not None or tokens is None or len(tokens) != 1 or not 0 <= tokens[0] < vocabulary:
                return None
            caches.append(kv)
        return caches if len(set(map(id, caches))) == len(caches) else None

    def _row_results(self, count: int, head: Head, *, gives_hidden: bool) -> list[StepResult]:
        """Of the first `count` rows of what has just run."""
        rows = self._rows
        outputs = rows.output(count if gives_hidden else 0)
        if head == "likeliest":
            tokens = rows.likeliest(count)
            if not gives_hidden:
                return [StepResult(outputs, None, (token,)) for token in tokens]
            return [StepResult(outputs[i : i + 1], None, (token,)) for i, token in enumerate(tokens)]
        return [
            StepResult(outputs[i : i + 1], rows.logits(i)[None] if head == "logits" else None) for i in range(count)
        ]

    @torch.no_grad()
    def _forward(self, steps: Sequence[Step], roundings: Sequence[Rounding]) -> list[StepResult]:
        self._check(steps)
        caches = [self._session(step.session).kv for step in steps]
        counts = [step.count for step in steps]
        for kv, count in zip(caches, counts, strict=True):
            self.kv.extend(kv, count)
        table_rows = self.kv.publish(caches)
        layers = self._session(steps[0].session).layers
        results: dict[int, StepResult] = {}
        singles = [i for i, step in enumerate(steps) if counts[i] == 1 and len(step.logits) <= 1]
        if any(_matters(rounding, layers) for rounding in roundings):
            singles = []  # rounding happens on the host, between layers
        for first in range(0, len(singles), FEW_ROWS):
            part = singles[first : first + FEW_ROWS]
            results |= self._run_rows(steps, part, [table_rows[i] for i in part], layers)
        for i, step in enumerate(steps):
            if i not in results:
                results[i] = self._run_chunk(step, table_rows[i], layers, roundings)
        for kv, count in zip(caches, counts, strict=True):
            kv.length += count
        return [results[i] for i in range(len(steps))]

    def _run_rows(
        self, steps: Sequence[Step], part: list[int], table_rows: list[int], layers: LayerRange | None
    ) -> dict[int, StepResult]:
        alike: dict[tuple[Head, bool], list[tuple[int, int]]] = {}
        for i, row in zip(part, table_rows, strict=True):
            alike.setdefault((_head_of(steps[i]), steps[i].tokens is not None), []).append((i, row))
        results: dict[int, StepResult] = {}
        for (head, _), chosen in alike.items():
            results |= self._run_alike(steps, chosen, layers, head)
        return results

    def _run_alike(
        self, steps: Sequence[Step], chosen: list[tuple[int, int]], layers: LayerRange | None, head: Head
    ) -> dict[int, StepResult]:
        first, stop = (0, 0) if layers is None else (layers.start, layers.stop)
        given = [steps[i] for i, _ in chosen]
        rows = [
            Row(0 if step.tokens is None else step.tokens[0], step.position, row)
            for step, (_, row) in zip(given, chosen, strict=True)
        ]
        hidden = [step.hidden for step in given if step.hidden is not None]
        wanted = any(step.wants_hidden for step in given)
        self._rows.run(rows, hidden, first, stop, head, gives_hidden=wanted)
        results = self._row_results(len(rows), head, gives_hidden=wanted)
        return {i: result for (i, _), result in zip(chosen, results, strict=True)}

    def _run_chunk(
        self, step: Step, table_row: int, layers: LayerRange | None, roundings: Sequence[Rounding]
    ) -> StepResult:
        before_layers, before_output = at_ends(layers, roundings)
        outputs = []
        for first in range(0, step.count, self.max_rows):
            count = min(self.max_rows, step.count - first)
            hidden = self._input(step, first, count, before_layers)
            self._run_layers(hidden, ChunkBatch(step.position + first, count, table_row), layers, roundings)
            outputs.append(hidden)
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        logits, likeliest = self._chosen(step, whole, before_output)
        return StepResult(self._on_host(whole if step.wants_hidden else whole[:0]), logits, likeliest)

    def _on_host(self, rows: torch.Tensor) -> Floats:
        """Through pinned memory, which torch keeps for the next time: pageable memory is copied to at a tenth of the rate."""
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self.device.type == "cuda")
        host.copy_(rows, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        result: Floats = host.numpy()
        return result

    def _input(self, step: Step, first: int, count: int, rounded: Round | None) -> torch.Tensor:
        if step.hidden is not None:
            rows = np.ascontiguousarray(step.hidden[first : first + count])
            return torch.from_numpy(rows).to(self.device, copy=True)
        assert step.tokens is not None
        tokens = torch.tensor(step.tokens[first : first + count], dtype=torch.int32).to(self.device)
        return self._rounded(self._decoder.embed(tokens), rounded)

    def _rounded(self, hidden: torch.Tensor, rounded: Round | None) -> torch.Tensor:
        return hidden if rounded is None else torch.from_numpy(rounded(hidden.cpu().numpy())).to(self.device, copy=True)

    def _run_layers(
        self, hidden: torch.Tensor, batch: ChunkBatch, layers: LayerRange | None, roundings: Sequence[Rounding]
    ) -> None:
        if layers is None:
            return
        inside = {each.layer: each.apply for each in roundings if layers.start < each.layer < layers.stop}
        for first, stop in itertools.pairwise([layers.start, *sorted(inside), layers.stop]):
            if first in inside:
                hidden.copy_(self._rounded(hidden, inside[first]))
            self._decoder.run(hidden, batch, first, stop)

    @property
    def output_rows(self) -> int:
        return FEW_ROWS if self.settings.has_output else 0

    @torch.no_grad()
    def project(self, session: int, rows: Floats, roundings: Sequence[Rounding] = ()) -> Floats:
        held = self._session(session)
        self._check_projection(held, len(rows))
        _, rounded = at_ends(held.layers, roundings)
        given = np.ascontiguousarray(rows if rounded is None else rounded(rows))
        logits: Floats = self._decoder.logits(torch.from_numpy(given).to(self.device, copy=True)).cpu().numpy()
        return logits

    def _chosen(
        self, step: Step, hidden: torch.Tensor, rounded: Round | None
    ) -> tuple[Floats | None, tuple[int, ...] | None]:
        if not step.logits:
            return None, None
        places = torch.tensor(list(step.logits), dtype=torch.int64).to(self.device)
        rows = self._rounded(hidden.index_select(0, places), rounded)
        parts = [self._decoder.logits(rows[first : first + FEW_ROWS]) for first in range(0, len(rows), FEW_ROWS)]
        if step.is_greedy:
            return None, tuple(token for part in parts for token in self._decoder.likeliest(part).tolist())
        return np.concatenate([part.cpu().numpy() for part in parts]), None


def _head_of(step: Step) -> Head:
    if not step.logits:
        return "none"
    return "likeliest" if step.is_greedy else "logits"


def _matters(rounding: Rounding, layers: LayerRange | None) -> bool:
    return layers is not None and layers.start <= rounding.layer <= layers.stop


def _source(checkpoint: Checkpoint, device: torch.device) -> WeightSource:
    return (
        RandomSource(checkpoint, device)
        if isinstance(checkpoint, RandomCheckpoint)
        else CheckpointSource(checkpoint, device)
    )
