"""Seeds: each draws a swarm, requests and faults, runs them on simulated time, and tells which promise was not kept.

Several heads on the same shards, kills, restarts (also of all at once), freezes (of heads too), partitions in both directions or one,
broken and slow links (from heads too), late and doubled frames, a member that repeats what others say, false accusations, shards
without memory, heads that die, cancellations, slow readers, shards that load on demand. Each head's text must be the undisturbed one
(or its beginning, where it was cut short), and nothing may be left behind. `python -m potluck.testing.simulation SEED` repeats a seed
and tells what happened in it.
"""

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from potluck.core.grammar import Grammar
from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.frames import (
    Finished,
    PipelineAborted,
    PromptLogprobs,
    ShardFailover,
    ShardStatus,
    TokenDelta,
)
from potluck.orchestrator.generation import Generation, GenerationRequest, GenerationSettings, Repick
from potluck.planner.cover import Candidate, Placed, greedy_cover
from potluck.planner.route import quickest_replacements
from potluck.shard.core import ShardCore
from potluck.testing.hash_model import VOCABULARY, undisturbed
from potluck.testing.simulated_swarm import ARITHMETIC, MODEL, WEIGHTS, ShardPlan, SimHead, SimShard, World, node_id
from potluck.wire.messages import Boundary, Sampler, Stage

_FIRST_HEAD = 200
_FREED_WITHIN_S = 1.0
_HOUSEKEEPING_S = 0.5


@dataclass(frozen=True)
class Parts:
    """The deciding code under test; a test of the simulation puts broken variants here."""

    core: type[ShardCore] = ShardCore
    generation: type[Generation] = Generation


@dataclass
class Outcome:
    """What a seed came to. `problem` is empty where all promises were kept."""

    seed: int
    problem: str
    failovers: int
    faults: list[str]
    longest_pause_s: float
    foreseen: int = 0  # what left before it was decided


@dataclass
class Scenario:
    """One seed's swarm and requests, before anything goes wrong. `is_bare`: nobody holds what another one holds."""

    world: World
    layers: int
    is_bare: bool
    candidates: list[Candidate]
    heads: list[SimHead] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hit: set[bytes] = field(default_factory=set)  # by a fault for which somebody may rightly lose patience with them

    @property
    def victims(self) -> list[bytes]:
        """Whom faults may hit: everybody but the widest spare, so that each answer can be finished."""
        return [candidate.node for candidate in (self.candidates if self.is_bare else self.candidates[:-1])]


# ---------------------------------------------------------------- a swarm and its requests


def build(seed: int, parts: Parts | None = None) -> Scenario:
    parts = parts or Parts()
    world = World(seed)
    draw = world.random
    layers = draw.randint(4, 8)
    is_bare = draw.random() < 0.15
    edges = [0, *sorted(draw.sample(range(1, layers), draw.randint(1, 3))), layers]
    stages = list(itertools.pairwise(edges))
    offered = stages if is_bare else stages + _spares(stages, layers, draw)
    outbox_bytes = draw.choice([1 << 20, 1 << 20, 1 << 20, 64])
    streams = 16 if is_bare else draw.choice([16, 16, 2])
    scenario = Scenario(world, layers, is_bare, [])
    for number, (lo, hi) in enumerate(offered, start=1):
        is_spare, is_last = number > len(stages), number == len(offered)
        stage = Stage(lo, hi, lo == 0, hi == layers)
        plan = ShardPlan(
            node_id(number), stage, layers, draw.uniform(0.0005, 0.003), outbox_bytes, 16 if is_last else streams,
            not is_spare or draw.random() < 0.7, draw.choice([600.0, 1.0]), parts.core,
        )  # fmt: skip
        world.shards[plan.node] = SimShard(world, plan)
        scenario.candidates.append(Candidate(plan.node, f"sim:{number}", stage, int(is_spare)))
    for number in range(draw.choice([1, 1, 1, 2, 3])):
        _add_head(scenario, node_id(_FIRST_HEAD + number), parts)
    return scenario


def _spares(stages: Sequence[tuple[int, int]], layers: int, draw: random.Random) -> list[tuple[int, int]]:
    """One or two for each range, some wider, some narrower than what they would replace; at the end one that holds everything."""
    spares: list[tuple[int, int]] = []
    for lo, hi in stages:
        spares.append((max(0, lo - draw.randint(0, 1)), min(layers, hi + draw.randint(0, 1))))
        if hi - lo > 1 and draw.random() < 0.5:
            middle = draw.randint(lo + 1, hi - 1)
            spares += [(lo, middle), (middle, hi)]
    return [*spares, (0, layers)]


def _add_head(scenario: Scenario, node: bytes, parts: Parts) -> None:
    world, draw, layers = scenario.world, scenario.world.random, scenario.layers
    prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30)))
    count = draw.randint(4, 24) if draw.random() < 0.95 else 0
    grammar = Grammar("regex", "classes") if draw.random() < 0.3 else None
    prompt_logprobs = draw.choice([0, 1, 3]) if count == 0 or draw.random() < 0.3 else None
    boundaries = tuple(
        Boundary(layer, draw.choice(["fp16", "int8"])) for layer in range(1, layers) if draw.random() < 0.2
    )
    params = SamplingParams(temperature=1.0, seed=draw.randrange(1 << 32))
    eos = (draw.randrange(VOCABULARY),)
    request = GenerationRequest(
        model=MODEL, weights_sha256=WEIGHTS, arithmetic=ARITHMETIC, layer_count=layers, prompt=prompt, max_tokens=count,
        params=params, eos=eos, boundaries=boundaries, vocabulary_size=VOCABULARY, grammar=grammar,
        prompt_logprobs=prompt_logprobs, resume_key=node,
    )  # fmt: skip
    settings = GenerationSettings(
        prefill_chunk=draw.choice([1, 4, 16]), prefill_window=draw.choice([1, 2, 4]), uses_ring=draw.random() < 0.5,
        ring_credits=draw.choice([1, 4, 16]), keeps_outbox=draw.random() < 0.8, holder_wait_s=30.0, stall_timeout_s=5.0,
    )  # fmt: skip
    pipeline = greedy_cover(scenario.candidates, Stage(0, layers, True, True))
    assert pipeline is not None
    ids = (draw.randbytes(16) for _ in itertools.count())
    generation = parts.generation(request, pipeline, repick_of(scenario), settings, lambda: next(ids), node)
    sampler = Sampler(params, 0, len(prompt), prompt, eos, len(prompt) + count, grammar, prompt_logprobs)
    head = SimHead(
        world, node, generation, undisturbed(prompt, layers, count, sampler, boundaries, eos),
        draw.choice([0.0, 0.0, 0.002]), draw.choice([float("inf"), float("inf"), draw.uniform(0.1, 0.3)]), 12.0,
    )  # fmt: skip
    world.heads[node] = head
    scenario.heads.append(head)


def repick_of(scenario: Scenario) -> Repick:
    def repick(
        kept: Sequence[Placed | None], excluded: frozenset[bytes], allows_local: bool
    ) -> list[list[Placed]] | None:
        alive = [c for c in scenario.candidates if scenario.world.shards[c.node].is_alive]
        return quickest_replacements(kept, alive, excluded, scenario.layers)

    return repick


# ---------------------------------------------------------------- what goes wrong


_FAULTS = (
    "kill", "restart", "worker", "freeze", "freeze_worker", "cut", "cut_one_way", "break", "slow", "doubles", "repeats", "accuse",
    "full", "all", "freeze_head", "kill_head",
)  # fmt: skip
_ROGUE = 199
# For these nobody may lose patience with anybody.
_HARMLESS = frozenset({"slow", "doubles", "repeats", "full", "kill_head", "freeze_head"})


def schedule_faults(scenario: Scenario, most: int) -> list[str]:
    """Draws up to `most` faults over the time that the answers take, and cancellations."""
    world, draw, victims = scenario.world, scenario.world.random, scenario.victims
    told: list[str] = []
    used = [p.node for head in scenario.heads for p in head.generation.stages if p.node in victims]
    when = draw.uniform(0.09, 0.25)
    # Where nobody else holds their layers, whoever dies or is accused would be missed for ever.
    kinds = [kind for kind in _FAULTS if not (scenario.is_bare and kind in ("kill", "accuse"))]
    for _ in range(draw.randint(0, most)):
        # Often right after the fault before: while the pipeline is being put together again.
        when = when + draw.uniform(0.0, 0.02) if draw.random() < 0.5 else draw.uniform(0.0, 0.3)
        victim = draw.choice(used if used and draw.random() < 0.6 else victims)
        other = draw.choice([*victims, draw.choice(scenario.heads).node])
        kind = draw.choice(kinds)
        told.append(f"{kind} {int.from_bytes(victim, 'big')} at {when:.4f}")
        world.clock.at(when, _fault(scenario, kind, victim, draw.uniform(0.05, 3.0), other))
    for head in scenario.heads:
        if draw.random() < 0.2:
            when = draw.uniform(0.16, 0.5)
            told.append(f"cancel {int.from_bytes(head.node, 'big')} at {when:.4f}")
            world.clock.at(when, head.cancel)
    return told + _schedule_slow_heads(scenario)


def _schedule_slow_heads(scenario: Scenario) -> list[str]:
    """In some seeds a head's way to each shard takes its own time, so that its word may come after what it led to elsewhere.

    A worker far down the pipeline dies then, as that is when a head speaks to others than the first. Drawn apart: what else goes
    wrong in a seed does not depend on it.
    """
    world, draw = scenario.world, random.Random(f"slow heads {scenario.world.seed}")
    told: list[str] = []
    for head in scenario.heads if draw.random() < 0.3 else ():
        first, *others = [placed.node for placed in head.generation.stages]
        most_s = draw.uniform(0.005, 0.06)
        delays_s = {node: most_s * draw.random() for node in world.shards if node != first or draw.random() < 0.3}
        _slow_head(world, head, delays_s)
        told.append(f"slow_head {int.from_bytes(head.node, 'big')} at 0")
        victims = [node for node in others[1:] if node in scenario.victims]
        if victims:
            victim, when = draw.choice(victims), draw.uniform(0.2, 0.5)
            told.append(f"worker {int.from_bytes(victim, 'big')} at {when:.4f}")
            world.clock.at(when, _fault(scenario, "worker", victim, 0.0, head.node))
    return told


def _slow_head(world: World, head: SimHead, delays_s: dict[bytes, float]) -> None:
    for node, seconds in delays_s.items():
        world.slow_link(head.node, node, seconds)


def _fault(scenario: Scenario, kind: str, victim: bytes, seconds: float, other: bytes) -> Callable[[], None]:
    world = scenario.world
    if kind == "cut" and seconds > 1.5:
        other = scenario.heads[0].node

    def act() -> None:
        if kind not in _HARMLESS:
            scenario.hit |= {victim, other} if kind in ("cut", "cut_one_way", "break") else {victim}
        shard, now = world.shards[victim], world.clock.now_s
        if kind in _OTHER_FAULTS:
            _OTHER_FAULTS[kind](scenario, shard, seconds, other)
        elif kind == "kill":
            shard.kill()
        elif kind == "restart":
            shard.kill()
            world.clock.after(seconds, lambda: world.restart(victim))
        elif kind == "worker":
            shard.kill_worker()
        elif kind == "freeze":
            shard.sleeper.frozen_until_s = now + seconds
        elif kind == "freeze_worker" and shard.worker is not None:
            shard.worker.sign_of_life_s = now
            shard.worker.sleeper.frozen_until_s = now + seconds
        elif kind == "cut":
            world.cut_link(victim, other, seconds)
        elif kind == "break":
            world.break_link(victim, other)
        elif kind == "slow":
            world.slow_link(victim, other, seconds / 100)
        elif kind == "doubles":
            world.doubles, world.doubled_after_s = 0.2, seconds

    return act


def _accuse(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    """Of somebody who can be replaced; he is then believed to be a liar, and so may the accuser be."""
    scenario.hit |= set(scenario.victims)
    shard.accuse(lambda node: node in scenario.victims)


def _restart_all(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    world = scenario.world
    scenario.hit |= set(world.shards)
    for node, each in list(world.shards.items()):
        each.kill()
        world.clock.after(seconds * world.random.random(), lambda node=node: world.restart(node))  # type: ignore[misc]


def _fill(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    if shard.worker is not None:
        shard.worker.full_until_s = scenario.world.clock.now_s + seconds


def _freeze_head(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    head = scenario.world.random.choice(scenario.heads)
    head.sleeper.frozen_until_s = scenario.world.clock.now_s + 4 * seconds


def _kill_head(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    scenario.world.random.choice(scenario.heads).kill()


def _repeat(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    scenario.world.eavesdropper, scenario.world.doubled_after_s = node_id(_ROGUE), seconds


def _cut_one_way(scenario: Scenario, shard: SimShard, seconds: float, other: bytes) -> None:
    scenario.world.cut_one_way(shard.node, other, seconds)


_OTHER_FAULTS: dict[str, Callable[[Scenario, SimShard, float, bytes], None]] = {
    "accuse": _accuse, "all": _restart_all, "full": _fill, "freeze_head": _freeze_head, "kill_head": _kill_head,
    "repeats": _repeat, "cut_one_way": _cut_one_way,
}  # fmt: skip


# ---------------------------------------------------------------- what must hold


def run_seed(
    seed: int, most_faults: int = 3, parts: Parts | None = None, tell: Callable[[str], None] | None = None
) -> Outcome:
    """One seed, start to end."""
    scenario = build(seed, parts)
    faults = schedule_faults(scenario, most_faults)
    world, heads = scenario.world, scenario.heads
    if tell is not None:
        world.tell = lambda text: tell(f"{world.clock.now_s:9.4f} {text}")
    world.on_ended = lambda head: world.clock.after(_FREED_WITHIN_S, lambda: _check_freed(scenario, head))
    for head in heads:
        world.clock.at(world.random.uniform(0.1, 0.15), head.start)
    _keep_house(scenario)
    is_done = world.clock.run(lambda: all(head.is_over for head in heads), 300.0)
    # Let closes arrive and frozen nodes wake up, then look at what is left.
    world.clock.run(lambda: False, world.clock.now_s + 10.0)
    if not is_done:
        scenario.problems.append(f"no end after 300 s: {[head.generation for head in heads]}")
    scenario.problems += [problem for head in heads if (problem := _text_problem(head))]
    scenario.problems += [problem for head in heads if (problem := _scores_problem(head))]
    scenario.problems += [problem for head in heads if (problem := _blame_problem(scenario, head))]
    scenario.problems += [problem for s in world.shards.values() if (problem := _suspicion_problem(scenario, s))]
    scenario.problems += [f"left behind: {s!r} {s.leftovers}" for s in world.shards.values() if s.leftovers]
    scenario.problems += world.contradictions
    pauses = [f.pause_ms / 1000 for head in heads for f in head.frames if isinstance(f, ShardFailover)]
    failovers = sum(head.generation.failovers for head in heads)
    return Outcome(seed, "; ".join(scenario.problems), failovers, faults, max(pauses, default=0.0), world.foreseen)


def _keep_house(scenario: Scenario) -> None:
    for shard in scenario.world.shards.values():
        shard.keep_house()
    scenario.world.clock.after(_HOUSEKEEPING_S, lambda: _keep_house(scenario))


def _check_freed(scenario: Scenario, head: SimHead) -> None:
    """A second after its end no shard that could hear of it knows the session any more, nor does its worker."""
    assert head.ended_s is not None
    world = scenario.world
    for shard in world.shards.values():
        could_hear = shard.sleeper.frozen_until_s <= head.ended_s and world.was_in_touch(
            head.node, shard.node, head.ended_s
        )
        is_worker_slow = shard.worker is not None and shard.worker.sleeper.frozen_until_s > head.ended_s
        if not shard.is_alive or not could_hear:
            continue
        known = [session for session in head.generation.sessions if shard.core.has_session(session)]
        kept = shard.worker.sessions.keys() & set(head.generation.sessions) if shard.worker is not None else set()
        if known or (kept and not is_worker_slow):
            scenario.problems.append(f"not freed within a second of the end: {shard!r}")


def _text_problem(head: SimHead) -> str:
    generated, expected, last = head.generation.generated, head.expected.tokens, head.frames[-1:]
    if not head.is_alive:
        return "" if generated == expected[: len(generated)] else f"text differs: {generated} instead of {expected}"
    if last and isinstance(last[0], Finished) and last[0].reason == "cancelled":
        expected = expected[: len(generated)]
    if generated != expected:
        return f"text differs: {generated} instead of {expected} ({last})"
    if not last or not isinstance(last[0], Finished | PipelineAborted):
        return f"the last frame is not an end: {last}"
    return ""


def _scores_problem(head: SimHead) -> str:
    """The prompt's scores come once, before the first token, and are the undisturbed ones; or never, where nobody asked."""
    told = [frame for frame in head.frames if isinstance(frame, PromptLogprobs | TokenDelta)]
    scores = [frame for frame in told if isinstance(frame, PromptLogprobs)]
    expected = head.expected.scores
    if expected is None or not told:
        last = head.frames[-1] if head.frames else None
        is_cancelled = not head.is_alive or (isinstance(last, Finished) and last.reason == "cancelled")
        return (
            "" if not scores and (expected is None or is_cancelled) else "scores are missing, or nobody asked for them"
        )
    if told[0] is not scores[0] or len(scores) != 1:
        return "the scores of the prompt do not come once and first"
    found = [(each.logprob, each.is_greedy, each.top) for each in scores[0].positions]
    return "" if found == [(e.logprob, e.is_greedy, e.top) for e in expected] else "the scores of the prompt differ"


def _blame_problem(scenario: Scenario, head: SimHead) -> str:
    """Nobody is called lost who was not hit by anything; a shard that is full may say so."""
    blamed = [f for f in head.frames if isinstance(f, ShardStatus) and not f.reason.startswith("refused")]
    innocent = [frame for frame in blamed if bytes.fromhex(frame.node) not in scenario.hit]
    return f"an innocent was blamed: {innocent[0]}" if innocent else ""


def _suspicion_problem(scenario: Scenario, shard: SimShard) -> str:
    """Members hear of losses, and of nobody who was not hit by anything."""
    innocent = [node for node in shard.suspects if node not in scenario.hit]
    return f"an innocent is suspect: {int.from_bytes(innocent[0], 'big')}" if innocent else ""


def run_seeds(seeds: Sequence[int], most_faults: int = 3, parts: Parts | None = None) -> list[Outcome]:
    return [run_seed(seed, most_faults, parts) for seed in seeds]


def repeat_command(seed: int) -> str:
    return f"python -m potluck.testing.simulation {seed}"


def main() -> None:
    """Each seed of the command line, told message by message."""
    for argument in sys.argv[1:]:
        outcome = run_seed(int(argument), tell=print)
        print(f"seed {outcome.seed}: {outcome.problem or 'all promises kept'}")
        print(f"  faults: {'; '.join(outcome.faults) or 'none'}")
        print(f"  {outcome.failovers} failovers, longest pause {outcome.longest_pause_s:.3f} s")


if __name__ == "__main__":
    main()
