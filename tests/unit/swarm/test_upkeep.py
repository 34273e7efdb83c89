"""Fetching, loading, draining and dropping in the right order; random plans never leave a layer without a holder."""

import itertools
import random

from potluck.swarm.upkeep import Action, Deed, Held, ShardPhase, next_actions
from potluck.wire.messages import Stage

ALL, FIRST, LAST = Stage(0, 30, True, True), Stage(0, 15, True, False), Stage(15, 30, False, True)


def decide(
    wanted: Stage | None, *held: Held, weights: bool = True, elsewhere: bool = True, fetching: Stage | None = None
) -> list[Action]:
    return next_actions(
        wanted, held, has_weights=lambda stage: weights, is_served_elsewhere=lambda stage: elsewhere, fetching=fetching
    )


def test_weights_are_fetched_first_and_once() -> None:
    assert decide(FIRST, weights=False) == [Action(Deed.FETCH, FIRST)]
    assert decide(FIRST, weights=False, fetching=FIRST) == []
    assert decide(FIRST) == [Action(Deed.LOAD, FIRST)]


def test_the_old_range_is_kept_until_the_new_one_serves() -> None:
    old = Held(ALL, ShardPhase.SERVING, 2)
    assert decide(FIRST, old) == [Action(Deed.LOAD, FIRST)]
    assert decide(FIRST, old, Held(FIRST, ShardPhase.LOADING, 0)) == []
    assert decide(FIRST, old, Held(FIRST, ShardPhase.SERVING, 0)) == [Action(Deed.DRAIN, ALL)]


def test_nothing_is_given_up_that_nobody_else_serves() -> None:
    old, new = Held(ALL, ShardPhase.SERVING, 0), Held(FIRST, ShardPhase.SERVING, 0)
    assert decide(FIRST, old, new, elsewhere=False) == []
    assert decide(None, old, elsewhere=False) == []
    assert decide(ALL, Held(ALL, ShardPhase.SERVING, 0), Held(FIRST, ShardPhase.SERVING, 0), elsewhere=False) == [
        Action(Deed.DRAIN, FIRST)  # all of it is in the wider one
    ]


def test_a_drained_shard_is_dropped_when_its_last_session_ends() -> None:
    assert decide(FIRST, Held(ALL, ShardPhase.DRAINING, 1), Held(FIRST, ShardPhase.SERVING, 0)) == []
    assert decide(FIRST, Held(ALL, ShardPhase.DRAINING, 0), Held(FIRST, ShardPhase.SERVING, 0)) == [
        Action(Deed.DROP, ALL)
    ]


def test_a_draining_shard_that_is_wanted_again_resumes() -> None:
    assert decide(FIRST, Held(FIRST, ShardPhase.DRAINING, 1)) == [Action(Deed.RESUME, FIRST)]
    # Without sessions it is dropped and loaded anew.
    assert decide(FIRST, Held(FIRST, ShardPhase.DRAINING, 0)) == [Action(Deed.DROP, FIRST), Action(Deed.LOAD, FIRST)]


class Swarm:
    """Nodes that follow random plans, each at its own pace; whoever serves a layer must never all give it up."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.held: list[dict[Stage, ShardPhase]] = [{ALL: ShardPhase.SERVING}, {}, {}]
        self.wanted: list[Stage | None] = [ALL, None, None]

    def new_plan(self) -> None:
        cuts = sorted(self.chance.sample(range(1, 30), 2))
        edges = [0, *cuts, 30]
        stages: list[Stage | None] = [Stage(a, b, a == 0, b == 30) for a, b in itertools.pairwise(edges)]
        if self.chance.random() < 0.3:
            stages = [ALL, None, None]
        self.chance.shuffle(stages)
        self.wanted = stages

    def served(self, stage: Stage, except_for: int | None) -> bool:
        serving = [
            other
            for number, shards in enumerate(self.held)
            if number != except_for
            for other, phase in shards.items()
            if phase is ShardPhase.SERVING
        ]
        layers = all(any(s.start <= layer < s.stop for s in serving) for layer in range(stage.start, stage.stop))
        embedding = not stage.has_embedding or any(s.has_embedding for s in serving)
        return layers and embedding and (not stage.has_output or any(s.has_output for s in serving))

    def turn(self, number: int) -> None:
        shards = self.held[number]
        for stage, phase in list(shards.items()):
            if phase is ShardPhase.LOADING and self.chance.random() < 0.5:
                shards[stage] = ShardPhase.SERVING
        held = [Held(stage, phase, self.chance.randrange(2)) for stage, phase in shards.items()]
        actions = next_actions(
            self.wanted[number], held, has_weights=lambda stage: True,
            is_served_elsewhere=lambda stage: self.served(stage, number), fetching=None,
        )  # fmt: skip
        for action in actions:
            if action.deed is Deed.DROP:
                del shards[action.stage]
            else:
                shards[action.stage] = {
                    Deed.LOAD: ShardPhase.LOADING, Deed.DRAIN: ShardPhase.DRAINING, Deed.RESUME: ShardPhase.SERVING,
                }[action.deed]  # fmt: skip


def test_no_layer_is_ever_without_a_holder_and_every_plan_is_reached() -> None:
    for seed in range(60):
        swarm = Swarm(seed)
        for _ in range(10):
            swarm.new_plan()
            for _ in range(60):
                swarm.turn(swarm.chance.randrange(3))
                assert swarm.served(ALL, None), f"seed {seed}"
            for _ in range(40):
                for number in range(3):
                    swarm.turn(number)
            wanted = [{stage} if stage is not None else set() for stage in swarm.wanted]
            assert [set(shards) for shards in swarm.held] == wanted, f"seed {seed}"
