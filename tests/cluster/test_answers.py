"""What an answer may have beside its text, over real nodes: grammars, log probabilities of answer and prompt, several choices.

All of it equals the unsplit model's, to the last bit, whoever owns the output and however the prompt is cut.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from potluck.core.errors import BadRequest, ShardUnavailable
from potluck.core.grammar import Grammar
from potluck.core.sampling_params import SamplingParams
from potluck.net.loop import run
from potluck.node.asking import ChoiceFrame, RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, parse_own_layers, read_stored_model, serve
from potluck.orchestrator.frames import Finished, PipelineAborted, PromptLogprobs, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.testing.local_swarm import LocalSwarm, NodePlan
from potluck.weights.store import ModelStore
from potluck.wire.messages import Describe, Described, Stage
from potluck.worker.local_model import LocalModel
from tests.support.swarms import TINY, frames_of, head_node, stored_tiny, tokens_of

LAYERS = 8
PROMPT = tuple(1 + 37 * number % 400 for number in range(45))
COUNT = 24
SAMPLED = SamplingParams(temperature=0.9, seed=11)
WORDS = Grammar("regex", "([a-z]{1,6} ){2,4}[0-9]{2,5}")
OWN = ["", "0-2", "6-output", "embedding,output"]


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    stored_tiny(models_home)
    with LocalSwarm(TINY, [NodePlan("0-3"), NodePlan("4-7")], models_home) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def local(models_home: Path) -> Iterator[LocalModel]:
    entry, store = stored_tiny(models_home), ModelStore(models_home / "models")
    model = LocalModel(store.open(TINY), source=entry.weights_sha256, cache_folder=store.packed_folder(TINY), threads=1)
    yield model
    model.close()


@asynccontextmanager
async def head(swarm: LocalSwarm, home: Path, *, serves: bool = False) -> AsyncIterator[tuple[Node, RemoteModel]]:
    async with head_node(swarm.addresses) as node:
        if serves:
            stored = read_stored_model(ModelStore(home / "models"), TINY)
            await serve(node, stored, Stage(0, LAYERS, True, True), ServingSettings()).start()
        yield node, await RemoteModel.find(node, TINY)


def ways(*, chunks: tuple[int, ...] = (16,)) -> list[DistributedChatParams]:
    """Every place where the output can be, with and without the ring, and each size of a chunk."""
    return [
        DistributedChatParams(
            settings=GenerationSettings(uses_ring=uses_ring, prefill_chunk=chunk, prefill_window=3),
            own_layers=parse_own_layers(own, LAYERS) if own else (),
            fallback_to_local=False,
        )
        for own in OWN
        for uses_ring in (True, False)
        for chunk in chunks
    ]


async def everywhere(
    swarm: LocalSwarm, home: Path, request: dict[str, object], count: int, **how: object
) -> list[list[StreamFrame]]:
    async with head(swarm, home, serves=True) as (node, model):
        asked = model.request(PROMPT, SAMPLED_WITH[str(request.pop("logprobs", None))], count, **request)  # type: ignore[arg-type]
        return [await frames_of(node, asked, params) for params in ways(**how)]  # type: ignore[arg-type]


SAMPLED_WITH = {"None": SAMPLED, "20": SamplingParams(temperature=0.9, seed=11, logprobs=20)}


def test_an_answer_held_to_a_grammar_is_that_of_the_unsplit_model(
    swarm: LocalSwarm, local: LocalModel, models_home: Path
) -> None:
    pieces = list(local.generate(PROMPT, SAMPLED, COUNT, grammar=WORDS))
    expected = [piece.chosen.token for piece in pieces if piece.chosen is not None]
    free = [p.chosen.token for p in local.generate(PROMPT, SAMPLED, COUNT) if p.chosen is not None]
    assert expected != free
    assert [piece.finish_reason for piece in pieces][-1] == "stop"  # complete before its limit
    for frames in run(everywhere(swarm, models_home, {"grammar": WORDS}, COUNT)):
        assert tokens_of(frames) == expected
        assert frames[-1] == Finished("stop", len(expected) + 1, 0)


def test_log_probabilities_of_an_answer_are_those_of_the_unsplit_model(
    swarm: LocalSwarm, local: LocalModel, models_home: Path
) -> None:
    expected = [p.chosen for p in local.generate(PROMPT, SAMPLED_WITH["20"], COUNT) if p.chosen is not None]
    for frames in run(everywhere(swarm, models_home, {"logprobs": 20}, COUNT)):
        said = [(frame.token, frame.logprob, frame.top) for frame in frames if isinstance(frame, TokenDelta)]
        assert said == [tuple(chosen) for chosen in expected]
        assert {len(top) for _, _, top in said} == {20}
        for _, _, top in said:
            assert list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_log_probabilities_of_a_prompt_are_those_of_the_unsplit_model(
    count: int, swarm: LocalSwarm, local: LocalModel, models_home: Path
) -> None:
    expected = [(each.logprob, each.is_greedy, each.top) for each in local.score_prompt(PROMPT, 20)]
    answer = [p.chosen.token for p in local.generate(PROMPT, SAMPLED, 5) if p.chosen is not None][:count]
    chunks = (1, 16, 128) if count == 0 else (16,)
    for frames in run(everywhere(swarm, models_home, {"prompt_logprobs": 20}, count, chunks=chunks)):
        assert isinstance(frames[0], PromptLogprobs)
        assert tuple(each.token for each in frames[0].positions) == PROMPT[1:]
        assert [(each.logprob, each.is_greedy, each.top) for each in frames[0].positions] == expected
        assert [frame for frame in frames[1:] if isinstance(frame, PromptLogprobs)] == []
        assert tokens_of(frames) == answer
        assert frames[-1] == Finished("length", count, 0)


def test_greedy_tokens_are_marked_in_a_prompt(swarm: LocalSwarm, local: LocalModel, models_home: Path) -> None:
    """A prompt that goes on as the model would: exactly those tokens are its greedy choice, and the first of the alternatives."""
    answer = [p.chosen.token for p in local.generate(PROMPT, SamplingParams(), 10) if p.chosen is not None]

    async def ask() -> list[StreamFrame]:
        async with head(swarm, models_home) as (node, model):
            request = model.request([*PROMPT, *answer], SamplingParams(), 0, prompt_logprobs=1)
            return await frames_of(node, request, DistributedChatParams())

    told = run(ask())[0]
    assert isinstance(told, PromptLogprobs)
    assert all(each.is_greedy and each.top == ((each.token, each.logprob),) for each in told.positions[-10:])
    assert not all(each.is_greedy for each in told.positions[:-10])


def test_a_prompt_of_one_token_has_no_scores(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> list[StreamFrame]:
        async with head(swarm, models_home) as (node, model):
            return await frames_of(
                node, model.request([5], SamplingParams(), 1, prompt_logprobs=2), DistributedChatParams()
            )

    frames = run(ask())
    assert frames[0] == PromptLogprobs(())
    assert isinstance(frames[1], TokenDelta)


def test_more_alternatives_than_there_may_be_are_refused(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> None:
        async with head(swarm, models_home) as (_, model):
            model.request(PROMPT, SAMPLED, 1, prompt_logprobs=21)

    with pytest.raises(BadRequest, match="at most 20"):
        run(ask())


def test_a_bad_grammar_ends_the_request_at_once_with_its_code(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> tuple[list[StreamFrame], float]:
        async with head(swarm, models_home) as (node, model):
            request = model.request(PROMPT, SAMPLED, COUNT, grammar=Grammar("json_schema", '{"type":"strin"}'))
            began = asyncio.get_running_loop().time()
            frames = await frames_of(node, request, DistributedChatParams())
            return frames, asyncio.get_running_loop().time() - began

    [end], seconds = run(ask())
    assert isinstance(end, PipelineAborted)
    assert end.code == "bad_grammar"
    assert "strin" in end.message
    assert seconds < 1.0


# ---------------------------------------------------------------- several choices


async def all_choices(model: RemoteModel, request: GenerationRequest, count: int) -> list[ChoiceFrame]:
    async with aclosing(model.generate_choices(request, DistributedChatParams(), count)) as frames:
        return [frame async for frame in frames]


def tokens_by_choice(frames: list[ChoiceFrame], count: int) -> list[list[int]]:
    return [[f.frame.token for f in frames if f.choice == n and isinstance(f.frame, TokenDelta)] for n in range(count)]


def test_choices_run_side_by_side_and_equal_those_asked_for_alone(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> tuple[list[ChoiceFrame], list[list[int]]]:
        async with head(swarm, models_home) as (node, model):
            request = model.request(PROMPT, SAMPLED, COUNT, grammar=Grammar("regex", "[a-z ]*"))
            alone = [
                tokens_of(await frames_of(node, msgspec.structs.replace(request, choice=n), DistributedChatParams()))
                for n in range(3)
            ]
            return await all_choices(model, request, 3), alone

    frames, alone = run(ask())
    assert tokens_by_choice(frames, 3) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert [sum(isinstance(f.frame, Finished) and f.choice == n for f in frames) for n in range(3)] == [1, 1, 1]
    ends = [place for place, said in enumerate(frames) if isinstance(said.frame, Finished)]
    assert {said.choice for said in frames[: ends[0]]} == {0, 1, 2}


def test_leaving_cancels_every_choice(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> tuple[int, list[int]]:
        async with head(swarm, models_home) as (node, model):
            request = msgspec.structs.replace(model.request(PROMPT, SAMPLED, 300), eos=())
            async with aclosing(model.generate_choices(request, DistributedChatParams(), 3)) as frames:
                async for said in frames:
                    if isinstance(said.frame, TokenDelta):
                        break
            left = len(node.orchestrator.pipelines)
            streams = []
            for _, offer in node.orchestrator.store.offers():
                answer, _ = await node.orchestrator.ask(offer.node, Describe)
                assert isinstance(answer, Described)
                streams += [info.streams for info in answer.shards]
            return left, streams

    assert run(ask()) == (0, [0, 0])


def test_where_one_choice_cannot_start_the_request_fails(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> int:
        async with head(swarm, models_home) as (node, model):
            node.orchestrator.max_concurrent_pipelines = 2
            with pytest.raises(ShardUnavailable, match="all 2 pipelines"):
                await all_choices(model, model.request(PROMPT, SAMPLED, 50), 3)
            return len(node.orchestrator.pipelines)

    assert run(ask()) == 0


def test_a_stop_string_ends_one_choice_and_says_so(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> list[ChoiceFrame]:
        async with head(swarm, models_home) as (_, model):
            request = model.request(PROMPT, SAMPLED, 60, grammar=Grammar("regex", "([a-z]{1,5} ){40}"))
            frames = model.generate_choices(request, DistributedChatParams(), 2, stops=["e"])
            return [frame async for frame in frames]

    frames = run(ask())
    for choice in range(2):
        mine = [said for said in frames if said.choice == choice]
        assert isinstance(mine[-1].frame, Finished)
        text = "".join(said.text for said in mine)
        assert "e" not in text
