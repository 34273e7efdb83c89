"""The next question of a conversation: which earlier answer it begins with, and how stages agree on how much of it is left."""

import msgspec
import pytest

from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.conversations import Conversations, are_offered, common_length
from potluck.orchestrator.frames import Finished
from potluck.orchestrator.request import GenerationRequest
from potluck.planner.cover import Placed
from potluck.wire.messages import Boundary, Close, Open, Opened, Resume, Rewire, Stage, Step
from tests.support.generations import HeadBench, candidate, node

TOKENS = tuple(range(100, 140))
STAGES = (Placed(node(1), "node:1", Stage(0, 8, True, True)),)


def request(prompt: tuple[int, ...], **changes: object) -> GenerationRequest:
    plain = GenerationRequest(
        model="m", weights_sha256="a" * 64, arithmetic=1, layer_count=8, prompt=prompt, max_tokens=5,
        params=SamplingParams(), eos=(),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def remembered(*answers: tuple[int, ...]) -> Conversations:
    conversations = Conversations()
    for number, tokens in enumerate(answers):
        conversations.put("me", request(tokens[:5]), tokens, STAGES, (bytes([number]) * 16,), 0.0)
    return conversations


def lengths(conversations: Conversations, asked: GenerationRequest, scope: str = "me", now_s: float = 1.0) -> list[int]:
    return [beginning.length for beginning in conversations.find(scope, asked, now_s)]


@pytest.mark.parametrize(
    ("tokens", "prompt", "length"),
    [
        ((1, 2, 3), (1, 2, 3, 4), 3),
        ((1, 2, 3), (1, 2, 3), 2),
        ((1, 2, 3), (1, 9, 3), 1),
        ((), (1,), 0),
        ((1,), (2, 3), 0),
    ],
)
def test_the_last_token_of_a_prompt_is_always_computed(
    tokens: tuple[int, ...], prompt: tuple[int, ...], length: int
) -> None:
    assert common_length(tokens, prompt) == length


def test_the_longest_beginning_comes_first_and_the_newest_of_equals() -> None:
    conversations = remembered(TOKENS[:20], TOKENS, (*TOKENS, 9), TOKENS[:10])
    found = conversations.find("me", request((*TOKENS, 7, 8)), 1.0)
    assert [(each.length, each.sessions[0][0]) for each in found] == [(40, 2), (40, 1), (20, 0)]
    assert found[0].resumes() == [Resume(bytes([2]) * 16, 40)]


def test_it_is_looked_for_only_where_it_is_the_same_model_for_the_same_person() -> None:
    conversations, more = remembered(TOKENS), (*TOKENS, 1)
    assert lengths(conversations, request(more)) == [40]
    assert lengths(conversations, request(more), scope="somebody else") == []
    assert lengths(conversations, request(more), now_s=1e6) == []
    for change in ({"weights_sha256": "b" * 64}, {"arithmetic": 2}, {"boundaries": (Boundary(3, "int8"),)}):
        assert lengths(conversations, request(more, **change)) == []
    assert lengths(conversations, request(more, prompt_logprobs=0)) == []  # every token's score is wanted


def test_only_the_last_few_are_remembered() -> None:
    conversations = remembered(*[(number, *TOKENS) for number in range(40)])
    assert lengths(conversations, request((0, *TOKENS, 1))) == []
    assert lengths(conversations, request((39, *TOKENS, 1))) == [41]


def test_a_stage_that_has_moved_is_not_offered_any_more() -> None:
    stages = [Placed(node(1), "node:1", Stage(0, 3, True, False)), Placed(node(2), "node:2", Stage(3, 8, False, True))]
    assert are_offered(stages, [candidate((1, 0, 4)), candidate((2, 3, 7))])
    assert not are_offered(stages, [candidate((1, 0, 1)), candidate((2, 3, 7))])
    assert not are_offered(stages, [candidate((1, 0, 4)), candidate((3, 3, 7))])


# ---------------------------------------------------------------- a generation that resumes


def begun(answers: dict[int, int], *, resumed: int = 6) -> HeadBench:
    """A prompt of 8 tokens, of which stages are asked for `resumed`; `answers`: what each node has left."""
    bench = HeadBench(prompt=8, keeps_kv=True)
    for stage in bench.generation._stages:
        stage.resume = Resume(bytes([stage.placed.node[0]]) * 16, resumed)
    bench.start()
    for effect in list(bench.sent):
        message = effect.message
        assert isinstance(message, Open)
        assert message.resume == Resume(bytes([effect.node[0]]) * 16, resumed)
        bench.tell(effect.node, Opened(message.session, message.epoch, answers[effect.node[0]]))
    return bench


def sent_steps(bench: HeadBench) -> list[tuple[int, int]]:
    return [(step.position, step.count) for _, step in bench.of(Step)]  # type: ignore[union-attr]


def test_where_all_have_the_beginning_only_the_rest_is_sent() -> None:
    bench = begun({1: 6, 2: 6, 3: 6})
    assert bench.generation.epoch == 0
    assert sent_steps(bench) == [(6, 2)]
    bench.result(8, 100)
    bench.tokens(19)
    [end] = bench.kinds(Finished)
    assert (end.cached_tokens, end.reason) == (6, "length")  # type: ignore[union-attr]


def test_where_they_have_differently_much_all_are_cut_to_the_shortest() -> None:
    bench = begun({1: 6, 2: 4, 3: 6})
    assert sent_steps(bench) == []
    assert [(number, message.length) for number, message in bench.of(Rewire)] == [(1, 4), (2, 4), (3, 4)]  # type: ignore[union-attr]
    bench.answer_all()
    assert sent_steps(bench) == [(4, 2), (6, 2)]
    assert bench.generation.resumed == 4


def test_where_one_has_nothing_all_start_anew() -> None:
    bench = begun({1: 6, 2: 0, 3: 6})
    bench.answer_all()
    assert sent_steps(bench) == [(0, 2), (2, 2)]
    assert bench.generation.resumed == 0


def test_a_shard_that_claims_more_than_was_asked_for_is_not_believed() -> None:
    assert sent_steps(begun({1: 6, 2: 1000, 3: 6})) == [(6, 2)]


def test_a_stage_lost_later_is_fed_from_the_start() -> None:
    bench = begun({1: 6, 2: 6, 3: 6})
    bench.result(8, 100)
    bench.lose(2)
    opened = [message for _, message in bench.of(Open)]
    assert [message.resume for message in opened] == [None]  # type: ignore[union-attr]
    bench.answer_all()
    assert sent_steps(bench)[0][0] == 0  # the first stage cannot replay what it never computed


def test_a_loss_while_it_forms_gives_the_beginning_up() -> None:
    bench = HeadBench(prompt=8, keeps_kv=True)
    for stage in bench.generation._stages:
        stage.resume = Resume(b"x" * 16, 6)
    bench.start()
    bench.refuse(1)
    assert all(message.resume is None for _, message in bench.of(Open))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keeps_kv", "how", "is_kept"), [(True, "end", True), (False, "end", False), (True, "cancel", False)]
)
def test_only_an_answer_that_came_to_its_end_is_kept(keeps_kv: bool, how: str, is_kept: bool) -> None:
    bench = HeadBench(max_tokens=3, keeps_kv=keeps_kv)
    bench.run()
    bench.prefill()
    if how == "end":
        bench.tokens(1)
        bench.result(6, 5)
    else:
        bench.cancel()
    assert {message.keeps for _, message in bench.of(Close)} == {is_kept}  # type: ignore[union-attr]
    assert bench.generation.has_kept_kv is is_kept
