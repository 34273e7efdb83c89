"""Several hosts with addresses of their own, found by mDNS: split, take over, pull a cable in the middle of an answer, part and heal."""

import time
from pathlib import Path

import pytest

from potluck.testing.namespaces import Hosts, why_not
from potluck.testing.real_swarm import RealSwarm, real_swarm

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

QUESTION = "Write two sentences about soup."
LIMIT = ("--max-layers", "16")


class HostSwarm:
    """A swarm with one node on each host."""

    def __init__(self, hosts: Hosts, swarm: RealSwarm) -> None:
        self.hosts, self._swarm = hosts, swarm
        self.first = swarm.up("host-0", *LIMIT, on_host=lambda command: hosts.command(0, command))
        self.nodes = [self.first]

    def add(self, number: int):
        invite = self.first.command("invite")["invite"]
        node = self._swarm.join(
            f"host-{number}", invite, *LIMIT, on_host=lambda command: self.hosts.command(number, command)
        )
        self.nodes.append(node)
        return node

    def sees(self, node, count: int) -> bool:
        return sum(each["state"] == "online" for each in node.state()["nodes"]) == count

    def least_holders(self, node) -> int:
        """How many hosts serve the layer that the fewest serve, as a node sees it."""
        shards = [shard for each in node.state()["nodes"] if each["state"] == "online" for shard in each["shards"]]
        serving = [shard for shard in shards if shard["state"] == "serving"]
        return min(sum(shard["first"] <= layer <= shard["last"] for shard in serving) for layer in range(30))


@pytest.fixture
def hosts(tmp_path: Path, models_home: Path):
    with Hosts(4) as made, real_swarm(tmp_path, models_home) as swarm:
        yield HostSwarm(made, swarm)


def test_three_hosts_form_a_swarm_a_fourth_takes_over_and_a_pulled_cable_changes_nothing(hosts: HostSwarm) -> None:
    first = hosts.first
    second, third = hosts.add(1), hosts.add(2)
    first.wait(lambda: first.can_answer() and hosts.sees(first, 3), 60)
    # Everybody reaches everybody, though only the first was named in the invites.
    second.wait(lambda: hosts.sees(second, 3) and hosts.sees(third, 3), 30)
    expected = first.ask(QUESTION, 80)
    hosts.add(3)
    first.wait(lambda: hosts.sees(first, 4), 30)
    first.wait(lambda: hosts.least_holders(first) >= 2, 60)  # the fourth stands by for what one host alone had
    answer = first.stream(QUESTION, 80)
    answer.wait_for_pieces(5)
    used = [stage["node"] for request in first.state()["requests"] for stage in request["stages"]]
    victims = [number for number, node in enumerate(hosts.nodes) if node.node in used and number > 0]
    assert victims, "the answer uses other hosts"
    hosts.hosts.unplug(victims[0])
    assert answer.finish() == expected
    print(f"pause when the cable was pulled: {answer.longest_pause_s:.2f} s")
    assert answer.longest_pause_s <= 3.0


def test_parted_and_healed_hosts_know_each_other_again_within_five_seconds(hosts: HostSwarm) -> None:
    first, second, third = hosts.first, hosts.add(1), hosts.add(2)
    first.wait(lambda: all(hosts.sees(node, 3) for node in (first, second, third)), 60)
    hosts.hosts.part([[0, 1], [2]])
    first.wait(lambda: hosts.sees(first, 2) and hosts.sees(third, 1), 60)
    hosts.hosts.part([[0, 1, 2]])
    healed_s = time.monotonic()
    first.wait(lambda: all(hosts.sees(node, 3) for node in (first, second, third)), 30)
    taken_s = time.monotonic() - healed_s
    print(f"healed after {taken_s:.1f} s")
    assert taken_s <= 5.0 + 1.5, "the looking itself takes a second"
