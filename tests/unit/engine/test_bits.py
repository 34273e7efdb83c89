"""The same bits everywhere: the engine equals the numpy reference, and no way of cutting the work changes a bit."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts, Rotary
from potluck.engine.cpu_engine import CpuEngine, EngineSettings, Rounding, Step
from potluck.engine.reference import ReferenceDecoder
from tests.support.kernel_calls import RUNNABLE
from tests.support.memory_checkpoint import MemoryCheckpoint, random_checkpoint
from tests.support.pipelines import Pipeline, Trace, pipeline_of, shard_of
from tests.support.random_models import FAMILIES, MIXES, PLAIN, WIDE, WIDE_MIXES, facts_of
from tests.support.same_bits import assert_same_bits

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))

MODELS = [(family, mix) for family in FAMILIES for mix in (("F32", "Q4_1", "mixed") if IS_LONG else ("F32", "mixed"))]
MODELS += [("llama", "Q4_1"), ("llama", "F16"), ("llama", "BF16"), ("wide", "Q4_K"), ("wide", "Q5_K")]
SMALL_SELECTION = [("llama", "Q4_1"), ("gemma2", "F32"), ("qwen3", "mixed"), ("phi3", "Q4_1"), ("mistral", "F32")]


@cache
def model(family: str, mix: str) -> MemoryCheckpoint:
    if family == "wide":
        return random_checkpoint(WIDE, WIDE_MIXES[mix], seed=1)
    return random_checkpoint(FAMILIES[family], MIXES[mix], seed=1)


@contextmanager
def opened(pipeline: Pipeline) -> Iterator[Pipeline]:
    try:
        yield pipeline
    finally:
        pipeline.close()


def tokens_of(facts: ModelFacts, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, facts.vocabulary_size, count).tolist()


def assert_same_trace(got: Trace, wanted: Trace, what: str = "") -> None:
    assert_same_bits(got.hidden, wanted.hidden, f"{what} hidden")
    assert_same_bits(got.logits, wanted.logits, f"{what} logits")


@cache
def whole_model(family: str, mix: str) -> Pipeline:
    """One shard and one thread; kept for all tests."""
    return pipeline_of(model(family, mix))


@cache
def straight(family: str, mix: str, tokens: tuple[int, ...]) -> Trace:
    """All tokens at once, on one thread, in one shard: what every other way is compared with."""
    return whole_model(family, mix).run(tokens)


def straight_of(checkpoint: MemoryCheckpoint, tokens: Sequence[int]) -> Trace:
    with opened(pipeline_of(checkpoint)) as pipeline:
        return pipeline.run(tokens)


def random_chunks(chosen: random.Random, count: int) -> list[int]:
    chunks = []
    while sum(chunks) < count:
        chunks.append(min(chosen.choice([1, 1, 2, 3, 5, 8, 17, 40, 64, 65]), count - sum(chunks)))
    return chunks


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize(("family", "mix"), MODELS)
def test_engine_equals_the_reference(family: str, mix: str) -> None:
    """Hidden states, logits, keys and values, over more than a page of positions."""
    checkpoint = model(family, mix)
    layers = LayerRange(0, checkpoint.facts.layer_count)
    tokens = tokens_of(checkpoint.facts, 67)
    decoder = ReferenceDecoder(checkpoint, layers)
    hidden = decoder.forward(decoder.embed(tokens))
    pipeline = whole_model(family, mix)
    session = pipeline.open(80)
    [got] = pipeline.forward([(session, tokens)])
    assert_same_trace(got, Trace(hidden, decoder.logits(hidden)))
    keys, values = pipeline.engines[0].export_kv(session[0], layers)
    pipeline.close_session(session)
    for layer in layers:
        assert_same_bits(keys[layer], decoder.keys[layer], f"keys of layer {layer}")
        assert_same_bits(values[layer], decoder.values[layer], f"values of layer {layer}")
    assert np.isfinite(got.logits).all()
    assert got.logits.std() > 0.01


WINDOWS = [None, 1, 40, 64, 512, 513, 700]


@cache
def one_layer(window: int | None, mix: str) -> MemoryCheckpoint:
    return random_checkpoint(
        facts_of(
            layer_count=1, sliding_window=window, sliding_layers=(window is not None,), head_size=40, rotary=PLAIN
        ),
        MIXES[mix],
        seed=2,
    )


@pytest.mark.parametrize("mix", ["F32", "Q4_1"])
@pytest.mark.parametrize("window", WINDOWS)
def test_long_contexts_equal_the_reference(window: int | None, mix: str) -> None:
    """Over the edges of pages and spans; the reference takes its keys and values from the engine, and does the last rows."""
    checkpoint = one_layer(window, mix)
    tokens, layers = tokens_of(checkpoint.facts, 1060), LayerRange(0, 1)
    with opened(pipeline_of(checkpoint)) as pipeline:
        session = pipeline.open(1100)
        pipeline.forward([(session, tokens)])
        for end in (1060, 1026, 1024, 577, 513, 512) if IS_LONG else (1060, 1026, 513):
            decoder = ReferenceDecoder(checkpoint, layers)
            pipeline.truncate(session, end - 3)
            keys, values = pipeline.engines[0].export_kv(session[0], layers)
            decoder.keys[0], decoder.values[0] = keys[0], values[0]
            [got] = pipeline.forward([(session, tokens[end - 3 : end])])
            hidden = decoder.forward(decoder.embed(tokens[end - 3 : end]))
            assert_same_trace(got, Trace(hidden, decoder.logits(hidden)), f"positions {end - 3} to {end - 1}")


@pytest.mark.parametrize("mix", ["F32", "Q4_1"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_share_a_long_context_change_no_bit(threads: int, mix: str) -> None:
    """One token at a time over several spans: the engine then makes a task of each span."""
    for window in (None, 700):
        checkpoint = one_layer(window, mix)
        tokens = tokens_of(checkpoint.facts, 1560)
        wanted = straight_of(checkpoint, tokens)
        with opened(pipeline_of(checkpoint, threads=threads)) as pipeline:
            session = pipeline.open(1600)
            pipeline.forward([(session, tokens[:500])])
            for count in (11, 1, 1, 1, 3, 500, 6, 1, 1, 1, 1, 500, 1, 9, 1, 1, 1):
                first = pipeline.length(session)
                [got] = pipeline.forward([(session, tokens[first : first + count])])
                part = Trace(wanted.hidden[first : first + count], wanted.logits[first : first + count])
                assert_same_trace(got, part, f"window {window}, {count} tokens at {first}")


@pytest.mark.parametrize("head_count", [31, 32, 33, 48, 64])
def test_many_heads_may_share_one_key_head(head_count: int) -> None:
    facts = facts_of(
        layer_count=1, head_count=head_count, kv_head_count=1, head_size=8, rotary=Rotary("halves", 10_000.0, 8)
    )
    checkpoint = random_checkpoint(facts, "F32")
    tokens = tokens_of(facts, 5)
    decoder = ReferenceDecoder(checkpoint, LayerRange(0, 1))
    hidden = decoder.forward(decoder.embed(tokens))
    assert_same_trace(straight_of(checkpoint, tokens), Trace(hidden, decoder.logits(hidden)))


# ---------------------------------------------------------------- one sequence, cut in every way


@pytest.mark.parametrize(("family", "mix"), SMALL_SELECTION)
@pytest.mark.parametrize("processor", RUNNABLE)
def test_every_processor_gives_the_same_bits(family: str, mix: str, processor: str) -> None:
    tokens = tokens_of(model(family, mix).facts, 100)
    with opened(pipeline_of(model(family, mix), processor=processor)) as pipeline:
        got = pipeline.run(tokens, [67, 1, 2, 3, 1, 26])
    assert_same_trace(got, straight(family, mix, tuple(tokens)), processor)


CUT = FAMILIES if IS_LONG else ("llama", "qwen3", "gemma3", "phi3")  # tests/parity cuts all families


@pytest.mark.parametrize(("family", "mix"), [*((family, "Q4_1") for family in CUT), ("gemma2", "F32")])
def test_every_cut_into_shards_gives_the_same_bits(family: str, mix: str) -> None:
    checkpoint = model(family, mix)
    tokens = tokens_of(checkpoint.facts, 90)
    layers = range(1, checkpoint.facts.layer_count)
    for count in range(1, len(layers) + 1):
        for cuts in combinations(layers, count):
            with opened(pipeline_of(checkpoint, cuts)) as pipeline:
                got = pipeline.run(tokens, [30, 1, 59])
            assert_same_trace(got, straight(family, mix, tuple(tokens)), f"cut before {cuts}")


@pytest.mark.parametrize(("family", "mix"), SMALL_SELECTION)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_chunks_threads_and_rows_change_no_bit(family: str, mix: str, threads: int) -> None:
    checkpoint = model(family, mix)
    tokens = tokens_of(checkpoint.facts, 150)
    chosen = random.Random(threads)
    for max_rows in (None, 7, 1) if threads == 1 else (None, 7):
        with opened(pipeline_of(checkpoint, threads=threads, max_rows=max_rows)) as pipeline:
            for chunks in ([150], random_chunks(chosen, 150)):
                what = f"{threads} threads, {max_rows} rows, chunks {chunks}"
                assert_same_trace(pipeline.run(tokens, chunks), straight(family, mix, tuple(tokens)), what)


def test_layers_of_a_wider_shard_equal_a_shard_of_their_own() -> None:
    """A session may use only some of the layers that a shard holds."""
    checkpoint = model("gemma2", "Q4_1")
    tokens = tokens_of(checkpoint.facts, 90)
    wanted = straight("gemma2", "Q4_1", tuple(tokens))
    wide = shard_of(checkpoint)
    for cuts in ((1,), (2,), (1, 2)):
        edges = [0, *cuts, 3]
        parts = [LayerRange(a, b) for a, b in pairwise(edges)]
        sessions = [wide.open(90, part) for part in parts]
        for first, last in ((0, 50), (50, 51), (51, 90)):
            hidden = None
            for part, session in zip(parts, sessions, strict=True):
                given = tokens[first:last] if part.start == 0 else None
                places = range(last - first) if part.stop == 3 else ()
                [result] = wide.forward([Step(session, first, tokens=given, hidden=hidden, logits=places)])
                hidden = result.hidden
            assert_same_trace(
                Trace(result.hidden, result.logits), Trace(wanted.hidden[first:last], wanted.logits[first:last])
            )
    wide.close()


def test_an_embedding_and_an_output_of_their_own_change_no_bit() -> None:
    checkpoint = model("gemma3", "mixed")
    tokens = tokens_of(checkpoint.facts, 70)
    wanted = straight("gemma3", "mixed", tuple(tokens))
    first = CpuEngine(checkpoint, EngineSettings(layers=None, has_output=False))
    middle = shard_of(checkpoint, has_embedding=False, has_output=False)
    last = CpuEngine(checkpoint, EngineSettings(layers=None, has_embedding=False))
    [embedded] = first.forward([Step(first.open(70), 0, tokens=tokens)])
    [through] = middle.forward([Step(middle.open(70), 0, hidden=embedded.hidden)])
    [result] = last.forward([Step(last.open(70), 0, hidden=through.hidden, logits=range(70))])
    assert_same_bits(through.hidden, wanted.hidden)
    assert_same_bits(result.logits, wanted.logits)
    assert (first.kv.used_bytes, last.kv.used_bytes) == (0, 0)
    for engine in (first, middle, last):
        engine.close()


def to_half_and_back(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_lossy_boundary_rounds_the_same_inside_a_shard_as_between_two(threads: int) -> None:
    checkpoint = model("llama", "Q4_1")
    tokens = tokens_of(checkpoint.facts, 80)
    engines = [shard_of(checkpoint, a, b, threads=threads) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2))]
    one, two, three, whole, front = engines
    sessions = {engine: engine.open(80) for engine in engines}
    roundings = [Rounding(1, to_half_and_back), Rounding(2, to_half_and_back)]
    for first, last in ((0, 66), (66, 67), (67, 80)):
        places = range(last - first)
        [a] = one.forward([Step(sessions[one], first, tokens=tokens[first:last])])
        [b] = two.forward([Step(sessions[two], first, hidden=to_half_and_back(a.hidden))])
        [c] = three.forward([Step(sessions[three], first, hidden=to_half_and_back(b.hidden), logits=places)])
        [inside] = whole.forward([Step(sessions[whole], first, tokens=tokens[first:last], logits=places)], roundings)
        assert_same_trace(Trace(inside.hidden, inside.logits), Trace(c.hidden, c.logits))
        [part] = front.forward([Step(sessions[front], first, tokens=tokens[first:last])], roundings)
        assert_same_bits(part.hidden, b.hidden, "the last boundary is the link's own")
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_lossy_boundaries_at_both_ends_round_as_links_to_the_ends_would(threads: int) -> None:
    checkpoint = model("gemma", "mixed")
    tokens = tokens_of(checkpoint.facts, 40)
    first = CpuEngine(checkpoint, EngineSettings(layers=None, has_output=False))
    middle = shard_of(checkpoint, has_embedding=False, has_output=False, threads=threads)
    last = CpuEngine(checkpoint, EngineSettings(layers=None, has_embedding=False))
    whole = shard_of(checkpoint, threads=threads)
    [embedded] = first.forward([Step(first.open(40), 0, tokens=tokens)])
    [through] = middle.forward([Step(middle.open(40), 0, hidden=to_half_and_back(embedded.hidden))])
    [wanted] = last.forward([Step(last.open(40), 0, hidden=to_half_and_back(through.hidden), logits=range(40))])
    roundings = [Rounding(0, to_half_and_back), Rounding(3, to_half_and_back)]
    [got] = whole.forward([Step(whole.open(40), 0, tokens=tokens, logits=range(40))], roundings)
    assert_same_bits(got.logits, wanted.logits)
    for engine in (first, middle, last, whole):
        engine.close()


# ---------------------------------------------------------------- many sessions with random histories


class Household:
    """Sessions with random lives on one pipeline. After every batch each token's bits must be those of a straight run."""

    def __init__(self, family: str, mix: str, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.name = (family, mix)
        checkpoint = model(family, mix)
        self.facts = checkpoint.facts
        inner = range(1, self.facts.layer_count)
        cuts = sorted(self.chosen.sample(inner, self.chosen.randint(0, min(2, len(inner)))))
        self.settings = {
            "threads": self.chosen.randint(1, 3),
            "max_rows": self.chosen.choice([None, 3, 16, 40]),
            "processor": self.chosen.choice(RUNNABLE),
        }
        self.pipeline = pipeline_of(checkpoint, cuts, **self.settings)
        self.what = f"{family} {mix} seed {seed}: cut before {cuts}, {self.settings}"
        self.sessions: dict[tuple[int, ...], list[int]] = {}

    def live(self, batches: int) -> None:
        for _ in range(batches):
            for _ in range(self.chosen.randint(0, 3)):
                self.chosen.choice([self.open, self.fork, self.truncate, self.close])()
            self.forward()
        self.check_kv()

    def open(self) -> None:
        if len(self.sessions) < 6:
            self.sessions[self.pipeline.open(300)] = []

    def fork(self) -> None:
        if self.sessions and len(self.sessions) < 6:
            parent = self.chosen.choice(list(self.sessions))
            self.sessions[self.pipeline.fork(parent, 300)] = list(self.sessions[parent])

    def truncate(self) -> None:
        """Rejected drafts, above all: a few of the newest tokens; sometimes nearly everything."""
        if self.sessions:
            session = self.chosen.choice(list(self.sessions))
            tokens = self.sessions[session]
            length = max(0, len(tokens) - self.chosen.choice([0, 1, 2, 3, 5, 70, 300]))
            self.pipeline.truncate(session, length)
            del tokens[length:]

    def close(self) -> None:
        if len(self.sessions) > 1:
            session = self.chosen.choice(list(self.sessions))
            self.pipeline.close_session(session)
            del self.sessions[session]

    def forward(self) -> None:
        able = [session for session, tokens in self.sessions.items() if len(tokens) < 200]
        picked = self.chosen.sample(able, self.chosen.randint(1, len(able))) if able else []
        if not picked:
            return self.open()
        added = [self.new_tokens() for _ in picked]
        traces = self.pipeline.forward(list(zip(picked, added, strict=True)))
        for session, new, trace in zip(picked, added, traces, strict=True):
            tokens = self.sessions[session]
            tokens += new
            wanted = straight(*self.name, tuple(tokens))
            assert_same_trace(trace, Trace(wanted.hidden[-len(new) :], wanted.logits[-len(new) :]), self.what)

    def new_tokens(self) -> list[int]:
        count = self.chosen.choice([1, 1, 1, 2, 4, 9, 33, 70])
        return [self.chosen.randrange(self.facts.vocabulary_size) for _ in range(count)]

    def check_kv(self) -> None:
        [whole] = whole_model(*self.name).engines
        for session, tokens in self.sessions.items():
            if not tokens:
                continue
            fresh = whole.open(len(tokens))
            whole.forward([Step(fresh, 0, tokens=tokens)])
            for engine, part in zip(self.pipeline.engines, session, strict=True):
                layers = engine.settings.layers
                for got, wanted in zip(engine.export_kv(part, layers), whole.export_kv(fresh, layers), strict=True):
                    assert_same_bits(got, wanted, self.what)
            whole.close_session(fresh)

    def end(self) -> None:
        for session in list(self.sessions):
            self.pipeline.close_session(session)
        assert all(engine.kv.used_bytes == engine.kv.reserved_bytes == 0 for engine in self.pipeline.engines)
        self.pipeline.close()


@pytest.mark.parametrize("seed", range(300 if IS_LONG else 12))
def test_random_histories_give_the_bits_of_straight_runs(seed: int) -> None:
    wide = seed % 6 == 5  # large, for the sake of K-quants
    family, mix = random.Random(seed).choice(MODELS[-2:] if wide else MODELS[:-2])
    household = Household(family, mix, seed)
    household.live(batches=8)
    household.end()
    straight.cache_clear()


# ---------------------------------------------------------------- forks, drafts, hand-over: the promises one by one


def test_a_rejected_draft_leaves_no_trace() -> None:
    tokens = tokens_of(model("llama", "Q4_1").facts, 70)
    with opened(pipeline_of(model("llama", "Q4_1"))) as pipeline:
        session = pipeline.open(100)
        pipeline.forward([(session, tokens[:62])])
        for draft in ([1, 2, 3, 4, 5], [9], [50, 51, 52]):
            pipeline.forward([(session, draft)])
            pipeline.truncate(session, 62)
        [got] = pipeline.forward([(session, tokens[62:])])
    wanted = straight("llama", "Q4_1", tuple(tokens))
    assert_same_trace(got, Trace(wanted.hidden[62:], wanted.logits[62:]))


def test_forks_diverge_and_leave_their_parent_alone() -> None:
    prompt = tokens_of(model("llama", "F32").facts, 75)
    with opened(pipeline_of(model("llama", "F32"))) as pipeline:
        parent = pipeline.open(100)
        pipeline.forward([(parent, prompt)])
        children = [pipeline.fork(parent, 100) for _ in range(3)]
        assert pipeline.engines[0].kv.used_bytes == 2 * pipeline.engines[0].kv.shape.page_bytes(3)
        tails = {session: [7 * i + 1, i, 3] for i, session in enumerate([*children, parent])}
        for place in range(3):
            batch = [(session, [tail[place]]) for session, tail in tails.items()]
            for (_, tail), got in zip(tails.items(), pipeline.forward(batch), strict=True):
                wanted = straight("llama", "F32", (*prompt, *tail[: place + 1]))
                assert_same_trace(got, Trace(wanted.hidden[-1:], wanted.logits[-1:]))


@pytest.mark.parametrize(("family", "mix"), [("llama", "Q4_1"), ("gemma3", "F32"), ("qwen3", "mixed")])
def test_keys_and_values_move_to_an_engine_with_other_layers(family: str, mix: str) -> None:
    """A leaving shard of layers 0-1 hands layer 1 to a successor that holds 1-2, which gets layer 2 from another."""
    checkpoint = model(family, mix)
    tokens = tokens_of(checkpoint.facts, 130)
    wanted = straight(family, mix, tuple(tokens))
    with opened(pipeline_of(checkpoint, (2,))) as before, opened(pipeline_of(checkpoint, (1,), threads=2)) as after:
        old, new = before.open(130), after.open(130)
        before.forward([(old, tokens[:100])])
        for layer in range(3):
            giver = 0 if layer < 2 else 1
            taker = 0 if layer < 1 else 1
            layers = LayerRange(layer, layer + 1)
            keys, values = before.engines[giver].export_kv(old[giver], layers)
            after.engines[taker].import_kv(new[taker], layers, keys, values)
        [got] = after.forward([(new, tokens[100:])])
        assert_same_trace(got, Trace(wanted.hidden[100:], wanted.logits[100:]))


# ---------------------------------------------------------------- extremes


@pytest.mark.parametrize("mix", ["F32", "Q4_1"])
def test_activations_at_the_limits_equal_the_reference(mix: str) -> None:
    """Hidden states that are huge, tiny, infinite or not numbers: the same bits, and no harm to the others of the batch."""
    checkpoint = model("llama", mix)
    rng = np.random.default_rng(1)
    plain = rng.standard_normal((6, 64)).astype(np.float32)
    with np.errstate(all="ignore"):
        cases = [plain * np.float32(scale) for scale in (1e-44, 1e-30, 1e4, 1e18, 1e30, 3e38)]
        for bad in (np.nan, np.inf, -np.inf):
            rows = plain.copy()
            rows[2, 5] = bad
            cases.append(rows)
    engine = shard_of(checkpoint, has_embedding=False)
    for number, rows in enumerate(cases):
        decoder = ReferenceDecoder(checkpoint, LayerRange(0, 3))
        good = ReferenceDecoder(checkpoint, LayerRange(0, 3))
        with np.errstate(all="ignore"):
            wanted, beside = decoder.forward(rows), good.forward(plain)
        sessions = [engine.open(6), engine.open(6)]
        results = engine.forward([Step(sessions[0], 0, hidden=rows), Step(sessions[1], 0, hidden=plain)])
        assert_same_bits(results[0].hidden, wanted, f"case {number}")
        assert_same_bits(results[1].hidden, beside, f"beside case {number}")
    engine.close()


def test_flags_that_another_library_set_change_no_bit() -> None:
    """Libraries built with -ffast-math switch subnormals off for the thread that loads them."""
    import torch

    engine = shard_of(model("llama", "Q4_1"), has_embedding=False)
    tiny = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32) * np.float32(1e-39)
    [wanted] = engine.forward([Step(engine.open(4), 0, hidden=tiny)])
    torch.set_flush_denormal(True)
    try:
        [got] = engine.forward([Step(engine.open(4), 0, hidden=tiny)])
    finally:
        torch.set_flush_denormal(False)
    engine.close()
    assert_same_bits(got.hidden, wanted.hidden)


def test_keys_and_values_beyond_a_half_are_clamped_as_the_reference_clamps_them() -> None:
    checkpoint = random_checkpoint(facts_of(layer_count=1, has_attention_bias=True), "F16")
    for name, size in (("key_bias", 32), ("value_bias", 32)):
        values = np.linspace(-2e5, 2e5, size).astype(np.float32)
        checkpoint.put(f"layers.0.{name}", "F32", (size,), values.view(np.uint8))
    decoder = ReferenceDecoder(checkpoint, LayerRange(0, 1))
    tokens = tokens_of(checkpoint.facts, 9)
    hidden = decoder.forward(decoder.embed(tokens))
    for processor in RUNNABLE:
        engine = shard_of(checkpoint, processor=processor)
        session = engine.open(9)
        [result] = engine.forward([Step(session, 0, tokens=tokens)])
        keys, values = engine.export_kv(session, LayerRange(0, 1))
        assert np.abs(values.astype(np.float32)).max() == 65504
        assert_same_bits(keys[0], decoder.keys[0], processor)
        assert_same_bits(values[0], decoder.values[0], processor)
        assert_same_bits(result.hidden, hidden, processor)
        engine.close()
