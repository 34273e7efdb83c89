"""The real membership code of many nodes on simulated time: 10 and 100 nodes here, with POTLUCK_LONG=1 also 1,000 and an hour of churn.

`potluck bench swarm --nodes N` prints the same figures. The bounds are on simulated seconds.
"""

import os

import msgspec
import pytest

from potluck.bench.swarm import SwarmBenchSettings, bench_swarm
from potluck.swarm.adverts import ADVERT_LIFETIME_S
from potluck.testing.simulated_membership import SimulatedSwarm

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))


class Bounds(msgspec.Struct):
    join_s: float
    death_s: float
    unplugged_s: float
    bytes_per_node_s: float


BOUNDS = {10: Bounds(1.0, 1.5, 9.0, 400), 100: Bounds(2.0, 4.0, 12.0, 2000), 1000: Bounds(6.0, 12.0, 20.0, 16_000)}
CHURN_MINUTES = {10: 60.0, 100: 60.0, 1000: 60.0} if IS_LONG else {10: 15.0, 100: 1.0}
SIZES = (10, 100, 1000) if IS_LONG else (10, 100)


@pytest.mark.parametrize("nodes", SIZES)
def test_news_reaches_all_and_no_ghost_is_left(nodes: int) -> None:
    settings = SwarmBenchSettings(nodes=nodes, churn_minutes=CHURN_MINUTES[nodes], steady_s=60.0)
    report, bounds = bench_swarm(settings, print), BOUNDS[nodes]
    print(report)
    assert report.join_s <= bounds.join_s
    assert report.death_s <= bounds.death_s
    assert report.unplugged_s <= bounds.unplugged_s
    assert report.leave_s <= bounds.join_s
    assert report.expulsion_s <= bounds.join_s
    assert report.heal_s <= 5.0
    assert report.bytes_per_node_s <= bounds.bytes_per_node_s
    assert report.churn.went >= 0.09 * nodes * settings.churn_minutes
    assert report.churn.ghosts == 0
    assert report.churn.is_converged


@pytest.mark.parametrize("seed", range(30 if IS_LONG else 3))
@pytest.mark.parametrize("nodes", [5, 20, 40])
def test_a_partition_heals_within_five_seconds(nodes: int, seed: int) -> None:
    swarm = SimulatedSwarm(nodes, seed)
    swarm.start_all()
    assert swarm.run_until(swarm.is_converged, 10.0) < 5.0
    side = {node.id for node in swarm.up() if swarm.random.random() < 0.5} - {swarm.founder.id}
    swarm.partition(side)
    swarm.run(swarm.random.choice((4.0, 30.0, 200.0)))
    swarm.heal()
    assert swarm.run_until(swarm.is_converged, 30.0) <= 5.0


def test_nobody_is_called_lost_while_nothing_happens() -> None:
    swarm = SimulatedSwarm(40, 3)
    swarm.start_all()
    swarm.run_until(swarm.is_converged, 10.0)
    swarm.run(600.0 if IS_LONG else 130.0)  # longer than an advert lives
    told = {event.kind for node in swarm.up() for _, event in node.events}
    assert told == {"joined"}
    assert all(not node.membership.gossip.counters for node in swarm.up() if node.membership is not None)


def test_a_machine_that_comes_back_with_the_same_key_is_no_duplicate() -> None:
    swarm = SimulatedSwarm(8, 4)
    swarm.start_all()
    swarm.run(10.0)
    victim = swarm.up()[3]
    for gone_s in (0.1, 3.0, 50.0, 200.0):
        swarm.kill(victim)
        swarm.run(gone_s)
        swarm.start(victim)
        assert swarm.run_until(swarm.is_converged, 30.0) < 5.0
        swarm.run(30.0)
    assert not any(event.kind == "duplicate" for node in swarm.up() for _, event in node.events)


def test_the_founder_is_not_needed() -> None:
    swarm = SimulatedSwarm(8, 5)
    swarm.start_all()
    swarm.run(10.0)
    swarm.kill(swarm.founder)
    other = swarm.up()[2]
    swarm.kill(other)
    swarm.run(30.0)
    swarm.start(other)
    assert swarm.run_until(swarm.is_converged, 30.0) < 5.0


def test_the_simulation_notices_ghosts() -> None:
    """A swarm whose nodes never forget: what the other tests look for can be found."""
    swarm = SimulatedSwarm(6, 6)
    swarm.start_all()
    swarm.run(5.0)
    victim = swarm.up()[-1]
    for node in swarm.up():
        node.membership.gossip.store.expire = lambda now_s: []
        node.membership.gossip.presence._lose = lambda *_: None
    swarm.unplug(victim)
    swarm.run(ADVERT_LIFETIME_S + 20.0)
    assert swarm.ghosts(swarm.founder) == [victim]
    assert not swarm.is_converged()
