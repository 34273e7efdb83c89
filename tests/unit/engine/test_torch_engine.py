"""The torch back end on the CPU: the same answers as the CPU engine's within rounding, whole, cut, in batches, forked and moved."""

from functools import cache

import msgspec
import numpy as np
import pytest

from potluck.core.errors import BadRequest, DeviceUnavailable
from potluck.core.exactness import arithmetic_of, exactness_of
from potluck.core.layers import LayerRange
from potluck.engine.factory import build_engine
from potluck.engine.formats import dequantise_rows
from potluck.engine.shard_engine import EngineSettings, Rounding, ShardEngine, Step
from tests.support.memory_checkpoint import MemoryCheckpoint, matrix_checkpoint, random_checkpoint
from tests.support.pipelines import pipeline_of, shard_of
from tests.support.random_models import FAMILIES, MIXES, WIDE, WIDE_MIXES
from tests.support.random_weights import QUANTISED_FORMATS, random_weights
from tests.support.same_bits import assert_same_bits

torch = pytest.importorskip("torch", reason="torch is not installed: the torch back end is NOT tested")
matrices = pytest.importorskip("potluck.engine.cuda.matrices")
TORCH = "cuda:torch-cpu"
TOKENS = np.random.default_rng(3).integers(3, 100, 90).tolist()
# The CPU's kernels quantise rows for quantised matrices; torch does not.
LIMITS = {"F32": 1e-5, "mixed": 0.1, "Q4_K": 0.05, "Q5_K": 0.05}
CASES = [(family, "F32") for family in FAMILIES] + [("gemma3", "mixed"), ("wide", "Q4_K"), ("wide", "Q5_K")]


@cache
def checkpoint_of(family: str, mix: str) -> MemoryCheckpoint:
    return (
        random_checkpoint(WIDE, WIDE_MIXES[mix])
        if family == "wide"
        else random_checkpoint(FAMILIES[family], MIXES[mix])
    )


def logits_by(checkpoint: MemoryCheckpoint, device: str, cuts: tuple[int, ...] = ()) -> np.ndarray:
    pipeline = pipeline_of(checkpoint, cuts, device=device, kv_budget_bytes=64 << 20)
    logits = pipeline.run(TOKENS, [40, 1, 47, 1, 1]).logits
    pipeline.close()
    return logits


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(("family", "mix"), CASES)
def test_both_back_ends_give_the_same_logits_within_rounding(family: str, mix: str) -> None:
    checkpoint = checkpoint_of(family, mix)
    assert difference(logits_by(checkpoint, TORCH), logits_by(checkpoint, "cpu")) < LIMITS[mix]


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "phi3"])
def test_a_cut_model_gives_the_logits_of_the_whole(family: str) -> None:
    checkpoint = checkpoint_of(family, "F32")
    assert difference(logits_by(checkpoint, TORCH, (1, 2)), logits_by(checkpoint, TORCH)) < 1e-6


@pytest.mark.parametrize("format_name", QUANTISED_FORMATS)
def test_repacked_blocks_hold_what_the_file_holds(format_name: str) -> None:
    raw = random_weights(np.random.default_rng(7), format_name, 9, 512, 0.2)
    checkpoint = matrix_checkpoint(format_name, raw, 512)
    matrix = matrices.read_matrix(checkpoint, "matrix", torch.device("cpu"))
    wanted = dequantise_rows(raw, format_name, 9)
    np.testing.assert_allclose(matrix.floats().numpy(), wanted, rtol=1e-6, atol=1e-7)
    picked = torch.tensor([4, 0, 8])
    np.testing.assert_array_equal(matrix.take(picked).numpy(), matrix.floats().numpy()[[4, 0, 8]])
    assert matrix.size_bytes < 512 * 9 * 2 * 0.63  # no float copy of it


@pytest.fixture
def engine() -> ShardEngine:
    return shard_of(checkpoint_of("qwen2", "F32"), device=TORCH, kv_budget_bytes=64 << 20)


def test_rows_of_many_sessions_run_together_as_they_would_alone(engine: ShardEngine) -> None:
    alone, together = engine.open(60), [engine.open(60) for _ in range(5)]
    engine.forward([Step(alone, 0, tokens=TOKENS[:30])])
    engine.forward([Step(each, 0, tokens=TOKENS[: 10 * (i + 1)]) for i, each in enumerate(together)])
    [wanted] = engine.forward([Step(alone, 30, tokens=[7], logits=[0])])
    steps = [Step(each, 10 * (i + 1), tokens=[7], logits=[0]) for i, each in enumerate(together)]
    results = engine.forward(steps)
    assert wanted.logits is not None
    assert results[2].logits is not None
    assert difference(results[2].logits, wanted.logits) < 1e-6


def greedy(session: int, position: int, token: int) -> Step:
    return Step(session, position, tokens=(token,), logits=(0,), is_greedy=True, wants_hidden=False)


def decoded(engine: ShardEngine, sessions: list[int], count: int) -> list[list[int]]:
    """Tokens that each session goes on with, all in one batch."""
    tokens = [[7] for _ in sessions]
    for _ in range(count):
        steps = [greedy(each, engine.length(each), said[-1]) for each, said in zip(sessions, tokens, strict=True)]
        for said, result in zip(tokens, engine.forward(steps), strict=True):
            assert result.likeliest is not None
            said.append(result.likeliest[0])
    return tokens


def test_streams_that_get_their_next_pages_together_say_what_they_would_alone(engine: ShardEngine) -> None:
    prompts = [TOKENS[i : i + 60 + i] for i in range(5)]  # all pass position 64
    together, alone = ([engine.open(90) for _ in prompts] for _ in range(2))
    for session, other, prompt in zip(together, alone, prompts, strict=True):
        engine.forward([Step(session, 0, tokens=prompt)])
        engine.forward([Step(other, 0, tokens=prompt)])
    assert decoded(engine, together, 8) == [decoded(engine, [each], 8)[0] for each in alone]


def test_forks_in_one_batch_write_into_pages_of_their_own(engine: ShardEngine) -> None:
    parent = engine.open(60)
    engine.forward([Step(parent, 0, tokens=TOKENS[:20])])
    forks = [engine.fork(parent, 60) for _ in range(2)]
    results = engine.forward([greedy(each, 20, 5 + i) for i, each in enumerate(forks)])
    fresh = engine.open(60)
    engine.forward([Step(fresh, 0, tokens=TOKENS[:20])])
    [wanted] = engine.forward([greedy(fresh, 20, 5)])
    assert results[0].likeliest == wanted.likeliest
    assert decoded(engine, forks[:1], 4) == decoded(engine, [fresh], 4)


@pytest.mark.parametrize(
    "bad", [lambda a, b: greedy(a, 20, 5), lambda a, b: greedy(b, 19, 5), lambda a, b: greedy(b, 20, 10**6)]
)
def test_a_batch_of_single_tokens_with_one_that_cannot_be_changes_nothing(engine: ShardEngine, bad) -> None:
    first, second = (engine.open(60) for _ in range(2))
    for each in (first, second):
        engine.forward([Step(each, 0, tokens=TOKENS[:20])])
    with pytest.raises(BadRequest):
        engine.forward([greedy(first, 20, 5), bad(first, second)])
    assert [engine.length(each) for each in (first, second)] == [20, 20]
    assert decoded(engine, [first], 3) == decoded(engine, [second], 3)


def test_the_likeliest_token_is_that_of_the_logits(engine: ShardEngine) -> None:
    session = engine.open(60)
    step = Step(session, 0, tokens=TOKENS[:20], logits=[19])
    [given] = engine.forward([step])
    engine.truncate(session, 0)
    [chosen] = engine.forward([msgspec.structs.replace(step, is_greedy=True, wants_hidden=False)])
    assert given.logits is not None
    assert chosen.likeliest == (int(given.logits[0].argmax()),)
    assert chosen.logits is None
    assert len(chosen.hidden) == 0


def test_keys_and_values_move_from_one_back_end_to_the_other() -> None:
    checkpoint = checkpoint_of("qwen2", "F32")
    layers = LayerRange(0, checkpoint.facts.layer_count)
    source = shard_of(checkpoint, device="cpu")
    target = shard_of(checkpoint, device=TORCH, kv_budget_bytes=64 << 20)
    first, second = source.open(80), target.open(80)
    source.forward([Step(first, 0, tokens=TOKENS[:70])])
    target.import_kv(second, layers, *source.export_kv(first, layers))
    for kept, sent in zip(target.export_kv(second, layers), source.export_kv(first, layers), strict=True):
        assert_same_bits(kept, sent)
    [wanted] = source.forward([Step(first, 70, tokens=[5], logits=[0])])
    [got] = target.forward([Step(second, 70, tokens=[5], logits=[0])])
    assert wanted.logits is not None
    assert got.logits is not None
    assert difference(got.logits, wanted.logits) < 1e-5


def test_a_fork_shares_its_past_and_not_its_future(engine: ShardEngine) -> None:
    parent = engine.open(100)
    engine.forward([Step(parent, 0, tokens=TOKENS[:70])])
    child = engine.fork(parent, 100)
    engine.forward([Step(parent, 70, tokens=[11])])
    [forked] = engine.forward([Step(child, 70, tokens=[12], logits=[0])])
    fresh = engine.open(100)
    engine.forward([Step(fresh, 0, tokens=TOKENS[:70])])
    [wanted] = engine.forward([Step(fresh, 70, tokens=[12], logits=[0])])
    assert forked.logits is not None
    assert wanted.logits is not None
    assert difference(forked.logits, wanted.logits) < 1e-6


def test_rounding_inside_a_shard_is_what_a_link_there_would_do(engine: ShardEngine) -> None:
    def coarse(rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.float16).astype(np.float32)

    checkpoint = checkpoint_of("qwen2", "F32")
    session = engine.open(40)
    [whole] = engine.forward([Step(session, 0, tokens=TOKENS[:20], logits=[19])], [Rounding(1, coarse)])
    front, back = (shard_of(checkpoint, *part, device=TORCH) for part in ((0, 1), (1, None)))
    [hidden] = front.forward([Step(front.open(40), 0, tokens=TOKENS[:20])])
    [split] = back.forward([Step(back.open(40), 0, hidden=coarse(hidden.hidden), logits=[19])])
    assert whole.logits is not None
    assert split.logits is not None
    assert difference(split.logits, whole.logits) < 1e-6


def test_preparing_leaves_nothing_behind(engine: ShardEngine) -> None:
    session = engine.open(40)
    engine.forward([Step(session, 0, tokens=TOKENS[:20])])
    before = engine.export_kv(session, LayerRange(0, engine.facts.layer_count))
    engine.prepare()
    for kept, was in zip(engine.export_kv(session, LayerRange(0, engine.facts.layer_count)), before, strict=True):
        assert_same_bits(kept, was)


def test_claiming_the_device_changes_no_bit(engine: ShardEngine) -> None:
    sessions = [engine.open(40), engine.open(40)]
    for session in sessions:
        engine.forward([Step(session, 0, tokens=TOKENS[:20])])
    [plain] = engine.forward([Step(sessions[0], 20, tokens=[7], logits=[0])])
    engine.claim_device()
    [claimed] = engine.forward([Step(sessions[1], 20, tokens=[7], logits=[0])])
    assert_same_bits(claimed.hidden, plain.hidden)


def test_a_device_that_is_not_there_is_named() -> None:
    checkpoint = checkpoint_of("qwen2", "F32")
    settings = EngineSettings(layers=LayerRange(0, 1), device="tpu")
    with pytest.raises(BadRequest, match="tpu"):
        build_engine(checkpoint, settings)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceUnavailable):
        build_engine(checkpoint, EngineSettings(layers=LayerRange(0, 1), device="cuda"))


def test_shards_of_different_arithmetic_have_different_numbers() -> None:
    numbers = [arithmetic_of("cpu"), arithmetic_of("cuda:1"), arithmetic_of("cuda", is_batch_invariant=True)]
    assert len(set(numbers)) == 3
    assert [exactness_of({number}) for number in numbers] == ["bitwise", "tolerance", "batch-invariant"]
    assert arithmetic_of("cuda") == arithmetic_of("cuda:3")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: the kernels are NOT tested")
@pytest.mark.parametrize(("family", "mix"), CASES)
def test_kernels_give_the_logits_of_the_plain_form(family: str, mix: str) -> None:
    checkpoint = checkpoint_of(family, mix)
    limit = 1e-4 if mix == "F32" else 0.06
    assert difference(logits_by(checkpoint, "cuda"), logits_by(checkpoint, TORCH)) < limit
