"""How fast news reaches a swarm and what that costs: the real membership code of every node, on simulated time."""

import gc
from collections import Counter
from collections.abc import Callable

import msgspec

from potluck.testing.simulated_membership import ChurnReport, SimulatedNode, SimulatedSwarm, churn

Say = Callable[[str], None]
_LIMIT_S = 180.0  # longer than an advert lives: what is not known by then never will be
_PARTITION_S = 30.0


class SwarmBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int = 100
    seed: int = 0
    steady_s: float = 60.0
    churn_minutes: float = 5.0
    churn_share_per_minute: float = 0.1


class SwarmReport(msgspec.Struct, frozen=True):
    """All times are simulated seconds until every node knows; a limit of 180 s means never."""

    nodes: int
    seed: int
    cold_start_s: float
    join_s: float
    death_s: float  # the process is killed
    unplugged_s: float  # nobody is told
    leave_s: float
    expulsion_s: float
    heal_s: float  # after a partition of 30 s
    bytes_per_node_s: float
    messages_per_node_s: float
    links_per_node: float
    churn: ChurnReport
    refused: dict[str, int]


def bench_swarm(settings: SwarmBenchSettings, say: Say) -> SwarmReport:
    """Everything on one swarm, one after the other."""
    was_enabled = gc.isenabled()
    gc.disable()  # a thousand nodes hold millions of records, none of them in cycles
    try:
        return _measure(settings, say)
    finally:
        if was_enabled:
            gc.enable()


def _measure(settings: SwarmBenchSettings, say: Say) -> SwarmReport:
    swarm = SimulatedSwarm(settings.nodes, settings.seed, keeps_events=False)
    say(f"starting {settings.nodes} nodes at once")
    swarm.start_all()
    cold_start_s = swarm.run_until(swarm.is_converged, _LIMIT_S, 0.25)
    links = sum(len(node.links) for node in swarm.up()) / settings.nodes
    say("nothing happens")
    sent_bytes, messages = swarm.traffic(settings.steady_s)
    say("one joins, and one each is killed, unplugged, leaves, is expelled")
    join_s = _join(swarm)
    death_s, unplugged_s, leave_s = (_goes(swarm, how) for how in (swarm.kill, swarm.unplug, swarm.leave))
    expulsion_s = _expulsion(swarm)
    say(f"two halves do not reach each other for {_PARTITION_S:.0f} s")
    heal_s = _heal(swarm)
    say(
        f"{settings.churn_share_per_minute:.0%} of the nodes go and come each minute, for {settings.churn_minutes:g} minutes"
    )
    report = churn(swarm, settings.churn_minutes, settings.churn_share_per_minute)
    refused: Counter[str] = Counter()
    for node in swarm.up():
        refused.update(node.membership.gossip.counters if node.membership is not None else {})
    return SwarmReport(
        settings.nodes, settings.seed, cold_start_s, join_s, death_s, unplugged_s, leave_s, expulsion_s, heal_s, sent_bytes,
        messages, links, report, dict(refused),
    )  # fmt: skip


def _join(swarm: SimulatedSwarm) -> float:
    newcomer = swarm.new_machine()
    swarm.start(newcomer)
    return swarm.run_until(
        lambda: swarm.all_know(newcomer) and swarm.seen_by(newcomer) == swarm.seen_by(swarm.founder), _LIMIT_S
    )


def _goes(swarm: SimulatedSwarm, how: Callable[[SimulatedNode], None]) -> float:
    victim = swarm.random.choice([node for node in swarm.up() if node is not swarm.founder])
    how(victim)
    took_s = swarm.run_until(lambda: swarm.none_knows(victim), _LIMIT_S)
    swarm.run(1.0)
    return took_s


def _expulsion(swarm: SimulatedSwarm) -> float:
    victim = swarm.random.choice([node for node in swarm.up() if node is not swarm.founder])
    swarm.expel(victim)
    took_s = swarm.run_until(lambda: swarm.none_knows(victim), _LIMIT_S, 0.01)
    swarm.kill(victim)
    return took_s


def _heal(swarm: SimulatedSwarm) -> float:
    swarm.partition({node.id for node in swarm.up()[::2]})
    swarm.run(_PARTITION_S)
    swarm.heal()
    return swarm.run_until(swarm.is_converged, _LIMIT_S)
