"""Every topology gives the tokens of the unsplit model: own prefix, own suffix, both ends, ends only, one remote loop, parts of ranges.

Real nodes over TLS. The head's own layers run in its own shard server, in its own node; no code asks which topology it is in.
"""

import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from potluck.core.errors import BadRequest, ShardUnavailable
from potluck.core.sampling_params import SamplingParams
from potluck.net.loop import run
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, parse_own_layers, read_stored_model, serve
from potluck.orchestrator.frames import ShardFailover, ShardStatus, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.testing.local_swarm import LocalSwarm, NodePlan
from potluck.weights.store import ModelStore
from potluck.wire.messages import Boundary, Stage
from potluck.worker.local_model import LocalModel
from tests.support.swarms import TINY, frames_of, head_node, stored_tiny, tokens_of

LAYERS = 8
PROMPT = tuple(1 + 37 * number % 400 for number in range(45))
COUNT = 24
HEAD, WHOLE, LOWER, UPPER, MIDDLE = -1, 0, 1, 2, 3
PLANS = [NodePlan(None), NodePlan("0-3"), NodePlan("4-7"), NodePlan("2-5")]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=11)
ENDS = (Stage(0, 0, True), Stage(LAYERS, LAYERS, False, True))

TOPOLOGIES: dict[str, list[tuple[int, Stage]]] = {
    "coordinator owns the prefix": [(HEAD, Stage(0, 3, True)), (WHOLE, Stage(3, 8, False, True))],
    "coordinator owns the suffix": [(WHOLE, Stage(0, 5, True)), (HEAD, Stage(5, 8, False, True))],
    "both ends at home": [(HEAD, Stage(0, 2, True)), (MIDDLE, Stage(2, 6)), (HEAD, Stage(6, 8, False, True))],
    "embedding and output at home": [(HEAD, ENDS[0]), (WHOLE, Stage(0, 8)), (HEAD, ENDS[1])],
    "embedding and output at home, two shards between": [
        (HEAD, ENDS[0]),
        (LOWER, Stage(0, 4)),
        (UPPER, Stage(4, 8)),
        (HEAD, ENDS[1]),
    ],
    "one remote shard runs the whole loop": [(WHOLE, Stage(0, 8, True, True))],
    "two remote shards": [(LOWER, Stage(0, 4, True)), (UPPER, Stage(4, 8, False, True))],
    "ranges used in part": [(LOWER, Stage(0, 2, True)), (MIDDLE, Stage(2, 5)), (UPPER, Stage(5, 8, False, True))],
    "one node twice": [(WHOLE, Stage(0, 3, True)), (MIDDLE, Stage(3, 5)), (WHOLE, Stage(5, 8, False, True))],
    "everything at home": [(HEAD, Stage(0, 8, True, True))],
    "the output elsewhere": [(HEAD, Stage(0, 8, True)), (UPPER, ENDS[1])],
}


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    stored_tiny(models_home)
    with LocalSwarm(TINY, PLANS, models_home) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def unsplit(models_home: Path) -> Iterator[dict[str, list[int]]]:
    """The whole model in this process, on one thread."""
    entry, store = stored_tiny(models_home), ModelStore(models_home / "models")
    model = LocalModel(store.open(TINY), source=entry.weights_sha256, cache_folder=store.packed_folder(TINY), threads=1)
    answers = {}
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        answers[name] = [p.chosen.token for p in model.generate(PROMPT, params, COUNT) if p.chosen is not None]
    yield answers
    model.close()


@asynccontextmanager
async def coordinator(swarm: LocalSwarm, home: Path) -> AsyncIterator[tuple[Node, RemoteModel]]:
    """A head that serves the whole model to itself, and uses of it what a topology says."""
    async with head_node(swarm.addresses) as node:
        stored = read_stored_model(ModelStore(home / "models"), TINY)
        server = serve(node, stored, Stage(0, LAYERS, True, True), ServingSettings())
        await server.start()
        yield node, await RemoteModel.find(node, TINY)


def placed(node: Node, swarm: LocalSwarm, topology: list[tuple[int, Stage]]) -> tuple[Placed, ...]:
    stages = []
    for where, stage in topology:
        shown = swarm.nodes[where].announcement
        assert shown is not None
        stages.append(
            Placed(node.id, "", stage) if where == HEAD else Placed(bytes.fromhex(shown.node), shown.address, stage)
        )
    return tuple(stages)


def settings(uses_ring: bool) -> GenerationSettings:
    return GenerationSettings(uses_ring=uses_ring, prefill_chunk=16, prefill_window=3)


def params_of(node: Node, swarm: LocalSwarm, name: str, uses_ring: bool) -> DistributedChatParams:
    return DistributedChatParams(settings=settings(uses_ring), pipeline=placed(node, swarm, TOPOLOGIES[name]))


def calm(frames: list[StreamFrame]) -> list[int]:
    """The tokens of an answer during which nobody was lost."""
    assert not [frame for frame in frames if isinstance(frame, ShardStatus)]
    return tokens_of(frames)


def test_every_topology_gives_the_tokens_of_the_unsplit_model(
    swarm: LocalSwarm, unsplit: dict[str, list[int]], models_home: Path
) -> None:
    async def compare() -> list[str]:
        wrong = []
        async with coordinator(swarm, models_home) as (node, model):
            for name in TOPOLOGIES:
                for uses_ring in (True, False):
                    for how, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                        request = model.request(PROMPT, sampling, COUNT)
                        frames = await frames_of(node, request, params_of(node, swarm, name, uses_ring))
                        if calm(frames) != unsplit[how]:
                            wrong.append(f"{name}, ring {uses_ring}, {how}: {tokens_of(frames)}")
        return wrong

    assert unsplit["greedy"] != unsplit["sampled"]
    assert run(compare()) == []


def test_boundaries_belong_to_the_session_and_not_to_the_topology(swarm: LocalSwarm, models_home: Path) -> None:
    """Rounded before layers 2 and 5, whoever computes them: the same bits everywhere, and others than without either rounding."""
    rounded = (Boundary(2, "int8"), Boundary(5, "fp16"))

    async def scores(
        boundaries: tuple[Boundary, ...], names: Iterable[str]
    ) -> dict[str, list[tuple[int, float | None]]]:
        found = {}
        async with coordinator(swarm, models_home) as (node, model):
            plain = model.request(PROMPT, SamplingParams(logprobs=1), COUNT)
            request = msgspec.structs.replace(plain, boundaries=boundaries)
            for name in names:
                frames = await frames_of(node, request, params_of(node, swarm, name, True))
                calm(frames)
                found[name] = [(frame.token, frame.logprob) for frame in frames if isinstance(frame, TokenDelta)]
        return found

    found = run(scores(rounded, TOPOLOGIES))
    expected = found["everything at home"]
    assert len(expected) == COUNT
    assert {name: said for name, said in found.items() if said != expected} == {}
    for fewer in ((), rounded[:1], rounded[1:]):  # a token need not change, but what it was chosen by does
        assert run(scores(fewer, ["two remote shards"]))["two remote shards"] != expected, fewer


@pytest.mark.parametrize(
    "text", ["0-2", "5-output", "0-1,6-output", "embedding,output", "embedding", "output", "0-output"]
)
def test_others_are_found_around_a_coordinators_own_layers(
    text: str, swarm: LocalSwarm, unsplit: dict[str, list[int]], models_home: Path
) -> None:
    own = parse_own_layers(text, LAYERS)

    async def ask() -> tuple[list[int], list[Placed], bytes]:
        async with coordinator(swarm, models_home) as (node, model):
            request = model.request(PROMPT, GREEDY, COUNT)
            params = DistributedChatParams(settings=settings(True), own_layers=own, fallback_to_local=False)
            pipeline = node.orchestrator.pipeline_for(request, params)
            return calm(await frames_of(node, request, params)), pipeline, node.id

    tokens, pipeline, head = run(ask())
    assert tokens == unsplit["greedy"]
    assert tuple(p.stage for p in pipeline if p.node == head) == own
    assert len(pipeline) > len(own) or text == "0-output"


def test_invalid_pipelines_are_refused_with_their_own_words(swarm: LocalSwarm, models_home: Path) -> None:
    cases = {
        "begin at layer 0": [(UPPER, Stage(4, 8, False, True))],
        "own the output": [(LOWER, Stage(0, 4, True))],
        "nobody holds layers 2-3": [(LOWER, Stage(0, 2, True)), (UPPER, Stage(4, 8, False, True))],
        "layers 2-3 are in two shards": [(LOWER, Stage(0, 4, True)), (MIDDLE, Stage(2, 6)), (UPPER, Stage(6, 8, False, True))],
    }  # fmt: skip

    async def refusals() -> list[str]:
        words = []
        async with head_node(swarm.addresses) as node:
            model = await RemoteModel.find(node, TINY)
            for topology in cases.values():
                params = DistributedChatParams(pipeline=placed(node, swarm, topology))
                with pytest.raises(BadRequest) as error:
                    await frames_of(node, model.request(PROMPT, GREEDY, COUNT), params)
                words.append(str(error.value))
        return words

    for expected, said in zip(cases, run(refusals()), strict=True):
        assert expected in said


def test_a_gap_among_all_that_are_on_offer_is_named(swarm: LocalSwarm, models_home: Path) -> None:
    async def ask() -> None:
        async with head_node([swarm.nodes[LOWER].address]) as node:
            model = await RemoteModel.find(node, TINY)
            await frames_of(node, model.request(PROMPT, GREEDY, COUNT), DistributedChatParams())

    with pytest.raises(ShardUnavailable, match="no shard holds layer 4, 5, 6, 7 of"):
        run(ask())


def test_the_death_of_the_heads_own_worker_does_not_change_a_token(
    swarm: LocalSwarm, unsplit: dict[str, list[int]], models_home: Path
) -> None:
    async def ask() -> list[StreamFrame]:
        async with coordinator(swarm, models_home) as (node, model):
            frames: list[StreamFrame] = []
            params = params_of(node, swarm, "both ends at home", True)
            async for frame in node.orchestrator.chat(model.request(PROMPT, SAMPLED, COUNT), params):
                frames.append(frame)
                if isinstance(frame, TokenDelta) and frame.position == len(PROMPT) + 9:
                    os.kill(node.shards[0].supervisor.pid or 0, signal.SIGKILL)
            return frames

    frames = run(ask())
    assert tokens_of(frames) == unsplit["sampled"]
    assert len([frame for frame in frames if isinstance(frame, ShardFailover)]) == 1


def test_no_session_is_left_on_any_node(swarm: LocalSwarm) -> None:
    async def streams() -> list[int]:
        async with head_node(swarm.addresses) as node:
            return [info.streams for _, described in node.orchestrator.store.offers() for info in described.shards]

    assert run(streams()) == [0] * len(PLANS)
