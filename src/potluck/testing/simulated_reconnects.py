"""Seeds of answers whose head dies: its reader goes on with another head, which begins with what some shard remembers, or with nothing.

Whatever else goes wrong with the shards before and after, the whole text is the undisturbed one, and what a shard remembers is its
beginning.
"""

import itertools
from dataclasses import dataclass

import msgspec

from potluck.core.remembered import AnswerSoFar
from potluck.orchestrator.generation import Generation
from potluck.orchestrator.request import GenerationRequest
from potluck.planner.cover import greedy_cover
from potluck.testing.simulated_swarm import SimHead, node_id
from potluck.testing.simulation import Parts, Scenario, build, repick_of, schedule_faults
from potluck.wire.messages import Stage

_FIRST_SECOND_HEAD = 300


@dataclass
class ReconnectOutcome:
    """`taken_up`: answers that went on with another head; `remembered`: those of which a shard knew the beginning."""

    seed: int
    problem: str
    taken_up: int = 0
    remembered: int = 0


def run_reconnects(seed: int, most_faults: int = 2, parts: Parts | None = None) -> ReconnectOutcome:
    scenario = build(seed, parts)
    world = scenario.world
    for head in scenario.heads:
        world.clock.at(world.random.uniform(0.1, 0.15), head.start)
        world.clock.at(world.random.uniform(0.12, 0.3), head.kill)
    schedule_faults(scenario, most_faults)
    world.clock.run(lambda: all(head.is_over for head in scenario.heads), world.clock.now_s + 300.0)
    world.clock.run(lambda: False, world.clock.now_s + world.random.uniform(0.0, 0.05))
    outcome, seconds = ReconnectOutcome(seed, ""), []
    for number, head in enumerate(scenario.heads):
        if not head.is_alive and head.generation.request.max_tokens:
            outcome.taken_up += 1
            seconds += _second(scenario, head, _FIRST_SECOND_HEAD + number, (parts or Parts()).generation, outcome)
    _finish(scenario, seconds, outcome)
    return outcome


def _second(
    scenario: Scenario, head: SimHead, number: int, kind: type[Generation], outcome: ReconnectOutcome
) -> list[SimHead]:
    """Another head for the same answer; none where all of it is remembered."""
    request, expected = head.generation.request, head.expected.tokens
    account = _account(scenario, request.resume_key)
    chosen = () if account is None else account.chosen
    outcome.remembered += bool(chosen)
    if account is not None and (account.prompt != request.prompt or list(chosen) != expected[: len(chosen)]):
        outcome.problem += f"remembered is {account} instead of {expected}; "
    if list(chosen) == expected:
        return []
    return [_started(scenario, head, node_id(number), kind, msgspec.structs.replace(request, begun=chosen))]


def _started(
    scenario: Scenario, head: SimHead, node: bytes, kind: type[Generation], request: GenerationRequest
) -> SimHead:
    world = scenario.world
    alive = [candidate for candidate in scenario.candidates if world.shards[candidate.node].is_alive]
    pipeline = greedy_cover(alive, Stage(0, scenario.layers, True, True)) or head.generation.stages
    request = msgspec.structs.replace(request, prompt_logprobs=None, has_fixed_boundaries=True)
    ids = (world.random.randbytes(16) for _ in itertools.count())
    generation = kind(request, pipeline, repick_of(scenario), head.generation.settings, lambda: next(ids), node)
    second = SimHead(world, node, generation, head.expected)
    world.heads[node] = second
    second.start()
    return second


def _account(scenario: Scenario, key: bytes) -> AnswerSoFar | None:
    """As a node asks for it: shards that have not noticed the head's end count as well."""
    world = scenario.world
    live = [shard.core.recall(key) for shard in world.shards.values() if shard.is_alive]
    known = [each for each in (*live, world.remembered.get(key, world.clock.now_s)) if each is not None]
    return max(known, key=lambda account: len(account.tokens), default=None)


def _finish(scenario: Scenario, seconds: list[SimHead], outcome: ReconnectOutcome) -> None:
    clock = scenario.world.clock
    if not clock.run(lambda: all(second.is_over for second in seconds), clock.now_s + 300.0):
        outcome.problem += f"no end: {[second.generation for second in seconds]}; "
    for second in seconds:
        if second.generation.generated != second.expected.tokens:
            told = f"{second.generation.generated} instead of {second.expected.tokens}"
            outcome.problem += f"text differs: {told} ({second.frames[-1:]}); "


def run_many_reconnects(seeds: range) -> list[ReconnectOutcome]:
    return [run_reconnects(seed) for seed in seeds]
