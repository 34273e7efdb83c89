"""A tokenizer from whoever sends it: slow holders are not given up, and nobody waits for a silent one."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.core.errors import LinkClosed, PotluckError, ShardUnavailable, WeightsMismatch
from potluck.node import asking
from potluck.wire.messages import ShardInfo, Stage

INFO = ShardInfo("tiny", "a" * 64, 1, 8, Stage(0, 8, True, True), True, 4, 0, 0, 0, False, 0)
Behaviour = Callable[[], Coroutine[None, None, tuple[bytes, bytes]]]


@pytest.fixture(autouse=True)
def _plain_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer is right where it says so."""

    def check(manifest: bytes, tokenizer: bytes, weights_sha256: str) -> tuple[bytes, bytes]:
        if tokenizer != b"right":
            raise WeightsMismatch("not what the hash covers")
        return manifest, tokenizer

    monkeypatch.setattr(asking, "check_tokenizer", check)
    monkeypatch.setattr(asking, "_ASK_NEXT_AFTER_S", 0.05)


def fetch(*holders: Behaviour) -> tuple[tuple[bytes, bytes], list[int]]:
    """What was had, and who was asked for it."""
    asked: list[int] = []

    async def fetch_tokenizer(holder: bytes, weights_sha256: str) -> tuple[bytes, bytes]:
        asked.append(holder[0])
        return await holders[holder[0]]()

    ids = [bytes([number]) * 32 for number in range(len(holders))]
    store = SimpleNamespace(holders=lambda weights_sha256: ids)
    node: Any = SimpleNamespace(orchestrator=SimpleNamespace(store=store, fetch_tokenizer=fetch_tokenizer))

    async def go() -> Any:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        found = await asking._fetch_text_side(node, INFO)
        assert len(asyncio.all_tasks()) == 1  # nobody is left asking
        gc.collect()
        assert complaints == []  # nor has anybody failed unheard
        return found

    return asyncio.run(go()), asked


async def honest() -> tuple[bytes, bytes]:
    return b"m", b"right"


async def slow() -> tuple[bytes, bytes]:
    await asyncio.sleep(0.3)
    return b"slow", b"right"


async def silent() -> tuple[bytes, bytes]:
    await asyncio.sleep(60)
    raise AssertionError


async def liar() -> tuple[bytes, bytes]:
    return b"m", b"wrong"


async def timing_out() -> tuple[bytes, bytes]:
    raise TimeoutError


async def lost() -> tuple[bytes, bytes]:
    raise LinkClosed("gone")


def test_the_first_holder_that_answers_is_enough() -> None:
    assert fetch(honest, silent) == ((b"m", b"right"), [0])


def test_a_slow_line_is_waited_for_beyond_the_time_after_which_others_are_asked() -> None:
    assert fetch(slow)[0] == (b"slow", b"right")
    assert fetch(slow, silent) == ((b"slow", b"right"), [0, 1])


def test_a_silent_holder_holds_nobody_up() -> None:
    assert fetch(silent, honest) == ((b"m", b"right"), [0, 1])


@pytest.mark.parametrize("first", [liar, timing_out, lost])
def test_after_one_that_fails_the_next_is_asked_at_once(first: Behaviour) -> None:
    assert fetch(first, honest) == ((b"m", b"right"), [0, 1])


@pytest.mark.parametrize(
    ("holders", "error"), [((), ShardUnavailable), ((timing_out,), ShardUnavailable), ((lost, liar), WeightsMismatch)]
)
def test_where_nobody_has_it_the_last_reason_is_told(holders: tuple[Behaviour, ...], error: type[PotluckError]) -> None:
    with pytest.raises(error):
        fetch(*holders)


def test_several_that_end_at_the_same_time_are_all_heard() -> None:
    def at_once(*behaviours: Behaviour) -> list[Behaviour]:
        start = asyncio.Barrier(len(behaviours))

        def waiting(behaviour: Behaviour) -> Behaviour:
            async def wait() -> tuple[bytes, bytes]:
                await start.wait()
                return await behaviour()

            return wait

        return [waiting(behaviour) for behaviour in behaviours]

    assert fetch(*at_once(lost, honest))[0] == (b"m", b"right")
    assert fetch(*at_once(honest, timing_out))[0] == (b"m", b"right")


def test_not_more_than_two_are_asked_at_once() -> None:
    """The slow line may be the asker's own: whoever else sends makes it slower."""
    assert fetch(slow, silent, honest) == ((b"slow", b"right"), [0, 1])
    assert fetch(lost, silent, honest) == ((b"m", b"right"), [0, 1, 2])
