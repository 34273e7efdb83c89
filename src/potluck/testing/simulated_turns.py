"""Seeds of conversations: after an answer under faults comes a next turn, which goes on with the KV that shards have kept of the first.

Whatever has happened to the shards meanwhile (killed, restarted, unloaded, pushed out), the second text is the undisturbed one too, and
nothing is left once what was kept has expired.
"""

import itertools
from dataclasses import dataclass

import msgspec

from potluck.orchestrator.frames import Finished
from potluck.orchestrator.generation import Generation
from potluck.orchestrator.reuse import LEAST_POSITIONS, Kept, Resumption
from potluck.testing.hash_model import VOCABULARY, undisturbed
from potluck.testing.simulated_swarm import SimHead
from potluck.testing.simulation import Parts, Scenario, build, repick_of, schedule_faults
from potluck.wire.messages import Close, Sampler

_EXPIRED_AFTER_S = 1_000.0


@dataclass
class TurnsOutcome:
    """`resumed`: next turns that began with something kept; `reused`: those of them for which nothing was computed again."""

    seed: int
    problem: str
    resumed: int = 0
    reused: int = 0
    failovers: int = 0


def run_turns(seed: int, most_faults: int = 2, parts: Parts | None = None) -> TurnsOutcome:
    scenario = build(seed, parts)
    world = scenario.world
    for head in scenario.heads:
        head.generation.settings = msgspec.structs.replace(head.generation.settings, keeps_kv=True)
        world.clock.at(world.random.uniform(0.1, 0.15), head.start)
    schedule_faults(scenario, most_faults)
    outcome = TurnsOutcome(seed, "")
    _finish(scenario, scenario.heads, outcome)
    kind = (parts or Parts()).generation
    seconds = [second for head in scenario.heads if (second := _next_turn(scenario, head, kind)) is not None]
    outcome.resumed = len(seconds)
    for second in seconds:
        if world.random.random() < 0.4:
            _disturb(scenario)
        world.clock.after(world.random.uniform(0.0, 0.02), lambda second=second: _begin(scenario, second))  # type: ignore[misc]
    _finish(scenario, seconds, outcome)
    ends = [second.frames[-1] for second in seconds if second.is_alive]
    outcome.reused = sum(isinstance(end, Finished) and end.reused_tokens > 0 for end in ends)
    _check_left(scenario, outcome)
    return outcome


def _finish(scenario: Scenario, heads: list[SimHead], outcome: TurnsOutcome) -> None:
    """Heads that were killed have no end and owe nobody an answer."""
    clock = scenario.world.clock
    is_done = clock.run(lambda: all(head.generation.is_ended for head in heads if head.is_alive), clock.now_s + 300.0)
    if not is_done and any(head.is_alive for head in heads):
        outcome.problem += f"no end: {[head.generation for head in heads]}; "
    clock.run(lambda: False, clock.now_s + 5.0)
    for head in [head for head in heads if head.is_alive]:
        outcome.failovers += head.generation.failovers
        expected, last = head.expected.tokens, head.frames[-1]
        if isinstance(last, Finished) and last.reason == "cancelled":
            expected = expected[: len(head.generation.generated)]
        if head.generation.generated != expected:
            outcome.problem += f"text differs: {head.generation.generated} instead of {expected} ({last}); "


def _next_turn(scenario: Scenario, head: SimHead, kind: type[Generation]) -> SimHead | None:
    """The same question and answer with some more, over the same stages; None where nothing was kept, or too few stages live."""
    first, draw = head.generation, scenario.world.random
    if (
        first.kept is None
        or not head.is_alive
        or not all(scenario.world.shards[p.node].is_alive for p in first.kept.stages)
    ):
        return None
    shared = draw.randint(LEAST_POSITIONS, len(first.kept.tokens))
    prompt = (*first.kept.tokens[:shared], *(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 8))))
    count = draw.randint(2, 12)
    request = msgspec.structs.replace(first.request, prompt=prompt, max_tokens=count, prompt_logprobs=None)
    ids = (draw.randbytes(16) for _ in itertools.count())
    generation = kind(
        request, first.kept.stages, repick_of(scenario), first.settings, lambda: next(ids), head.node,
        Resumption(first.kept, shared),
    )  # fmt: skip
    sampler = Sampler(request.params, 0, len(prompt), prompt, request.eos, len(prompt) + count, request.grammar)
    expected = undisturbed(prompt, scenario.layers, count, sampler, request.boundaries, request.eos)
    return SimHead(scenario.world, head.node, generation, expected)


def _begin(scenario: Scenario, second: SimHead) -> None:
    scenario.world.heads[second.node] = second
    second.start()


def _disturb(scenario: Scenario) -> None:
    """Between the turns: a worker dies, or a node restarts, and what it had kept is gone."""
    shard = scenario.world.shards[scenario.world.random.choice(scenario.victims)]
    if scenario.world.random.random() < 0.5:
        shard.kill_worker()
    elif not scenario.is_bare:
        shard.kill()
        scenario.world.clock.after(0.05, lambda: scenario.world.restart(shard.node))


def _check_left(scenario: Scenario, outcome: TurnsOutcome) -> None:
    """Heads let go of what they know of, shards of what has become too old."""
    for head in scenario.world.heads.values():
        if head.generation.kept is not None:
            _release(scenario, head, head.generation.kept)
    clock = scenario.world.clock
    clock.run(lambda: False, clock.now_s + 5.0)
    for shard in scenario.world.shards.values():
        shard.core.evict_if_idle(clock.now_s + _EXPIRED_AFTER_S)
        shard.carry_out()
    clock.run(lambda: False, clock.now_s + 5.0)
    left = [f"left behind: {shard!r} {shard.leftovers}" for shard in scenario.world.shards.values() if shard.leftovers]
    outcome.problem += "; ".join([*left, *scenario.world.contradictions])


def _release(scenario: Scenario, head: SimHead, kept: Kept) -> None:
    for placed, session in zip(kept.stages, kept.sessions, strict=True):
        shard = scenario.world.shards[placed.node]
        if shard.is_alive:
            shard.receive(head.node, Close(session), b"", b"")


def run_many_turns(seeds: range) -> list[TurnsOutcome]:
    return [run_turns(seed) for seed in seeds]
