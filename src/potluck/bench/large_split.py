"""The split of a model of a real one's size: 1.5B parameters with random weights, two shards against the unsplit model, decode only.

The model lies in a store of its own in the cache folder, so that nobody's list of models shows it.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

from potluck.bench.own_engine import ModelFile, OwnEngine, token_ids
from potluck.bench.pipeline import LargeSplit, connected, hop_figures, ratio_of, speed_of
from potluck.bench.random_model import RandomShape, random_model
from potluck.net.loop import run
from potluck.orchestrator.generation import StepTiming
from potluck.testing.local_swarm import LocalSwarm, split_plan
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore

_SHARDS, _PROMPT_TOKENS = 2, 8


def bench_large_split(cache_folder: Path, rounds: int, tokens: int, say: Callable[[str], None]) -> LargeSplit:
    path = random_model(cache_folder / "bench", RandomShape(), "Q4_0", say)
    home = cache_folder / "bench" / "home"
    store = ModelStore(home / "models")
    entry = Puller(store).pull(str(path), RandomShape().name, is_linked=True).entry
    file = ModelFile(store.path(entry.id), entry.weights_sha256, store.packed_folder(entry.id))
    plan = split_plan(entry.layer_count, _SHARDS, 0)
    say(f"{entry.id}: {_SHARDS} shards against the unsplit model")
    with OwnEngine(file, 1) as ours, LocalSwarm(entry.id, plan, home, cache_folder) as swarm:
        return run(_compare(entry.id, ours, swarm, rounds, tokens))


async def _compare(model: str, ours: OwnEngine, swarm: LocalSwarm, rounds: int, tokens: int) -> LargeSplit:
    prompt = token_ids(_PROMPT_TOKENS, ours.facts.vocabulary_size)
    unsplit, split = [], []
    timings: list[StepTiming] = []
    async with connected(swarm, model) as head:
        await head.tokens(prompt, 4)
        for _ in range(rounds):
            unsplit.append(ours.decode(prompt, tokens))
            times, steps = await head.tokens(prompt, tokens)
            split.append(speed_of(times))
            timings += steps[1:]
    alone, together = statistics.median(unsplit), statistics.median(split)
    return LargeSplit(model, ratio_of(split, unsplit), alone, together, hop_figures(timings, _SHARDS, together))
