"""How long a question is worth holding back while a swarm gets ready."""

import msgspec
import pytest

from potluck.cli.running import worth_waiting_s
from potluck.gateway.page_state import PageState
from potluck.testing.scripted_swarm import LARGE, SMALL, ScriptedSwarm, node_id


def state_of(swarm: ScriptedSwarm) -> PageState:
    return swarm.state("http://127.0.0.1:7470", False)


def without_models(state: PageState) -> PageState:
    return msgspec.structs.replace(state, models=())


@pytest.mark.parametrize("model", [None, SMALL, "no-such-model"])
def test_nothing_is_waited_for_where_there_is_an_answer_or_never_will_be(model: str | None) -> None:
    assert worth_waiting_s(state_of(ScriptedSwarm()), model) == 0


def test_layers_that_are_on_their_way_are_waited_for_longer_than_those_that_may_come() -> None:
    swarm = ScriptedSwarm()
    may_come_s = worth_waiting_s(state_of(swarm), LARGE)  # the large model has a gap, and nobody loads
    swarm.kill_worker(node_id(2))
    assert 0 < may_come_s < worth_waiting_s(state_of(swarm), LARGE)


def test_a_swarm_that_has_just_begun_and_knows_no_model_is_given_a_moment() -> None:
    assert worth_waiting_s(without_models(state_of(ScriptedSwarm())), None) > 0
