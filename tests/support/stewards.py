"""A steward without sockets and workers: its node, its swarm's roster, shards and views are what a test says."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from potluck.core.errors import PotluckError
from potluck.node import duty as duty_module
from potluck.node.duty import ModelDuty
from potluck.node.own_statement import StewardSettings
from potluck.node.steward import Steward
from potluck.planner.costs import ModelCosts
from potluck.swarm.adverts import Advert
from potluck.swarm.view import Seen, View
from potluck.trust.records import ServedModel
from potluck.weights.store import ModelStore
from potluck.wire.messages import ShardInfo, Stage
from tests.support.swarm_records import KEYS, WEIGHTS, shard

OWN = KEYS[0].node_id
GIB = 1 << 30


def record(name: str = "model", weights: str = WEIGHTS, **fields: Any) -> ServedModel:
    return ServedModel(bytes(16), name, 1, weights, **fields)


class Roster:
    """Everybody may serve; the models are what a test says."""

    def __init__(self, *models: ServedModel) -> None:
        self.served = models
        self.problem: Exception | None = None

    def is_expelled(self, node: bytes) -> bool:
        return False

    def models(self) -> tuple[ServedModel, ...]:
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem
        return self.served

    def may_serve(self, node: bytes) -> bool:
        return True


class FakeNode:
    """What a steward needs of its node; shards that are removed are counted."""

    def __init__(self) -> None:
        self.id = OWN
        self.removed: list[object] = []
        self.weights = SimpleNamespace(offer=lambda offered: None)
        self.orchestrator = SimpleNamespace()

    async def remove_shard(self, server: object) -> None:
        self.removed.append(server)


def make(folder: Path, roster: Roster, published: list[Advert]) -> tuple[Steward, FakeNode]:
    node = FakeNode()
    settings = StewardSettings(memory_total_bytes=4 * GIB, memory_budget_bytes=2 * GIB, bytes_per_s=8e9)
    made = Steward(
        node, ModelStore(folder / "models"), settings, lambda: roster, published.append, lambda: ()  # type: ignore[arg-type]
    )  # fmt: skip
    return made, node


def view(*adverts: Advert) -> View:
    nodes = {each.node: Seen(each, 0.0, 120.0, each.node == OWN, is_connected=True) for each in adverts}
    return View(OWN, 0.0, 1, nodes)


def duty_of(monkeypatch: pytest.MonkeyPatch, word: ServedModel, layer_bytes: int = 1000) -> ModelDuty:
    def costs(_: object, said: ServedModel) -> ModelCosts:
        return ModelCosts(
            model=said.subject, weights_sha256=said.weights_sha256, layer_bytes=(layer_bytes,) * 8, embedding_bytes=100,
            output_bytes=100, kv_bytes_per_token=1, context_tokens=said.context_tokens, streams=said.streams,
        )  # fmt: skip

    monkeypatch.setattr(duty_module, "model_costs", costs)
    return ModelDuty(word, None)  # type: ignore[arg-type]


class FakeServer:
    """A shard that is served, without a worker."""

    def __init__(self, stage: Stage, sessions: int, is_loaded: bool = True) -> None:
        self.settings = SimpleNamespace(stage=stage)
        self.core = SimpleNamespace(session_count=sessions, is_draining=False)
        self.supervisor = SimpleNamespace(needs_attention=False)
        self.load_failure: PotluckError | None = None
        self.shard_id = "model:0-7"
        self.step_us = 0
        self.is_loaded = is_loaded
        self.vram_mb = 0

    def info(self) -> ShardInfo:
        return msgspec.structs.replace(
            shard(), stage=self.settings.stage, step_us=self.step_us, is_loaded=self.is_loaded, vram_mb=self.vram_mb
        )


async def turns(is_done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_done():
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing came of it")
