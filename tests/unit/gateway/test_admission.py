"""Who starts, who waits, who is sent away: tiers, fairness, bounds, and that a completion names the next at once."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.core.errors import Overloaded, QueueFull
from potluck.gateway.admission import Admission, AdmissionSettings, Tier
from potluck.gateway.gate import Gate
from potluck.gateway.responding import ServiceSettings
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import MESSAGES, app_of, post


def admission(**changes: int) -> Admission:
    return Admission(AdmissionSettings(**{"max_concurrent_requests": 8, "max_waiting": 16, **changes}))


@pytest.mark.parametrize(("tier", "most"), [(Tier.BRONZE, 2), (Tier.SILVER, 4), (Tier.GOLD, 8), (Tier.PLATINUM, 16)])
def test_each_tier_starts_up_to_its_share_and_then_waits(tier: Tier, most: int) -> None:
    queue = admission()
    outcomes = [queue.arrive(ticket, "a", tier, 1, 0.0).outcome for ticket in range(most + 1)]
    assert outcomes == ["start"] * most + ["wait"]


@pytest.mark.parametrize("tier", list(Tier))
def test_no_tier_gets_past_the_sessions_that_there_are(tier: Tier) -> None:
    queue = admission(max_sessions=2)
    outcomes = [queue.arrive(ticket, "a", tier, 1, 0.0).outcome for ticket in range(4)]
    assert outcomes == ["start", "start", "wait", "wait"]


@pytest.mark.parametrize("most", [1, 3])
def test_choices_of_one_request_share_the_sessions_that_there_are(most: int) -> None:
    answering = MemoryAnswering()
    limits = ServiceSettings(admission=AdmissionSettings(max_sessions=most))
    body = {"model": "memory", "messages": MESSAGES, "n": 4}
    response = post(app_of(answering, limits), "/v1/chat/completions", body)
    assert (response.status_code, len(response.json()["choices"])) == (200, 4)
    assert answering.model.most_running == most


def test_a_completion_starts_the_next_at_once() -> None:
    queue = admission(max_concurrent_requests=1)
    assert [queue.arrive(t, "a", Tier.GOLD, 1, 0.0).outcome for t in range(3)] == ["start", "wait", "wait"]
    assert queue.leave(0, 1.0) == [1]
    assert queue.leave(1, 2.0) == [2]
    assert queue.leave(2, 3.0) == []


def test_clients_take_turns_however_many_requests_one_has_sent() -> None:
    queue = admission(max_concurrent_requests=1)
    for ticket in range(5):
        queue.arrive(ticket, "greedy", Tier.GOLD, 1, 0.0)
    queue.arrive(5, "modest", Tier.GOLD, 1, 0.0)
    order, running = [], 0
    for _ in range(5):
        [running] = queue.leave(running, 1.0)
        order.append(running)
    assert order == [1, 5, 2, 3, 4]


def test_where_too_many_wait_the_next_is_refused_with_a_time() -> None:
    queue = admission(max_concurrent_requests=1, max_waiting=2)
    verdicts = [queue.arrive(ticket, f"client {ticket}", Tier.GOLD, 1, 0.0) for ticket in range(4)]
    assert [verdict.outcome for verdict in verdicts] == ["start", "wait", "wait", "refuse"]
    assert 1 <= verdicts[-1].retry_after_s <= 60


def test_one_client_cannot_fill_the_whole_queue() -> None:
    queue = admission(max_concurrent_requests=1, max_waiting_per_client=2)
    outcomes = [queue.arrive(ticket, "greedy", Tier.GOLD, 1, 0.0).outcome for ticket in range(4)]
    assert outcomes == ["start", "wait", "wait", "refuse"]
    assert queue.arrive(9, "modest", Tier.GOLD, 1, 0.0).outcome == "wait"


def test_a_higher_tier_is_not_held_up_by_a_lower_one_that_waits() -> None:
    queue = admission()
    for ticket in range(3):
        queue.arrive(ticket, "bronze", Tier.BRONZE, 1, 0.0)
    assert queue.arrive(3, "gold", Tier.GOLD, 1, 0.0).outcome == "start"


def test_a_request_larger_than_everything_runs_alone() -> None:
    queue = admission(max_concurrent_requests=2)
    assert queue.arrive(0, "a", Tier.GOLD, 4, 0.0).outcome == "start"
    assert queue.arrive(1, "a", Tier.GOLD, 1, 0.0).outcome == "wait"


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["arrive", "leave", "give_up"]), st.sampled_from("abc"), st.sampled_from(Tier), st.integers(1, 4)),
    max_size=80,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # it measures how busy the machine is, not the test
@given(_ACTIONS)
def test_whatever_happens_bounds_hold_and_nobody_is_forgotten(actions) -> None:
    queue = admission(max_concurrent_requests=4, max_waiting=6)
    running: list[int] = []
    waiting: list[int] = []

    def started(tickets: list[int]) -> None:
        for ticket in tickets:
            waiting.remove(ticket)
            running.append(ticket)

    for ticket, (action, client, tier, cost) in enumerate(actions):
        if action == "arrive":
            outcome = queue.arrive(ticket, client, tier, cost, float(ticket)).outcome
            {"start": running, "wait": waiting, "refuse": []}[outcome].append(ticket)
        elif action == "leave" and running:
            started(queue.leave(running.pop(0), float(ticket)))
        elif action == "give_up" and waiting:
            started(queue.give_up(waiting.pop(0), float(ticket)))
        assert (queue.running_count, queue.waiting_count) == (len(running), len(waiting))
        assert len(waiting) <= 6
        assert running or not waiting  # whoever waits, waits for somebody
    while running:
        started(queue.leave(running.pop(0), 1e6))
    assert waiting == []


def test_the_gate_wakes_sleepers_and_forgets_those_who_leave() -> None:
    async def use() -> list[str]:
        gate = Gate(AdmissionSettings(max_concurrent_requests=1, max_waiting=3, patience_s=60))
        told: list[str] = []

        async def enter(name: str, leave: asyncio.Event) -> None:
            async with gate.turn(name, Tier.GOLD, 1):
                told.append(name)
                await leave.wait()

        leave = asyncio.Event()
        tasks = [asyncio.create_task(enter(name, leave)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.admission.running_count, gate.admission.waiting_count) == (0, 0)
        return told

    assert asyncio.run(use()) == ["a", "c"]


def test_the_gate_refuses_when_full_and_gives_up_when_the_turn_does_not_come() -> None:
    async def use() -> None:
        gate = Gate(AdmissionSettings(max_concurrent_requests=1, max_waiting=1, patience_s=0.01))
        async with gate.turn("a", Tier.GOLD, 1):
            waiting = asyncio.create_task(gate.turn("b", Tier.GOLD, 1).__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(QueueFull) as refused:
                await gate.turn("c", Tier.GOLD, 1).__aenter__()
            assert refused.value.code == "queue_full"
            with pytest.raises(Overloaded):
                await waiting
        assert (gate.admission.running_count, gate.admission.waiting_count) == (0, 0)

    asyncio.run(use())
