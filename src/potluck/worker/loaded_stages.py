"""The stages that a worker has loaded: an engine each, one KV budget for all. Sessions may use parts of them.

A stage that lies within a loaded one is had for nothing; an engine goes when no stage that was asked for lies within it any more.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from potluck.core.errors import BadRequest
from potluck.core.layers import LayerRange
from potluck.core.processors import usable_cores
from potluck.core.sampling_params import SamplingParams
from potluck.engine.factory import build_engine
from potluck.engine.sampling import choose, not_numbers
from potluck.engine.shard_engine import EngineSettings, Notice, ShardEngine, Step
from potluck.text.grammar import GrammarCompiler
from potluck.weights.checkpoint import Checkpoint
from potluck.weights.open_model import open_checkpoint
from potluck.weights.random_checkpoint import is_random, open_random
from potluck.wire.messages import Stage
from potluck.wire.work import Loaded
from potluck.wire.worker_settings import WorkerSettings

_WARM_UP_TOKENS, _TIMED_TOKENS = 16, 5


def stage_name(stage: Stage) -> str:
    """As people see it."""
    ends = [name for name, has in (("embedding", stage.has_embedding), ("output", stage.has_output)) if has]
    layers = [f"layers {stage.start}-{stage.stop - 1}"] if stage.stop > stage.start else []
    return " + ".join([*layers, *ends]) or "nothing"


def layers_of(stage: Stage) -> LayerRange | None:
    return LayerRange(stage.start, stage.stop) if stage.stop > stage.start else None


def lies_within(part: Stage, whole: Stage) -> bool:
    if (part.has_embedding and not whole.has_embedding) or (part.has_output and not whole.has_output):
        return False
    return whole.start <= part.start <= part.stop <= whole.stop


@dataclass
class LoadedStage:
    """An engine, and the stages that were asked for and lie within it. `around`: what it is an end of, and stays with."""

    stage: Stage
    engine: ShardEngine
    step_us: int
    asked_for: set[Stage] = field(default_factory=set)
    around: "LoadedStage | None" = None

    @property
    def is_needed(self) -> bool:
        return bool(self.asked_for) or (self.around is not None and bool(self.around.asked_for))


class LoadedStages:
    """Engines over one checkpoint, which is opened with the first of them."""

    def __init__(self, settings: WorkerSettings, notice: Notice | None = None) -> None:
        self._settings = settings
        self._notice = notice
        self.grammars: GrammarCompiler | None = (
            None  # once a stage with the output is loaded, where the model has a tokenizer
        )
        self._checkpoint: Checkpoint | None = None
        self._loaded: list[LoadedStage] = []

    def __repr__(self) -> str:
        return f"<LoadedStages {'; '.join(stage_name(loaded.stage) for loaded in self._loaded) or 'none'}>"

    def __len__(self) -> int:
        return len(self._loaded)

    def load(self, stage: Stage) -> Loaded:
        """Raises what opening a model or building an engine raises; nothing has changed then."""
        loaded = self._around(stage) or self._build(stage)
        loaded.asked_for.add(stage)
        return Loaded(
            stage, self._weight_bytes(stage), self._settings.kv_budget_bytes, loaded.step_us, loaded.engine.device_bytes
        )

    def unload(self, stage: Stage) -> list[ShardEngine]:
        """Engines that nobody needs any more; the caller forgets their sessions and closes them."""
        for loaded in self._loaded:
            loaded.asked_for.discard(stage)
        dropped = [loaded for loaded in self._loaded if not loaded.is_needed]
        self._loaded = [loaded for loaded in self._loaded if loaded.is_needed]
        return [loaded.engine for loaded in dropped]

    def open(self, stage: Stage, positions: int) -> tuple[ShardEngine, int]:
        """An engine's session for a part of what is loaded. Raises BadRequest, OutOfKvMemory, ContextLengthExceeded."""
        loaded = self._around(stage)
        if loaded is None and layers_of(stage) is None:
            loaded = self._build_end(stage)
        if loaded is None:
            raise BadRequest(f"{stage_name(stage)} is not loaded here")
        self._grant(loaded.engine)
        return loaded.engine, loaded.engine.open(positions, layers_of(stage))

    def fork(self, engine: ShardEngine, session: int, positions: int) -> int:
        """As `ShardEngine.fork`, within the budget of all stages."""
        self._grant(engine)
        return engine.fork(session, positions)

    def _grant(self, engine: ShardEngine) -> None:
        """What the other engines leave of the budget."""
        others = sum(each.engine.kv.reserved_bytes for each in self._loaded if each.engine is not engine)
        engine.kv.budget_bytes = min(engine.kv.capacity_bytes, self._settings.kv_budget_bytes - others)

    def _around(self, stage: Stage) -> LoadedStage | None:
        """The narrowest engine around `stage`. A session without layers needs an engine without: None means all of them there."""
        has_layers = stage.stop > stage.start
        fitting = [
            loaded
            for loaded in self._loaded
            if lies_within(stage, loaded.stage) and (loaded.stage.stop > loaded.stage.start) == has_layers
        ]
        return min(fitting, key=lambda loaded: loaded.stage.stop - loaded.stage.start, default=None)

    def _build_end(self, stage: Stage) -> LoadedStage | None:
        """The embedding or output alone, out of a loaded stage that has it: packed weights are mapped, so it takes little."""
        around = next((loaded for loaded in self._loaded if lies_within(stage, loaded.stage)), None)
        if around is None:
            return None
        built = self._build(stage)
        built.around = around
        return built

    def _build(self, stage: Stage) -> LoadedStage:
        if self._checkpoint is None:
            self._checkpoint = _open(self._settings.model_path)
        _check_stage(stage, self._checkpoint.facts.layer_count)
        folder = self._settings.packed_folder
        settings = EngineSettings(
            layers=layers_of(stage),
            has_embedding=stage.has_embedding,
            has_output=stage.has_output,
            threads=min(self._settings.threads, usable_cores()),  # more would wait for each other
            kv_budget_bytes=self._settings.kv_budget_bytes,
            cache_folder=None if folder is None else Path(folder),
            source=self._settings.source,
            processor=self._settings.processor,
            device=self._settings.device,
            device_budget_bytes=self._device_budget_bytes(),
            is_batch_invariant=self._settings.is_batch_invariant,
        )
        engine = build_engine(self._checkpoint, settings, self._notice)
        try:
            loaded = LoadedStage(stage, engine, warm_up(engine))
        except BaseException:
            engine.close()
            raise
        if stage.has_output:
            self._prepare_grammars(self._checkpoint)
        self._loaded.append(loaded)
        return loaded

    def _device_budget_bytes(self) -> int | None:
        budget = self._settings.device_budget_bytes
        return None if budget is None else budget - sum(loaded.engine.device_bytes for loaded in self._loaded)

    def _prepare_grammars(self, checkpoint: Checkpoint) -> None:
        """With the weights and not at the first request: a large vocabulary takes most of a second, in which nobody gets a token."""
        spec = checkpoint.tokenizer
        if self.grammars is None and spec is not None and spec.eos_ids:
            self.grammars = GrammarCompiler(spec, checkpoint.facts.vocabulary_size)

    def _weight_bytes(self, stage: Stage) -> int:
        assert self._checkpoint is not None
        facts, tensors = self._checkpoint.facts, self._checkpoint.tensors
        layers = range(stage.start, stage.stop)
        names = {name for name in tensors if name.startswith("layers.") and int(name.split(".")[1]) in layers}
        names |= {"embedding"} if stage.has_embedding or (stage.has_output and facts.is_output_tied) else set()
        names |= {"output", "output_norm"} & set(tensors) if stage.has_output else set()
        return sum(tensors[name].size_bytes for name in names)


def _open(model_path: str) -> Checkpoint:
    return open_random(model_path) if is_random(model_path) else open_checkpoint(Path(model_path))


def _check_stage(stage: Stage, layer_count: int) -> None:
    if not stage.start <= stage.stop <= layer_count:
        raise BadRequest(f"layers {stage.start} to {stage.stop} are not a range of a model with {layer_count}")
    if stage.has_embedding and stage.start != 0:
        raise BadRequest(f"a stage with the embedding starts at layer 0, not {stage.start}")
    if stage.has_output and stage.stop != layer_count:
        raise BadRequest(f"a stage with the output ends at layer {layer_count}, not {stage.stop}")
    if stage_name(stage) == "nothing":
        raise BadRequest("a stage has layers, the embedding or the output")


def warm_up(engine: ShardEngine) -> int:
    """Runs some tokens, which compiles kernels and reads the weights in; then the microseconds that one token takes."""
    count = min(_WARM_UP_TOKENS, engine.facts.context_length - _TIMED_TOKENS)
    if count < 1:
        return 0
    engine.prepare()
    session = engine.open(count + _TIMED_TOKENS)
    try:
        _run_some(engine, session, count)
        return int(statistics.median(_run_some(engine, session, 1) for _ in range(_TIMED_TOKENS)) * 1e6)
    finally:
        engine.close_session(session)
        engine.settle()


def _run_some(engine: ShardEngine, session: int, count: int) -> float:
    position = engine.length(session)
    has_output = engine.settings.has_output
    step = Step(
        session, position, logits=(count - 1,) if has_output else (), is_greedy=True, wants_hidden=not has_output
    )
    if engine.settings.has_embedding:
        step = replace(step, tokens=[0] * count)
    else:
        rows = np.random.default_rng(0).standard_normal((count, engine.facts.hidden_size)).astype(np.float32)
        step = replace(step, hidden=rows)
    start = time.perf_counter()
    [result] = engine.forward([step])
    if result.logits is not None:
        choose(result.logits[0], SamplingParams(temperature=1.0, logprobs=1))
    spent_s = time.perf_counter() - start
    if result.likeliest == (-1,) or not np.isfinite(result.hidden).all():
        raise not_numbers()
    return spent_s
