"""Where processes of real nodes may run on a machine of two or three cores: while one answer decodes daemons on the last one and workers on
the others, else all of them anywhere.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from potluck.bench.pipeline import connected
from potluck.net.loop import run
from potluck.testing.local_swarm import LocalSwarm, split_plan
from potluck.weights.catalogue import DEFAULT_MODEL_ID

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
PROMPT = [100 + i * 7919 % 1500 for i in range(1024)]
TOKENS = 100

pytestmark = pytest.mark.skipif(not 1 < len(CORES) < 4, reason="daemons keep to a core where there are two or three")


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(DEFAULT_MODEL_ID, split_plan(30, 2, 0), models_home) as swarm:
        yield swarm


def test_daemons_keep_to_the_last_core_while_one_answer_decodes(swarm: LocalSwarm) -> None:
    """So does their head, and workers keep to the others. Neither while its prompt is read, nor with two answers, nor with none."""
    halves = [node.announcement for node in swarm.nodes]
    daemons, workers = [each.daemon_pid for each in halves], [each.worker_pid for each in halves]
    kept, free = [{max(CORES)}] * 3 + [CORES - {max(CORES)}] * 2, [CORES] * 5
    seen: list[tuple[float, list[set[int]]]] = []

    def places() -> list[set[int]]:
        return [os.sched_getaffinity(0)] + [set(psutil.Process(pid).cpu_affinity()) for pid in daemons + workers]

    async def look() -> None:
        while True:
            seen.append((asyncio.get_running_loop().time(), places()))
            await asyncio.sleep(0.005)

    async def main() -> None:
        async with connected(swarm, DEFAULT_MODEL_ID) as head:
            loop = asyncio.get_running_loop()
            assert places() == free
            looking = asyncio.create_task(look())
            began = loop.time()
            times, _ = await head.tokens(PROMPT, TOKENS)
            looking.cancel()
            first, end = began + times[0], began + times[-1]
            reading = [there for at, there in seen if at < first]
            decoding = [there for at, there in seen if first < at < end]
            assert reading.count(free) > len(reading) / 2
            assert decoding.count(kept) > len(decoding) / 2
            seen.clear()
            looking = asyncio.create_task(look())
            await asyncio.gather(*(head.tokens(PROMPT[:8], TOKENS) for _ in range(2)))
            looking.cancel()
            together = [there for _, there in seen]
            assert together.count(free) > len(together) / 2
            for _ in range(500):  # CLOSE is on its way
                if places() == free:
                    break
                await asyncio.sleep(0.01)
            assert places() == free

    run(main())
