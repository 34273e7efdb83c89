"""What a head remembers of pipelines whose KV was kept: the longest beginning wins, owners are apart, and nothing stays for ever."""

import pytest

from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.frames import Finished
from potluck.orchestrator.generation import Generation, GenerationRequest, GenerationSettings
from potluck.orchestrator.reuse import LEAST_POSITIONS, Kept, KeptPipelines, Resumption, reuse_key
from potluck.planner.cover import Placed
from potluck.wire.effects import SendTo
from potluck.wire.messages import Boundary, Close, Message, Open, Opened, Replay, Result, Rewire, Rewired, Stage, Step

NODE, OTHER, HEAD = b"1" * 32, b"2" * 32, b"H" * 32
STAGES = (Placed(NODE, "node:1", Stage(0, 4, True)), Placed(OTHER, "node:2", Stage(4, 8, False, True)))
SESSIONS = (b"a" * 16, b"b" * 16)
LONG = tuple(range(100))


def request(prompt: tuple[int, ...] = LONG, **changes: object) -> GenerationRequest:
    values: dict[str, object] = {
        "model": "m", "weights_sha256": "a" * 64, "arithmetic": 1, "layer_count": 8, "prompt": prompt, "max_tokens": 8,
        "params": SamplingParams(), "eos": (999,),
    }  # fmt: skip
    return GenerationRequest(**values | changes)  # type: ignore[arg-type]


KEY = reuse_key(request(), "auto")


def kept(tokens: tuple[int, ...], name: bytes = b"a") -> Kept:
    return Kept(tokens, STAGES, (name * 16, b"z" * 16))


def length_of(table: KeptPipelines, prompt: tuple[int, ...], now_s: float = 0.0, key: object = KEY) -> int:
    found = table.find(key, prompt, now_s, lambda _: True)  # type: ignore[arg-type]
    return 0 if found is None else found.length


def test_the_longest_common_beginning_is_found_and_the_last_token_is_computed_always() -> None:
    table = KeptPipelines()
    table.put(KEY, kept(LONG[:40]), 0.0)
    table.put(KEY, kept((*LONG[:30], 777, *LONG[31:90])), 0.0)
    assert length_of(table, LONG) == 40
    assert length_of(table, LONG[:40]) == 39
    assert length_of(table, (*LONG[:30], 777, 5)) == 31
    assert length_of(table, (5, *LONG)) == 0


def test_a_short_beginning_is_not_worth_it() -> None:
    table = KeptPipelines()
    table.put(KEY, kept(LONG[:LEAST_POSITIONS]), 0.0)
    assert length_of(table, LONG[: LEAST_POSITIONS + 1]) == LEAST_POSITIONS
    assert length_of(table, LONG[:LEAST_POSITIONS]) == 0


@pytest.mark.parametrize(
    "other",
    [
        reuse_key(request(owner="somebody else"), "auto"),
        reuse_key(request(weights_sha256="b" * 64), "auto"),
        reuse_key(request(arithmetic=2), "auto"),
        reuse_key(request(boundaries=(Boundary(4, "int8"),)), "auto"),
        reuse_key(request(), "int8"),
    ],
)
def test_nothing_is_shared_between_owners_weights_or_roundings(other: object) -> None:
    table = KeptPipelines()
    table.put(KEY, kept(LONG), 0.0)
    assert length_of(table, LONG, key=other) == 0
    assert length_of(table, LONG) == 99


def test_a_next_turn_takes_the_place_of_the_one_before() -> None:
    table = KeptPipelines()
    first, second = kept(LONG[:20]), kept(LONG[:50], b"c")
    assert table.put(KEY, first, 0.0) == []
    assert table.put(KEY, second, 1.0) == [first]
    assert len(table) == 1


def test_what_is_too_old_or_too_much_is_given_back_and_not_found() -> None:
    table = KeptPipelines(most=2, lifetime_s=10.0)
    one, two, three = (kept((number, *LONG), bytes([number])) for number in (1, 2, 3))
    table.put(KEY, one, 0.0)
    table.put(KEY, two, 5.0)
    assert length_of(table, (1, *LONG), 10.0) == 0
    assert table.put(KEY, three, 9.0) == [one]  # one too many
    assert table.put(KEY, kept((4, *LONG)), 15.0) == [two]  # too old
    assert length_of(table, (3, *LONG), 15.0) == 100


def test_a_lost_node_takes_what_it_kept_along_and_unusable_ones_are_passed_over() -> None:
    table = KeptPipelines()
    table.put(KEY, kept(LONG), 0.0)
    assert table.find(KEY, LONG, 0.0, lambda _: False) is None
    table.forget(NODE)
    assert length_of(table, LONG) == 0


# ---------------------------------------------------------------- a generation that goes on with it


class TurnBench:
    """The head of a next turn, whose shards say what a test lets them say."""

    def __init__(self, length: int = 40, **settings: object) -> None:
        ids = iter(bytes([number]) * 16 for number in range(1, 100))
        self.generation = Generation(
            request(), STAGES, lambda *_: None, GenerationSettings(prefill_chunk=32, keeps_kv=True, **settings),  # type: ignore[arg-type]
            lambda: next(ids), HEAD, Resumption(Kept(LONG[:length], STAGES, SESSIONS), length),
        )  # fmt: skip
        self.generation.start(0.0)
        self.sent = self.generation.take_effects()

    def tell(self, stage: int, message: Message) -> list[SendTo]:
        self.generation.on_message(STAGES[stage].node, message, 0.0)
        self.sent = self.generation.take_effects()
        return self.sent

    def of(self, kind: type[Message]) -> list[Message]:
        return [effect.message for effect in self.sent if isinstance(effect.message, kind)]

    @property
    def sessions(self) -> tuple[bytes, ...]:
        return self.generation.sessions


def test_every_shard_is_asked_for_what_it_kept_and_only_the_rest_is_sent() -> None:
    bench = TurnBench()
    assert [(m.resumes, m.resumed) for m in bench.of(Open)] == [(SESSIONS[0], 40), (SESSIONS[1], 40)]  # type: ignore[attr-defined]
    bench.tell(0, Opened(bench.sessions[0], 0, 40))
    bench.tell(1, Opened(bench.sessions[1], 0, 40))
    steps = [(m.position, m.count, m.chooses) for m in bench.of(Step)]  # type: ignore[attr-defined]
    assert steps == [(40, 16, False), (56, 16, False), (72, 16, False), (88, 12, True)]
    bench.tell(1, Result(bench.sessions[1], 0, 100, 999))
    [end] = bench.generation.take_frames()
    assert isinstance(end, Finished)
    assert end.reused_tokens == 40


def test_a_shard_that_has_lost_its_part_is_fed_by_the_one_before_it() -> None:
    bench = TurnBench()
    bench.tell(0, Opened(bench.sessions[0], 0, 40))
    bench.tell(1, Opened(bench.sessions[1], 0, 0))
    assert [m.length for m in bench.of(Rewire)] == [40, 0]  # type: ignore[attr-defined]
    bench.tell(0, Rewired(bench.sessions[0], 1, 40, 0))
    bench.tell(1, Rewired(bench.sessions[1], 1, 0, 0))
    [replay] = bench.of(Replay)
    assert (replay.start, replay.stop) == (0, 40)  # type: ignore[attr-defined]
    assert bench.of(Step)[0].position == 40  # type: ignore[attr-defined]


def test_what_the_first_shard_has_lost_comes_from_the_head() -> None:
    bench = TurnBench()
    bench.tell(1, Opened(bench.sessions[1], 0, 40))
    bench.tell(0, Opened(bench.sessions[0], 0, 0))
    bench.tell(0, Rewired(bench.sessions[0], 1, 0, 0))
    bench.tell(1, Rewired(bench.sessions[1], 1, 40, 0))
    assert [m.position for m in bench.of(Step)][:3] == [0, 32, 40]  # type: ignore[attr-defined]
    bench.tell(1, Result(bench.sessions[1], 1, 100, 999))
    [end] = bench.generation.take_frames()
    assert isinstance(end, Finished)
    assert end.reused_tokens == 0


@pytest.mark.parametrize(("how", "expected"), [("end", 100), ("cancelled", 0), ("switched off", 0)])
def test_an_answer_that_came_to_its_end_is_kept_and_no_other(how: str, expected: int) -> None:
    bench = TurnBench()
    if how == "switched off":
        bench.generation.settings = GenerationSettings()
    bench.tell(0, Opened(bench.sessions[0], 0, 40))
    bench.tell(1, Opened(bench.sessions[1], 0, 40))
    if how == "cancelled":
        bench.generation.cancel()
        bench.sent = bench.generation.take_effects()
    else:
        bench.tell(1, Result(bench.sessions[1], 0, 100, 999))
    assert [m.keeps for m in bench.of(Close)] == [expected, expected]  # type: ignore[attr-defined]
    assert bench.generation.kept == (Kept(LONG, STAGES, bench.sessions) if expected else None)


# ---------------------------------------------------------------- ds4: who owns the KV of a reverse topology

REVERSE = (
    Placed(NODE, "node:1", Stage(0, 3, True)),
    Placed(OTHER, "node:2", Stage(3, 5)),
    Placed(HEAD, "", Stage(5, 8, False, True)),  # the coordinator's own, to the output
)


def begun(resumption: Resumption | None = None, first_id: int = 1) -> tuple[Generation, dict[bytes, Open]]:
    """A generation over REVERSE, and what it asked each node to open."""
    ids = iter(bytes([number]) * 16 for number in range(first_id, 100))
    settings = GenerationSettings(prefill_chunk=128, keeps_kv=True, uses_ring=False)
    generation = Generation(request(), REVERSE, lambda *_: None, settings, lambda: next(ids), HEAD, resumption)
    generation.start(0.0)
    effects = generation.take_effects()
    return generation, {effect.node: effect.message for effect in effects if isinstance(effect.message, Open)}


def test_kv_owner_ordering_for_reverse_topology() -> None:
    """ds4: owners stand in the order of their layers and not one's own first; the next turn asks each for what is its own."""
    generation, opens = begun()
    for placed in reversed(REVERSE):  # its own is open first, as it would be
        generation.on_message(placed.node, Opened(opens[placed.node].session, 0), 0.0)
    generation.on_message(HEAD, Result(opens[HEAD].session, 0, 100, 999), 0.0)
    owned = generation.kept
    assert owned is not None
    assert owned.stages == REVERSE
    assert owned.sessions == tuple(opens[placed.node].session for placed in REVERSE)
    closed = {e.node: (e.message.session, e.message.keeps) for e in generation.take_effects() if isinstance(e.message, Close)}  # fmt: skip
    assert closed == {placed.node: (opens[placed.node].session, 100) for placed in REVERSE}

    _, again = begun(Resumption(owned, 99), first_id=50)
    assert [(again[placed.node].stage, again[placed.node].resumes) for placed in REVERSE] == [
        (placed.stage, opens[placed.node].session) for placed in REVERSE
    ]
