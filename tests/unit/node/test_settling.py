"""Where a node's loop runs, and which of its shards attend: by what is on its way. On a machine with three cores, which is made up."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from potluck.core.processors import CROWD, LOOP_CORE
from potluck.identity.keys import NodeKey
from potluck.net.memory import MemoryNetwork
from potluck.node.node import Node
from tests.support.link_ends import run_test

KEY = NodeKey.from_seed(bytes(32))


class Shard:
    def __init__(self, sessions: int, decodes_alone: bool) -> None:
        self.session_count, self.decodes_alone = sessions, decodes_alone
        self.is_attending = False

    def attend(self, is_wanted: bool) -> None:
        self.is_attending = is_wanted


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, set[int]]]:
    where: dict[int, set[int]] = {0: {0, 1, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: set(where[task]), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", where.__setitem__, raising=False)
    LOOP_CORE.keep_while(False)
    yield where
    LOOP_CORE.keep_while(False)
    CROWD.is_heeded = False


@pytest.mark.parametrize(
    ("shards", "heads_alone", "is_held", "attending", "is_heeded"),
    [
        ([], False, False, [], False),
        ([], True, True, [], True),  # a head only
        ([(1, True)], False, True, [True], True),
        ([(1, True)], True, True, [True], True),  # of its own answer
        ([(1, False)], True, False, [False], False),  # a prompt is being read
        ([(2, False)], True, False, [False], False),
        ([(1, True), (0, False)], False, True, [True, False], True),
        ([(1, True), (1, True)], False, False, [False, False], False),  # of different models, say
        ([(0, False)], True, True, [False], True),
        ([(0, True)], False, False, [False], False),
        ([(0, True)], True, True, [False], True),
    ],
)
def test_with_one_answer_on_its_way_the_loop_has_its_place(
    cores: dict[int, set[int]], shards: list[tuple[int, bool]], heads_alone: bool, is_held: bool, attending: list[bool],
    is_heeded: bool,
) -> None:  # fmt: skip
    async def main() -> None:
        node = Node(KEY, MemoryNetwork().transport(KEY.node_id))
        served = [Shard(*each) for each in shards]
        node.shards = cast(Any, served)
        node.orchestrator = cast(Any, SimpleNamespace(decodes_alone=heads_alone, close=node.orchestrator.close))
        node._settle_on_cores()
        assert cores[0] == ({2} if is_held else {0, 1, 2})
        assert [shard.is_attending for shard in served] == attending
        assert CROWD.is_heeded == is_heeded
        node.shards = []
        await node.stop()

    run_test(main())


def test_where_the_loop_cannot_have_its_place_nobody_attends(
    cores: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(task: int, cores: set[int]) -> None:
        raise PermissionError

    async def main() -> None:
        node = Node(KEY, MemoryNetwork().transport(KEY.node_id))
        served = [Shard(1, True)]
        node.shards = cast(Any, served)
        monkeypatch.setattr(os, "sched_setaffinity", forbidden, raising=False)
        node._settle_on_cores()
        assert not served[0].is_attending
        assert not CROWD.is_heeded
        node.shards = []
        await node.stop()

    run_test(main())


def test_a_head_has_its_place_as_soon_as_its_answer_has_begun() -> None:
    async def main() -> None:
        node = Node(KEY, MemoryNetwork().transport(KEY.node_id))
        assert node.orchestrator.on_load_changed == node._settle_on_cores
        await node.stop()

    run_test(main())
