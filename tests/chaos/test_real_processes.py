"""Shards killed and stopped in real processes, over TLS: every text identical, pauses short, nothing left behind.

22 answers here, 200 with POTLUCK_LONG=1, dealt so that every kind of blow, moment, stage and configuration has its turn, and every
one of them felt. `potluck bench chaos` deals in the same way and prints the distribution.
"""

import asyncio
import gc
import os
import random
import statistics
from pathlib import Path

import pytest

from potluck.bench.chaos import ChaosSettings, DisturbedRun, summary, told
from potluck.core.grammar import Grammar
from potluck.net.loop import run
from potluck.testing.chaos import ChaosHead, Configuration, Hand, deal
from potluck.testing.local_swarm import LocalSwarm, split_plan
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.store import ModelStore
from potluck.wire.messages import Codec
from tests.support.chaos_runs import DEFAULT_COUNTS, LONG_COUNTS, SEED
from tests.support.swarms import open_handles, resident_bytes, stored_tiny

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))
COUNTS = LONG_COUNTS if IS_LONG else DEFAULT_COUNTS
LARGE_COUNT = 20 if IS_LONG else 4
HELD_COUNT = 40 if IS_LONG else 5
CODECS: tuple[Codec, ...] = ("fp32", "int8")
TRIES = 5  # the last of them strikes in the first sixteenth of what the first one had to choose from
MEGABYTE = 1 << 20


class Held:
    """What this process and the daemons hold: handles, memory. Daemons that were restarted meanwhile are new, and not compared."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.pids = [os.getpid(), *(node.pid for node in swarm.nodes if node.is_alive)]
        self.handles = {pid: open_handles(pid) for pid in self.pids}
        self.bytes = {pid: resident_bytes(pid) for pid in self.pids}

    def check(self, later: "Held", peers: int) -> None:
        for pid in set(self.pids) & set(later.pids):
            # A daemon keeps its links to nodes that it has met, one in each direction; this process must keep none.
            links = 0 if pid == os.getpid() else 2 * peers
            assert later.handles[pid] <= self.handles[pid] + links, f"file handles of {pid}"
            assert later.bytes[pid] <= self.bytes[pid] + 48 * MEGABYTE, f"memory of {pid}"


async def played(head: ChaosHead, hand: Hand, shards: int) -> list[DisturbedRun]:
    """One answer that felt all its blows; before it those that were over too soon, each with its blows earlier than the last."""
    runs: list[DisturbedRun] = []
    expected = await head.reference(hand.configuration)
    while len(runs) < TRIES:
        outcome = await head.disturbed(hand.configuration, hand.blows)
        is_identical = outcome.said == expected.said
        runs.append(DisturbedRun(shards, hand.configuration, hand.blows, outcome, is_identical))
        print(told(runs[-1]))
        await head.heal()
        if outcome.has_felt(hand.blows) or not is_identical:
            break
        hand = hand.earlier()
    return runs


async def all_runs(settings: ChaosSettings, swarm: LocalSwarm, shards: int, hands: list[Hand]) -> list[DisturbedRun]:
    draw = random.Random(f"{settings.seed}/{shards}")
    prompt = [1 + draw.randrange(400) for _ in range(settings.prompt_tokens)]
    async with ChaosHead.on(swarm, settings.model, prompt, settings.max_tokens) as head:
        await head.heal()
        runs = [each for hand in hands for each in await played(head, hand, shards)]
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert others == [], "tasks are left"
    return runs


def disturb(settings: ChaosSettings, shards: int, hands: list[Hand]) -> list[DisturbedRun]:
    plan = split_plan(settings.layer_count, shards, settings.spares)
    with LocalSwarm(settings.model, plan, settings.home) as swarm:
        run(all_runs(settings, swarm, shards, hands[:1]))  # everything is warm, links stand
        gc.collect()
        before = Held(swarm)
        runs = run(all_runs(settings, swarm, shards, hands))  # heal() has seen to it that no shard has a session left
        gc.collect()
        before.check(Held(swarm), len(swarm.nodes))
        pids = [node.pid for node in swarm.nodes]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "processes are left"
    return runs


@pytest.fixture(scope="module")
def pauses() -> list[float]:
    """Of all failovers in this file; every one had a loaded spare."""
    return []


def check(settings: ChaosSettings, runs: list[DisturbedRun], count: int, pauses: list[float]) -> None:
    report = summary(settings, runs)
    print(
        f"\n{report.identical} of {report.kills} identical, {report.signals} signals, pause p50 {report.pause_p50_ms} ms"
    )
    assert report.identical == report.kills, "\n".join(told(each) for each in runs if not each.is_identical)
    felt = [each for each in runs if each.outcome.has_felt(each.blows)]
    assert len(felt) == count, "\n".join(told(each) for each in runs)  # it did go wrong, every time and as it was dealt
    pauses += [pause for each in runs for pause in each.outcome.pauses_ms]


@pytest.mark.parametrize("shards", COUNTS)
def test_text_is_identical_whatever_is_killed_or_stopped(shards: int, models_home: Path, pauses: list[float]) -> None:
    entry = stored_tiny(models_home)
    settings = ChaosSettings(model=entry.id, layer_count=entry.layer_count, seed=SEED, home=models_home)
    hands = deal(random.Random(SEED), COUNTS)[shards]
    check(settings, disturb(settings, shards, hands), len(hands), pauses)


def test_text_of_a_real_model_is_identical_too(models_home: Path, pauses: list[float]) -> None:
    entry = ModelStore(models_home / "models").find(DEFAULT_MODEL_ID)
    settings = ChaosSettings(
        model=entry.id,
        layer_count=entry.layer_count,
        seed=8,
        home=models_home,
        spares=1,
        prompt_tokens=96,
        max_tokens=32,
    )
    hands = deal(random.Random(settings.seed), {2: LARGE_COUNT})[2]
    check(settings, disturb(settings, 2, hands), len(hands), pauses)


def test_grammars_and_log_probabilities_are_identical_too(models_home: Path, pauses: list[float]) -> None:
    entry = stored_tiny(models_home)
    grammar = Grammar("regex", "([a-z]{1,6} ){2,40}[0-9]{2,5}")
    ways = tuple(Configuration(0.8, uses_ring, codec, grammar, 3) for uses_ring in (True, False) for codec in CODECS)
    settings = ChaosSettings(
        model=entry.id, layer_count=entry.layer_count, seed=9, home=models_home, configurations=ways
    )
    hands = deal(random.Random(settings.seed), {3: HELD_COUNT}, ways)[3]
    check(settings, disturb(settings, 3, hands), len(hands), pauses)


def test_with_a_loaded_spare_the_median_pause_is_under_a_second(pauses: list[float]) -> None:
    assert len(pauses) >= 10
    print(f"\n{len(pauses)} pauses: median {statistics.median(pauses):.0f} ms, longest {max(pauses):.0f} ms")
    assert statistics.median(pauses) < 1000
