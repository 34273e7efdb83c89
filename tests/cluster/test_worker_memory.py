"""Resident size of the worker processes of real nodes, after a prompt and an answer; tests/parity/test_memory.py has the engine alone."""

from pathlib import Path

import psutil

from potluck.bench.pipeline import connected
from potluck.engine.kv_cache import KvShape
from potluck.engine.kv_format import PAGE_POSITIONS
from potluck.net.loop import run
from potluck.testing.local_swarm import LocalSwarm, split_plan
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.store import ModelStore
from tests.support.memory_worker import tensor_bytes

MEGABYTE = 1_000_000
PROMPT, ANSWER = 300, 20


def test_workers_stay_within_their_limit(models_home: Path) -> None:
    """1.2 times the bytes of their tensors in the file, KV in use, and 250 MB."""
    store = ModelStore(models_home / "models")
    entry = store.find(DEFAULT_MODEL_ID)
    with LocalSwarm(entry.id, split_plan(entry.layer_count, 2, 0), models_home) as swarm:
        run(answer(swarm, entry.id))
        resident = [
            psutil.Process(node.announcement.worker_pid).memory_info().rss for node in swarm.nodes if node.announcement
        ]
    half = entry.layer_count // 2
    with store.open(entry.id) as checkpoint:
        facts = checkpoint.facts
        page_bytes = KvShape(facts.kv_head_count, facts.head_size, True).layer_bytes * half
        kv_bytes = -(-(PROMPT + ANSWER) // PAGE_POSITIONS) * page_bytes
        tensors = [tensor_bytes(checkpoint, 0, half), tensor_bytes(checkpoint, half, entry.layer_count)]
    for rss, size in zip(resident, tensors, strict=True):
        print(f"{rss / MEGABYTE:.0f} MB for {size / MEGABYTE:.0f} MB of weights and {kv_bytes / MEGABYTE:.0f} MB of KV")
        assert rss <= 1.2 * size + kv_bytes + 250 * MEGABYTE


async def answer(swarm: LocalSwarm, model: str) -> None:
    async with connected(swarm, model) as head:
        await head.tokens([1 + 7919 * i % 1500 for i in range(PROMPT)], ANSWER)
