"""Shards that cannot be loaded, or are no longer wanted: nothing of them is left, and whoever waits for them hears of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.core.errors import ShardUnavailable, WeightsMissing
from potluck.identity.keys import NodeKey
from potluck.net.memory import MemoryNetwork
from potluck.node import asking, serving
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, started
from potluck.wire.effects import SendTo
from potluck.wire.messages import Fault, Open, Probe, Probed, Refused
from potluck.wire.work import Loaded, SessionOpened
from potluck.wire.worker_settings import WorkerSettings
from tests.support.link_ends import run_test
from tests.support.shard_cores import (
    FIRST,
    HEAD,
    LAST,
    LAYERS,
    OTHER_HEAD,
    WHOLE,
    opening,
    sampler_of,
    session_id,
    settings_of,
    wiring_of,
)


def test_a_worker_that_keeps_dying_while_it_loads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_LOAD_LOOK_S", 0.0)

    async def main() -> None:
        dying: Any = SimpleNamespace(
            start=asyncio.Event().wait, supervisor=SimpleNamespace(needs_attention=True), shard_id="model:0-7"
        )
        with pytest.raises(ShardUnavailable, match="keeps dying"):
            await started(dying)

    run_test(main())


def test_a_shard_that_is_given_up_tells_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        key = NodeKey.generate()
        node = Node(key, MemoryNetwork().transport(key.node_id))
        sent: list[SendTo] = []
        monkeypatch.setattr(node.links, "send_all", sent.extend)
        monkeypatch.setattr(node.links, "send", lambda *effect: sent.append(SendTo(*effect)))
        server = node.add_shard(settings_of(WHOLE), WorkerSettings(model_path="nowhere", source="x"))
        monkeypatch.setattr(server.supervisor, "send", lambda message, body: None)  # it never comes to load
        session = session_id(1)
        wiring = wiring_of(WHOLE)
        opening = Open(session, 3, "m", "a" * 64, 1, WHOLE, 20, wiring, sampler=sampler_of())
        node._on_message(HEAD, opening, b"")
        assert sent == []
        await node.remove_shard(server)
        [told] = [effect for effect in sent if isinstance(effect.message, Fault | Refused)]
        assert (told.node, told.message.session, told.message.epoch) == (HEAD, session, 3)  # type: ignore[union-attr]
        assert "given up" in told.message.message  # type: ignore[union-attr]
        node._on_message(HEAD, Probe(session, 3), b"")
        assert not [e for e in sent if isinstance(e.message, Probed) and e.message.is_known]
        await node.stop()

    run_test(main())


class Shards:
    """Loads what it is told; `outcome` says how each load goes on."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.left = list(outcomes), list[Any]()

    def serve(self, *_: object) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, WeightsMissing):
            raise outcome
        self.left.append(
            SimpleNamespace(
                start=outcome, supervisor=SimpleNamespace(needs_attention=False), load_failure=None, shard_id="m:0-1"
            )
        )
        return self.left[-1]

    async def remove_shard(self, server: Any) -> None:
        self.left.remove(server)


async def _loads() -> None:
    pass


async def _fails() -> None:
    raise ShardUnavailable("no room")


async def _takes_for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("outcomes", "is_given_up", "left"),
    [
        ((_loads, _loads), False, 2),
        ((_loads, _fails), False, 0),
        ((_takes_for_ever, _fails), False, 0),
        ((_loads, WeightsMissing("held in part")), False, 0),
        ((_takes_for_ever, _loads), True, 0),
    ],
)
def test_own_layers_are_loaded_all_or_none_is_left(
    outcomes: tuple[Any, ...], is_given_up: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        shards = Shards(*outcomes)
        monkeypatch.setattr(asking, "serve", shards.serve)
        monkeypatch.setattr(asking, "own_copy", lambda *_: "m")
        monkeypatch.setattr(asking, "read_stored_model", lambda *_: None)
        monkeypatch.setattr(asking.msgspec.structs, "replace", lambda stored, **_: stored)
        info, facts = SimpleNamespace(model="m", weights_sha256="a" * 64), SimpleNamespace(layer_count=LAYERS)
        model = RemoteModel(shards, info, facts, None, None)  # type: ignore[arg-type]
        loading = asyncio.ensure_future(model.serve_own_layers("0-1,6-output", None, ServingSettings()))  # type: ignore[arg-type]
        if is_given_up:
            await asyncio.sleep(0.01)
            loading.cancel()
        await asyncio.wait({loading})
        assert len(shards.left) == left
        assert (loading.cancelled() or loading.exception() is not None) == (left == 0)

    run_test(main())


def test_an_id_that_one_shard_of_a_node_knows_cannot_be_opened_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go to the shard that knows the session; another one that knew it too would wait for what it never gets."""

    async def main() -> None:
        key = NodeKey.generate()
        node = Node(key, MemoryNetwork().transport(key.node_id))
        sent: list[SendTo] = []
        monkeypatch.setattr(node.links, "send_all", sent.extend)
        shards = [
            node.add_shard(settings_of(stage), WorkerSettings(model_path="nowhere", source="x"))
            for stage in (FIRST, LAST)
        ]
        for shard in shards:
            monkeypatch.setattr(shard.supervisor, "send", lambda message, *parts: None)
            shard._on_worker_message(Loaded(shard.settings.stage, 1, 1, 1), b"")
        node._on_message(HEAD, opening(FIRST), b"")
        shards[0]._on_worker_message(SessionOpened(session_id(1)), b"")
        node._on_message(HEAD, opening(LAST), b"")
        assert [shard.core.session_count for shard in shards] == [1, 0]
        node._on_message(OTHER_HEAD, opening(LAST), b"")
        assert [shard.core.session_count for shard in shards] == [1, 0]
        [refused] = [effect for effect in sent if isinstance(effect.message, Refused)]
        assert refused.node == OTHER_HEAD
        await node.stop()

    run_test(main())
