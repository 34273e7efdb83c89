"""What every engine refuses, with which error, and that a refusal changes nothing: on the CPU, and by the torch back end there."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

import numpy as np
import pytest

from potluck.core.errors import BadRequest, ContextLengthExceeded, OutOfKvMemory, PotluckError, UnknownArchitecture
from potluck.core.layers import LayerRange
from potluck.engine import decoder
from potluck.engine.cpu_engine import CpuEngine
from potluck.engine.shard_engine import EngineSettings, ShardEngine, Step
from tests.support.memory_checkpoint import MemoryCheckpoint, random_checkpoint
from tests.support.pipelines import shard_of
from tests.support.random_models import MIXES, facts_of
from tests.support.same_bits import assert_same_bits

FACTS = facts_of(context_length=200, vocabulary_size=50)


@cache
def checkpoint() -> MemoryCheckpoint:
    return random_checkpoint(FACTS, MIXES["Q4_1"])


def rows(count: int, width: int = 64) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, width)).astype(np.float32)


@cache
def kept_engine(start: int, stop: int, device: str) -> ShardEngine:
    return shard_of(checkpoint(), start, stop, device=device, kv_budget_bytes=64 << 20)


@pytest.fixture(params=["cpu", "cuda:torch-cpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[ShardEngine]:
    yield kept_engine(0, 3, request.param)
    close_sessions(kept_engine(0, 3, request.param))


@pytest.fixture(params=["cpu", "cuda:torch-cpu"])
def middle(request: pytest.FixtureRequest) -> Iterator[ShardEngine]:
    """A shard with neither end of the model."""
    yield kept_engine(1, 2, request.param)
    close_sessions(kept_engine(1, 2, request.param))


def close_sessions(engine: ShardEngine) -> None:
    """Whatever a test left open; the next one starts with nothing reserved."""
    for session in list(engine._sessions):
        engine.close_session(session)
    assert (engine.kv.used_bytes, engine.kv.reserved_bytes) == (0, 0)


def assert_as_exact_as_promised(engine: ShardEngine, left: np.ndarray | None, right: np.ndarray | None) -> None:
    assert left is not None
    assert right is not None
    if engine.exactness == "bitwise":
        assert_same_bits(left, right)
    else:
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def state_of(engine: ShardEngine, *sessions: int) -> tuple[object, ...]:
    kv = [part for session in sessions for part in engine.export_kv(session, engine.settings.layers)]
    lengths = [engine.length(session) for session in sessions]
    return lengths, engine.kv.used_bytes, engine.kv.reserved_bytes, [array.tobytes() for array in kv]


def assert_refused(engine: ShardEngine, error: type[PotluckError], act: Callable[[], object], *sessions: int) -> None:
    before = state_of(engine, *sessions)
    with pytest.raises(error):
        act()
    assert state_of(engine, *sessions) == before


BAD_STEPS: dict[str, tuple[type[PotluckError], dict[str, object]]] = {
    "position behind": (BadRequest, {"position": 4, "tokens": [1]}),
    "position ahead": (BadRequest, {"position": 6, "tokens": [1]}),
    "position below zero": (BadRequest, {"position": -1, "tokens": [1]}),
    "no tokens": (BadRequest, {"tokens": []}),
    "neither tokens nor hidden states": (BadRequest, {}),
    "both tokens and hidden states": (BadRequest, {"tokens": [1], "hidden": rows(1)}),
    "a token past the vocabulary": (BadRequest, {"tokens": [3, 50]}),
    "a token below zero": (BadRequest, {"tokens": [3, -1]}),
    "a huge token": (BadRequest, {"tokens": [1 << 70]}),
    "no hidden states": (BadRequest, {"hidden": rows(0)}),
    "narrow hidden states": (BadRequest, {"hidden": rows(2, 63)}),
    "wide hidden states": (BadRequest, {"hidden": rows(2, 65)}),
    "hidden states without rows": (BadRequest, {"hidden": rows(1)[0]}),
    "hidden states in a stack": (BadRequest, {"hidden": rows(2)[None]}),
    "double hidden states": (BadRequest, {"hidden": rows(2).astype(np.float64)}),
    "half hidden states": (BadRequest, {"hidden": rows(2).astype(np.float16)}),
    "hidden states of the other byte order": (BadRequest, {"hidden": rows(2).astype(">f4")}),
    "logits past the step": (BadRequest, {"tokens": [1, 2], "logits": [2]}),
    "logits before the step": (BadRequest, {"tokens": [1, 2], "logits": [-1]}),
    "more positions than reserved": (OutOfKvMemory, {"tokens": [1] * 124}),
    "more positions than the context": (ContextLengthExceeded, {"tokens": [1] * 196}),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_bad_step_is_refused_and_changes_nothing(engine: ShardEngine, case: str) -> None:
    error, changes = BAD_STEPS[case]
    session, other = engine.open(128), engine.open(10)
    tokens = [5, 6, 7, 8, 9]
    [first] = engine.forward([Step(session, 0, tokens=tokens, logits=[4])])
    bad = Step(**{"session": session, "position": 5, **changes})  # type: ignore[arg-type]
    assert_refused(engine, error, lambda: engine.forward([bad]), session, other)
    engine.truncate(session, 4)
    [again] = engine.forward([Step(session, 4, tokens=[9], logits=[0])])
    assert_as_exact_as_promised(engine, again.logits, first.logits)


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_bad_step_takes_the_whole_batch_with_it(engine: ShardEngine, case: str) -> None:
    """Every step is checked before any is run, so the good one beside it is not run either."""
    error, changes = BAD_STEPS[case]
    session, good = engine.open(128), engine.open(128)
    engine.forward([Step(session, 0, tokens=[5, 6, 7, 8, 9])])
    steps = [Step(good, 0, tokens=[1, 2]), Step(**{"session": session, "position": 5, **changes})]  # type: ignore[arg-type]
    assert_refused(engine, error, lambda: engine.forward(steps), session, good)


def test_a_batch_needs_steps_of_different_sessions(engine: ShardEngine) -> None:
    session = engine.open(10)
    assert_refused(engine, BadRequest, lambda: engine.forward([]), session)
    twice = [Step(session, 0, tokens=[1]), Step(session, 0, tokens=[2])]
    assert_refused(engine, BadRequest, lambda: engine.forward(twice), session)
    in_a_row = [Step(session, 0, tokens=[1]), Step(session, 1, tokens=[2])]
    assert_refused(engine, BadRequest, lambda: engine.forward(in_a_row), session)


def test_unknown_and_closed_sessions_are_refused(engine: ShardEngine) -> None:
    kept, closed = engine.open(10), engine.open(10)
    engine.close_session(closed)
    layers = LayerRange(0, 3)
    keys, values = engine.export_kv(kept, layers)
    for session in (closed, 0, -1, 10**9):
        acts: list[Callable[[], object]] = [
            lambda s=session: engine.forward([Step(s, 0, tokens=[1])]),
            lambda s=session: engine.forward([Step(kept, 0, tokens=[1]), Step(s, 0, tokens=[1])]),
            lambda s=session: engine.truncate(s, 0),
            lambda s=session: engine.fork(s, 10),
            lambda s=session: engine.close_session(s),
            lambda s=session: engine.length(s),
            lambda s=session: engine.export_kv(s, layers),
            lambda s=session: engine.import_kv(s, layers, keys, values),
        ]
        for act in acts:
            assert_refused(engine, BadRequest, act, kept)


def test_session_numbers_are_never_used_again(engine: ShardEngine) -> None:
    first = engine.open(10)
    engine.close_session(first)
    assert engine.open(10) != first


def test_a_shard_without_an_embedding_takes_hidden_states_only(middle: ShardEngine) -> None:
    session = middle.open(10)
    assert_refused(middle, BadRequest, lambda: middle.forward([Step(session, 0, tokens=[1])]), session)
    [result] = middle.forward([Step(session, 0, hidden=rows(3))])
    assert result.hidden.shape == (3, 64)
    assert result.logits is None


def test_a_shard_without_the_output_gives_no_logits(middle: ShardEngine) -> None:
    session = middle.open(10)
    step = Step(session, 0, hidden=rows(2), logits=[1])
    assert_refused(middle, BadRequest, lambda: middle.forward([step]), session)


def test_a_session_that_ends_before_the_last_layer_gives_no_logits(engine: ShardEngine) -> None:
    front, back = engine.open(10, LayerRange(0, 2)), engine.open(10, LayerRange(2, 3))
    with pytest.raises(BadRequest):
        engine.forward([Step(front, 0, tokens=[1], logits=[0])])
    with pytest.raises(BadRequest):
        engine.forward([Step(back, 0, tokens=[1])])
    with pytest.raises(BadRequest, match="same layers"):
        engine.forward([Step(front, 0, tokens=[1]), Step(back, 0, hidden=rows(1))])
    assert (engine.length(front), engine.length(back), engine.kv.used_bytes) == (0, 0, 0)


def test_logits_come_in_the_order_asked_for(engine: ShardEngine) -> None:
    session = engine.open(10)
    [result] = engine.forward([Step(session, 0, tokens=[1, 2, 3], logits=[2, 0, 2, 1])])
    engine.truncate(session, 0)
    [straight] = engine.forward([Step(session, 0, tokens=[1, 2, 3], logits=[0, 1, 2])])
    assert_as_exact_as_promised(engine, result.logits, straight.logits[[2, 0, 2, 1]])


def test_results_are_the_callers_own(engine: ShardEngine) -> None:
    session = engine.open(10)
    [first] = engine.forward([Step(session, 0, tokens=[1, 2], logits=[1])])
    kept = first.hidden.copy(), first.logits.copy()
    [second] = engine.forward([Step(session, 2, tokens=[3, 4], logits=[1])])
    assert_same_bits(first.hidden, kept[0])
    assert_same_bits(first.logits, kept[1])
    second.hidden[:] = 0
    given = rows(2)
    before = given.copy()
    back = shard_of(checkpoint(), 1, 3)
    [result] = back.forward([Step(back.open(10), 0, hidden=given)])
    result.hidden[:] = 0
    assert_same_bits(given, before)
    back.close()


def test_hidden_states_may_lie_in_any_order_in_memory(middle: ShardEngine) -> None:
    given = rows(6)
    spread = np.zeros((12, 128), np.float32)
    spread[::2, ::2] = given
    wanted = middle.forward([Step(middle.open(10), 0, hidden=given)])[0].hidden
    for other in (np.asfortranarray(given), spread[::2, ::2]):
        assert_same_bits(middle.forward([Step(middle.open(10), 0, hidden=other)])[0].hidden, wanted)


# ---------------------------------------------------------------- opening


def test_sessions_that_cannot_be_are_refused(engine: ShardEngine) -> None:
    for positions, error in ((0, BadRequest), (-5, BadRequest), (201, ContextLengthExceeded), (10**15, BadRequest)):
        with pytest.raises(error):
            engine.open(positions)
    with pytest.raises(BadRequest):
        engine.open(10, LayerRange(2, 4))
    assert engine.kv.reserved_bytes == 0


def test_a_fork_cannot_be_longer_than_the_context(engine: ShardEngine) -> None:
    session = engine.open(10)
    assert_refused(engine, ContextLengthExceeded, lambda: engine.fork(session, 201), session)


def test_the_budget_is_kept_by_open_and_fork(engine: ShardEngine) -> None:
    page = engine.kv.shape.page_bytes(3)
    small = shard_of(checkpoint(), kv_budget_bytes=3 * page, device=engine.settings.device)
    session = small.open(128)
    small.forward([Step(session, 0, tokens=[1, 2, 3])])
    assert_refused(small, OutOfKvMemory, lambda: small.open(65), session)
    assert_refused(small, OutOfKvMemory, lambda: small.fork(session, 65), session)
    small.fork(session, 64)
    small.close()


@pytest.mark.parametrize("layers", [LayerRange(0, 4), LayerRange(3, 4), LayerRange(100, 200)])
def test_layers_past_the_last_one_are_refused(layers: LayerRange) -> None:
    with pytest.raises(BadRequest):
        CpuEngine(checkpoint(), EngineSettings(layers=layers))


def test_layers_of_other_shards_are_neither_exported_nor_imported(middle: ShardEngine) -> None:
    session = middle.open(10)
    middle.forward([Step(session, 0, hidden=rows(3))])
    keys, values = middle.export_kv(session, LayerRange(1, 2))
    assert keys.shape == (1, 3, 2, 16)
    for layers in (LayerRange(0, 1), LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 3)):
        assert_refused(middle, BadRequest, lambda part=layers: middle.export_kv(session, part), session)
        assert_refused(middle, BadRequest, lambda part=layers: middle.import_kv(session, part, keys, values), session)


def test_a_model_with_feed_forward_biases_is_refused_by_name() -> None:
    facts = facts_of(has_feed_forward_bias=True)
    with pytest.raises(UnknownArchitecture, match="feed-forward"):
        CpuEngine(random_checkpoint(facts), EngineSettings(layers=LayerRange(0, 3)))


def test_an_engine_prints_its_state_in_one_line(engine: ShardEngine) -> None:
    engine.open(10)
    assert repr(engine).count("\n") == 0
    assert "1 sessions" in repr(engine)


# ---------------------------------------------------------------- logits of rows that were computed before


def test_rows_are_projected_as_a_step_that_asks_for_logits_does_it(engine: ShardEngine) -> None:
    session, again = engine.open(40), engine.open(40)
    tokens = list(range(1, 31))
    [asked] = engine.forward([Step(session, 0, tokens=tokens, logits=range(30))])
    [plain] = engine.forward([Step(again, 0, tokens=tokens)])
    assert asked.logits is not None
    for first in range(0, 30, 7):
        projected = engine.project(again, plain.hidden[first : first + 7])
        assert_as_exact_as_promised(engine, projected, asked.logits[first : first + 7])


def test_rows_that_cannot_be_projected_are_refused(engine: CpuEngine, middle: CpuEngine) -> None:
    session = engine.open(4)
    with pytest.raises(BadRequest, match="at most"):
        engine.project(session, rows(engine.output_rows + 1))
    with pytest.raises(BadRequest, match="at most"):
        engine.project(session, rows(0))
    with pytest.raises(BadRequest, match="does not own the output"):
        middle.project(middle.open(4), rows(1))
    with pytest.raises(BadRequest, match="does not own the output"):
        engine.project(engine.open(4, LayerRange(0, 2)), rows(1))


def decoded(engine: ShardEngine, session: int, tokens: list[int], *, is_expected: bool) -> list[np.ndarray]:
    """Logits and hidden rows of tokens that come one by one."""
    found = []
    for token in tokens:
        if is_expected:
            engine.expect(session)
        [result] = engine.forward([Step(session, engine.length(session), tokens=[token], logits=[0])])
        assert result.logits is not None
        found += [result.logits.copy(), result.hidden.copy()]
    return found


def test_a_token_that_was_expected_gives_what_any_other_gives(engine: ShardEngine) -> None:
    """Over the edge of a page, and to the end of what was reserved, where nothing more can be expected."""
    plain, expected = engine.open(80), engine.open(80)
    for session in (plain, expected):
        engine.forward([Step(session, 0, tokens=[3] * 60)])
    tokens = [5 + i for i in range(20)]
    pairs = zip(
        decoded(engine, plain, tokens, is_expected=False),
        decoded(engine, expected, tokens, is_expected=True),
        strict=True,
    )
    for left, right in pairs:
        assert_as_exact_as_promised(engine, left, right)
    engine.expect(expected)
    assert engine.length(expected) == 80


def test_what_was_expected_is_forgotten_when_something_else_comes(engine: ShardEngine) -> None:
    """Whatever happens between `expect` and the step: the step gives what it gives without."""
    session, other = engine.open(128), engine.open(128)
    tokens = [7] * 64
    engine.forward([Step(session, 0, tokens=tokens), Step(other, 0, tokens=tokens)])
    [wanted] = decoded(engine, other, [9], is_expected=False)[:1]
    engine.truncate(other, 64)
    happenings: list[Callable[[], object]] = [
        lambda: engine.truncate(session, 64),  # drops the page that was made ready
        lambda: engine.close_session(engine.fork(session, 100)),
        lambda: engine.forward([Step(other, 64, tokens=[1])]),
        lambda: engine.truncate(other, 64),
        lambda: engine.project(session, rows(1)),
        lambda: engine.expect(other),
    ]
    for happen in happenings:
        engine.expect(session)
        happen()
        [got] = engine.forward([Step(session, 64, tokens=[9], logits=[0])])
        assert_as_exact_as_promised(engine, got.logits, wanted)
        engine.truncate(session, 64)


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_bad_step_is_refused_where_a_good_one_was_expected(engine: ShardEngine, case: str) -> None:
    error, changes = BAD_STEPS[case]
    session = engine.open(128)
    engine.forward([Step(session, 0, tokens=[5, 6, 7, 8, 9])])
    engine.expect(session)
    bad = Step(**{"session": session, "position": 5, **changes})  # type: ignore[arg-type]
    assert_refused(engine, error, lambda: engine.forward([bad]), session)


def test_the_likeliest_token_is_that_of_the_logits(engine: ShardEngine) -> None:
    session = engine.open(20)
    [result] = engine.forward([Step(session, 0, tokens=[5], logits=[0])])
    engine.truncate(session, 0)
    [greedy] = engine.forward([Step(session, 0, tokens=[5], logits=(0,), is_greedy=True)])
    assert result.logits is not None
    assert greedy.likeliest == (int(result.logits[0].argmax()),)


def test_the_likeliest_of_logits_that_are_no_numbers_is_none(middle: ShardEngine) -> None:
    last = kept_engine(2, 3, middle.settings.device)
    session = last.open(4)
    [greedy] = last.forward([Step(session, 0, hidden=rows(1) * np.float32(np.nan), logits=(0,), is_greedy=True)])
    assert greedy.likeliest == (-1,)
    close_sessions(last)


def test_programs_of_ever_other_ranges_are_not_kept_for_ever_and_come_out_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranges = [LayerRange(0, 1), LayerRange(0, 2), LayerRange(0, 3)]

    def outputs(engine: ShardEngine) -> list[np.ndarray]:
        sessions = [engine.open(40, layers) for layers in ranges]
        found = []
        for position in range(12):
            for session in sessions:
                if position % 3:
                    engine.expect(session)
                [result] = engine.forward([Step(session, position, tokens=[3 + position])])
                found.append(result.hidden.copy())
        return found

    wanted = outputs(shard_of(checkpoint(), 0, 3))
    monkeypatch.setattr(decoder, "MOST_PROGRAMS", 1)
    engine = cast(CpuEngine, shard_of(checkpoint(), 0, 3))
    for left, right in zip(outputs(engine), wanted, strict=True):
        assert_same_bits(left, right)
    assert len(engine._decoder._programs) <= 3
    assert len(engine._decoder._attention_arguments) <= 3 * 3
