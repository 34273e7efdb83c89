"""The split of a model of a real one's size: 1.5B parameters with random weights, two shards against the unsplit model, decode only.

The model lies in a store of its own in the cache folder, so that nobody's list of models shows it.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

from potluck.bench.own_engine import ModelFile, OwnEngine, token_ids
from potluck.bench.pipeline import DecodeRounds, LargeSplit, connected
from potluck.bench.random_model import RandomShape, random_model
from potluck.net.loop import run
from potluck.testing.local_swarm import LocalSwarm, split_plan
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore

_SHARDS, _PROMPT_TOKENS = 2, 8


def bench_large_split(
    cache_folder: Path, launches: int, rounds: int, tokens: int, say: Callable[[str], None]
) -> LargeSplit:
    """`rounds` of each launch of the nodes."""
    path = random_model(cache_folder / "bench", RandomShape(), "Q4_0", say)
    home = cache_folder / "bench" / "home"
    store = ModelStore(home / "models")
    entry = Puller(store).pull(str(path), RandomShape().name, is_linked=True).entry
    file = ModelFile(store.path(entry.id), entry.weights_sha256, store.packed_folder(entry.id))
    plan = split_plan(entry.layer_count, _SHARDS, 0)
    measured = DecodeRounds()
    with OwnEngine(file, 1) as ours:
        for launch in range(launches):
            say(f"{entry.id}: {_SHARDS} shards against the unsplit model, launch {launch + 1} of {launches}")
            with LocalSwarm(entry.id, plan, home, cache_folder) as swarm:
                run(_compare(entry.id, ours, swarm, measured, rounds, tokens))
    alone, together = statistics.median(measured.unsplit), statistics.median(measured.split)
    return LargeSplit(entry.id, measured.ratio, alone, together, measured.hop(_SHARDS))


async def _compare(
    model: str, ours: OwnEngine, swarm: LocalSwarm, measured: DecodeRounds, rounds: int, tokens: int
) -> None:
    prompt = token_ids(_PROMPT_TOKENS, ours.facts.vocabulary_size)
    async with connected(swarm, model) as head:
        await head.tokens(prompt, 4)
        for _ in range(rounds):
            await measured.measure(ours, head, prompt, tokens)
