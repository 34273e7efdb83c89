"""Many questions and generations over shared links: every answer reaches the one that waits for it, and nobody else's counts.

pmetal's multiplexer cases in our names: a nonce names a question, a session a generation.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from potluck.core.errors import BadRequest, LinkClosed, ShardsFull, ShardUnavailable, WeightsMismatch
from potluck.core.remembered import AnswerSoFar, packed_tokens
from potluck.core.sampling_params import SamplingParams
from potluck.net.memory import MemoryNetwork
from potluck.net.peers import PeerLinks
from potluck.orchestrator.frames import Finished, PipelineAborted, StreamFrame, TokenDelta
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings
from potluck.orchestrator.orchestrator import PipelineOrchestrator
from potluck.orchestrator.params import DistributedChatParams
from potluck.orchestrator.reuse import Kept, reuse_key
from potluck.planner.costs import Link, Links
from potluck.planner.cover import Placed
from potluck.telemetry.metrics import Metrics
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    AnswerData,
    Boundary,
    Close,
    Describe,
    Described,
    Failed,
    Open,
    Opened,
    Result,
    ShardInfo,
    Stage,
    Step,
)

HEAD, SHARD, STRANGER = b"H" * 32, b"S" * 32, b"X" * 32
WHOLE = (Placed(SHARD, "", Stage(0, 2, True, True)),)


class Switchboard:
    """An orchestrator whose messages lie in `sent`, to be answered by the test."""

    def __init__(self, kind: type[PeerLinks] = PeerLinks) -> None:
        self.sent: list[SendTo] = []
        links = kind(HEAD, MemoryNetwork().transport(HEAD), lambda *_: None, lambda *_: None)
        self.metrics = Metrics()
        self.orchestrator = PipelineOrchestrator(HEAD, links, self.sent.append, self.metrics)

    def take(self) -> list[SendTo]:
        sent, self.sent[:] = list(self.sent), []
        return sent

    def describe(self, sender: bytes, nonce: int, version: str) -> None:
        self.orchestrator.on_answer(sender, Described(nonce, sender, version, (), 1, ()), b"")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_answers_are_matched_by_nonce_in_any_order() -> None:
    async def ask_three() -> None:
        board = Switchboard()
        asked = [asyncio.ensure_future(board.orchestrator.ask(SHARD, Describe)) for _ in range(3)]
        await soon()
        nonces = [effect.message.nonce for effect in board.take()]  # type: ignore[union-attr]
        assert len(set(nonces)) == 3  # a handler is never replaced: no two questions share a nonce
        for nonce in (nonces[2], nonces[0], nonces[1]):
            board.describe(SHARD, nonce, f"answer {nonce}")
        answers = [(await future)[0].version for future in asked]  # type: ignore[union-attr]
        assert answers == [f"answer {nonce}" for nonce in nonces]

    run(ask_three())


def test_stream_multiplexer_pending_count() -> None:
    """pmetal: nobody waits, then two do; and each of ours waits no longer than until its answer."""

    async def ask_two() -> None:
        board = Switchboard()
        waiting = board.orchestrator._questions
        assert len(waiting) == 0
        asked = [asyncio.ensure_future(board.orchestrator.ask(SHARD, Describe)) for _ in range(2)]
        await soon()
        assert len(waiting) == 2
        for effect, left in zip(board.take(), (1, 0), strict=True):
            board.describe(SHARD, effect.message.nonce, "answer")  # type: ignore[union-attr]
            await soon()
            assert len(waiting) == left
        await asyncio.gather(*asked)

    run(ask_two())


def test_stream_multiplexer_register_replace() -> None:
    """pmetal: whoever registers under a nonce in use replaces the one who waits, who then waits for ever. Our second question of
    the same kind to the same node has a nonce of its own, both wait, and a second answer under one nonce replaces nothing.

    A second OPEN under one session's id is in unit/shard/test_core.py: a duplicate changes nothing, another head's is refused.
    """

    async def ask_twice() -> None:
        board = Switchboard()
        old, new = (asyncio.ensure_future(board.orchestrator.ask(SHARD, Describe)) for _ in range(2))
        await soon()
        first, second = (effect.message.nonce for effect in board.take())  # type: ignore[union-attr]
        assert len(board.orchestrator._questions) == 2
        board.describe(SHARD, second, "new")
        board.describe(SHARD, second, "new again")
        assert (await new)[0].version == "new"  # type: ignore[union-attr]
        assert not old.done()
        board.describe(SHARD, first, "old")
        assert (await old)[0].version == "old"  # type: ignore[union-attr]
        assert len(board.orchestrator._questions) == 0

    run(ask_twice())


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    async def answer() -> None:
        board = Switchboard()
        board.describe(SHARD, 99, "unasked")
        asked = asyncio.ensure_future(board.orchestrator.ask(SHARD, Describe))
        await soon()
        [effect] = board.take()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        board.describe(SHARD, effect.message.nonce, "too late")  # type: ignore[union-attr]
        assert not board.orchestrator._questions

    run(answer())


def test_an_answer_counts_only_from_whoever_was_asked() -> None:
    """Nonces can be guessed: a stranger must not speak for another node."""

    async def answer() -> None:
        board = Switchboard()
        asked = asyncio.ensure_future(board.orchestrator.ask(SHARD, Describe))
        await soon()
        nonce = board.take()[0].message.nonce  # type: ignore[union-attr]
        board.describe(STRANGER, nonce, "false")
        board.orchestrator.on_answer(STRANGER, Failed(nonce, "bad_request", "go away"), b"")
        assert not asked.done()
        board.describe(SHARD, nonce, "true")
        assert (await asked)[0].version == "true"  # type: ignore[union-attr]

    run(answer())


def test_a_question_to_a_node_that_is_lost_is_not_waited_for() -> None:
    """pmetal's `Cancelled`: whoever waits is told when nobody can answer any more."""

    async def lose() -> None:
        board = Switchboard()
        asked, other = (asyncio.ensure_future(board.orchestrator.ask(node, Describe)) for node in (SHARD, STRANGER))
        await soon()
        board.orchestrator.on_lost(SHARD, "reset")
        with pytest.raises(LinkClosed, match="lost before it answered: reset"):
            await asked
        assert not other.done()
        other.cancel()

    run(lose())


def test_a_failed_answer_is_raised_as_what_it_says() -> None:
    async def answer() -> None:
        board = Switchboard()
        asked = asyncio.ensure_future(board.orchestrator.ask(SHARD, Describe))
        await soon()
        board.orchestrator.on_answer(SHARD, Failed(board.take()[0].message.nonce, "model_not_found", "no"), b"")  # type: ignore[union-attr]
        with pytest.raises(BadRequest, match="model_not_found: no"):
            await asked

    run(answer())


# ---------------------------------------------------------------- generations over one link


def request(count: int = 3) -> GenerationRequest:
    return GenerationRequest(
        model="m", weights_sha256="a" * 64, arithmetic=1, layer_count=2, prompt=(1, 2), max_tokens=count,
        params=SamplingParams(), eos=(),
    )  # fmt: skip


PARAMS = DistributedChatParams(settings=GenerationSettings(uses_ring=False), pipeline=WHOLE)


@asynccontextmanager
async def chatting(
    board: Switchboard, count: int = 3
) -> AsyncIterator[tuple["asyncio.Task[list[StreamFrame]]", bytes]]:
    """A chat in a task of its own, and its session, which is open."""

    async def collect() -> list[StreamFrame]:
        return [frame async for frame in board.orchestrator.chat(request(count), PARAMS)]

    task = asyncio.ensure_future(collect())
    await soon()
    [opened] = [effect.message for effect in board.take() if isinstance(effect.message, Open)]
    board.orchestrator.on_message(SHARD, opened.session, Opened(opened.session, 0))
    yield task, opened.session
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_results_of_several_generations_reach_each_its_own() -> None:
    async def two() -> None:
        board = Switchboard()
        async with chatting(board) as (first, one), chatting(board) as (second, two):
            assert one != two
            for position in (2, 3, 4):
                assert board.orchestrator.on_message(SHARD, two, Result(two, 0, position, 20 + position))
                assert board.orchestrator.on_message(SHARD, one, Result(one, 0, position, 10 + position))
                await soon()
            for task, base in ((first, 10), (second, 20)):
                frames = await task
                assert [f.token for f in frames if isinstance(f, TokenDelta)] == [base + 2, base + 3, base + 4]
                assert frames[-1] == Finished("length", 3, 0)
            assert board.orchestrator.pipelines == ()

    run(two())


def test_whether_there_is_one_answer_that_has_begun_is_told_when_it_may_have_changed() -> None:
    async def ask() -> None:
        board = Switchboard()
        told: list[bool] = []
        board.orchestrator.on_load_changed = lambda: told.append(board.orchestrator.decodes_alone)
        async with chatting(board) as (task, one):
            assert told == [False]
            for position in (2, 3):
                board.orchestrator.on_message(SHARD, one, Result(one, 0, position, 5))
                await soon()
            assert told == [False, True]
            async with chatting(board) as (other, _):
                assert told == [False, True, False], "a second one"
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)
                assert told == [False, True, False, True], "which is gone"
            board.orchestrator.on_message(SHARD, one, Result(one, 0, 4, 5))
            await task
        assert told == [False, True, False, True, False]

    run(ask())


def value_of(board: Switchboard, name: str) -> float:
    """A sample of the head's metrics page."""
    value = board.metrics.registry.get_sample_value(f"distributed_inference_{name}")
    assert value is not None
    return value


@pytest.mark.parametrize("count", [0, 3])
def test_every_call_leaves_its_figures(count: int) -> None:
    """HearthNet §5.10. A call that only reads a prompt has a pipeline too, and no first token."""

    async def ask() -> None:
        board = Switchboard()
        async with chatting(board, count) as (task, session):
            for position in range(2, 2 + max(1, count)):
                board.orchestrator.on_message(SHARD, session, Result(session, 0, position, 7 if count else None))
                await soon()
            assert isinstance((await task)[-1], Finished)
        assert value_of(board, "pipeline_construct_ms_count") == 1
        assert value_of(board, "first_token_ms_count") == bool(count)
        assert (value_of(board, "tokens_per_second") > 0) == bool(count)

    run(ask())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"fallback_to_local": False}, "this machine's own may not be used"),
        ({"fallback_to_local": False, "allow_self_as_shard": True}, None),
        ({}, None),
    ],
)
def test_ones_own_shards_are_used_where_that_is_allowed_and_else_said_to_be_forbidden(
    params: dict[str, bool], words: str | None
) -> None:
    async def ask() -> None:
        board = Switchboard()
        whole = ShardInfo("m", "a" * 64, 1, 2, Stage(0, 2, True, True), True, 4, 0, 0, 10)
        board.orchestrator.store.put(HEAD, "", Described(0, HEAD, "1", (whole,), 1, ()), is_own=True)
        asked = DistributedChatParams(**params)  # type: ignore[arg-type]
        if words is None:
            assert [placed.node for placed in board.orchestrator.pipeline_for(request(), asked)] == [HEAD]
        else:
            with pytest.raises(ShardUnavailable, match=words):
                board.orchestrator.pipeline_for(request(), asked)

    run(ask())


def test_a_session_that_nobody_knows_is_nobodys() -> None:
    async def ask() -> None:
        board = Switchboard()
        async with chatting(board) as (_, session):
            assert not board.orchestrator.on_message(SHARD, bytes(16), Result(bytes(16), 0, 2, 7))
            # Known, but not that sender's: no effect but a counter.
            assert board.orchestrator.on_message(STRANGER, session, Result(session, 0, 2, 7))
            [running] = board.orchestrator._running
            assert running.generation.generated == []
            assert running.generation.counters["unknown_session"] == 1

    run(ask())


def test_pipelines_past_the_limit_are_refused() -> None:
    async def ask() -> None:
        board = Switchboard()
        board.orchestrator.max_concurrent_pipelines = 1
        async with chatting(board):
            with pytest.raises(ShardUnavailable, match="all 1 pipelines are in use"):
                await anext(board.orchestrator.chat(request(), PARAMS))
        async with chatting(board):
            pass

    run(ask())


def test_a_reader_that_leaves_closes_the_session_and_stops_the_timer() -> None:
    async def ask() -> None:
        board = Switchboard()
        async with chatting(board) as (task, session):
            board.take()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [e.message for e in board.take()] == [Close(session)]
            assert board.orchestrator.pipelines == ()
            await asyncio.sleep(0.3)  # longer than a probe's deadline
            assert board.take() == []

    run(ask())


def test_a_loss_reaches_every_generation_that_uses_the_node() -> None:
    async def ask() -> None:
        board = Switchboard()
        async with chatting(board) as (first, _), chatting(board) as (second, _):
            board.take()
            board.orchestrator.on_lost(SHARD, "reset")
            assert [type(e.message) for e in board.take()] == [Close, Close]
            board.orchestrator.on_lost(STRANGER, "reset")
            assert board.take() == []
            assert not first.done()
            assert not second.done()

    run(ask())


def test_steps_go_out_with_the_prompt() -> None:
    async def ask() -> None:
        board = Switchboard()
        async with chatting(board):
            [effect] = [effect for effect in board.take() if isinstance(effect.message, Step)]
            assert (effect.node, effect.body) == (SHARD, b"\x01\0\0\0\x02\0\0\0")

    run(ask())


# ---------------------------------------------------------------- which shards, and what travels between them

NEAR, FAR, SECOND = b"N" * 32, b"F" * 32, b"2" * 32
LAN = Link(0.001, 100e6)


class AllLinked(PeerLinks):
    """Whoever is named is there."""

    def is_linked(self, node: bytes) -> bool:
        return True


def test_what_a_node_may_no_longer_ask_for_ends_at_once() -> None:
    async def chat_and_be_expelled() -> tuple[list[StreamFrame], list[object]]:
        board = Switchboard()
        async with chatting(board) as (task, _):
            board.orchestrator.abort_all("not_entitled", "this node was expelled")
            frames = await asyncio.wait_for(task, 5.0)
            return frames, [effect.message for effect in board.take()]

    frames, sent = asyncio.run(chat_and_be_expelled())
    assert frames[-1] == PipelineAborted("not_entitled", "this node was expelled", 0)
    assert [type(message) for message in sent][-1] is Close


def offering(*shards: tuple[bytes, Stage], is_linked: bool = False) -> Switchboard:
    board = Switchboard(AllLinked if is_linked else PeerLinks)
    for node, stage in shards:
        info = ShardInfo("m", "a" * 64, 1, 2, stage, True, 4, 0, 0, 1000)
        board.orchestrator.store.put(node, f"{node[:1].decode()}:1", Described(0, node, "1", (info,), 1, ()))
    return board


def test_a_shard_that_was_full_is_asked_again_how_busy_it_is() -> None:
    """Of nodes that were named by address no adverts come; what they said first must not hold for ever."""

    def described(nonce: int, streams: int) -> Described:
        return Described(
            nonce, NEAR, "1", (ShardInfo("m", "a" * 64, 1, 2, WHOLE[0].stage, True, 4, streams, 0, 10),), 1, ()
        )

    async def refresh() -> None:
        board = Switchboard(AllLinked)
        board.orchestrator.store.put(NEAR, "N:1", described(0, 4))
        with pytest.raises(ShardsFull):
            board.orchestrator.pipeline_for(request(), DistributedChatParams())
        asking = asyncio.ensure_future(board.orchestrator._addresses._refresh("N:1", NEAR))
        await soon()
        board.orchestrator.on_answer(NEAR, described(board.take()[0].message.nonce, 3), b"")  # type: ignore[union-attr]
        await asking
        assert [each.node for each in board.orchestrator.pipeline_for(request(), DistributedChatParams())] == [NEAR]

    run(refresh())


def links(**slow: float) -> Links:
    """A LAN, apart from the links that are named, as `FN` for the one from F to N."""
    pairs = {
        (name[0].encode() * 32, name[1].encode() * 32): Link(round_trip_s, 1e6) for name, round_trip_s in slow.items()
    }
    return Links(LAN, pairs)


FIRST_HALF, LAST_HALF = Stage(0, 1, True), Stage(1, 2, False, True)


@pytest.mark.parametrize(("slow", "expected"), [("H F", NEAR), ("H N", FAR), ("F 2", NEAR), ("N 2", FAR), ("2 H", FAR)])
def test_requests_go_where_the_measured_way_is_short(slow: str, expected: bytes) -> None:
    async def choose() -> bytes:
        board = offering((FAR, FIRST_HALF), (NEAR, FIRST_HALF), (SECOND, LAST_HALF))
        board.orchestrator.links_are(links(**{slow.replace(" ", ""): 0.2}))
        return board.orchestrator.pipeline_for(request(), DistributedChatParams())[0].node

    assert asyncio.run(choose()) == expected


@pytest.mark.parametrize(
    ("dtype", "slow", "codecs"),
    [
        ("auto", {}, ()),
        ("auto", {"N2": 0.05, "2N": 0.05}, ()),
        ("fp32", {"N2": 0.05}, ()),
        ("fp16", {}, ("fp16",)),
        ("int8", {"N2": 0.05}, ("int8",)),
    ],
)
def test_what_travels_between_shards_is_what_was_asked_for_however_slow_their_links_are(
    dtype: str, slow: dict[str, float], codecs: tuple[str, ...]
) -> None:
    async def choose() -> list[Open]:
        board = offering((NEAR, FIRST_HALF), (SECOND, LAST_HALF))
        board.orchestrator.links_are(links(**slow))
        params = DistributedChatParams(activation_dtype=dtype)  # type: ignore[arg-type]
        asking = asyncio.ensure_future(anext(board.orchestrator.chat(request(), params)))
        await soon()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return [effect.message for effect in board.sent if isinstance(effect.message, Open)]

    opens = asyncio.run(choose())
    assert [tuple((b.layer, b.codec) for b in each.boundaries) for each in opens] == [tuple((1, c) for c in codecs)] * 2


@pytest.mark.parametrize("boundaries", [(), (Boundary(1, "int8"),)])
def test_an_answer_that_was_begun_is_rounded_where_it_was_and_nowhere_else(boundaries: tuple[Boundary, ...]) -> None:
    async def choose() -> tuple[list[Open], list[GenerationRequest]]:
        board, told = offering((NEAR, FIRST_HALF), (SECOND, LAST_HALF)), list[GenerationRequest]()
        asked = msgspec.structs.replace(request(), boundaries=boundaries, has_fixed_boundaries=True)
        params = DistributedChatParams(on_begun=told.append, activation_dtype="fp16")  # as a new answer would be
        asking = asyncio.ensure_future(anext(board.orchestrator.chat(asked, params)))
        await soon()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return [effect.message for effect in board.sent if isinstance(effect.message, Open)], told

    opens, told = asyncio.run(choose())
    assert [each.boundaries for each in opens] == [boundaries] * 2
    assert [each.boundaries for each in told] == [boundaries]


def test_other_weights_under_the_same_name_have_their_own_code() -> None:
    """HearthNet §8.1: pipeline construction with weights mismatch → weights_mismatch."""

    async def choose() -> None:
        board = offering((NEAR, Stage(0, 2, True, True)))
        other = msgspec.structs.replace(request(), weights_sha256="b" * 64)
        with pytest.raises(WeightsMismatch):
            board.orchestrator.pipeline_for(other, DistributedChatParams())
        with pytest.raises(ShardUnavailable):
            board.orchestrator.pipeline_for(msgspec.structs.replace(request(), layer_count=3), DistributedChatParams())

    run(choose())


def test_who_would_take_over_is_known_while_an_answer_runs() -> None:
    """SwarmLLM: standby nodes are identified for each segment."""

    async def watch() -> tuple[list[bytes], list[tuple[bytes, ...]]]:
        board = offering((NEAR, FIRST_HALF), (FAR, FIRST_HALF), (SECOND, LAST_HALF), is_linked=True)
        asking = asyncio.ensure_future(anext(board.orchestrator.chat(request(), DistributedChatParams())))
        await soon()
        [watched] = board.orchestrator.watched()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return [p.node for p in watched.stages], [tuple(p.node for p in each) for each in watched.standbys]

    stages, standbys = asyncio.run(watch())
    assert stages[1] == SECOND
    assert standbys == [(FAR if stages[0] == NEAR else NEAR,), ()]


@pytest.mark.parametrize(("shared", "expected"), [(60, FAR), (20, NEAR)])
def test_a_conversation_goes_where_it_was_and_a_system_prompt_in_common_is_no_reason_to(
    shared: int, expected: bytes
) -> None:
    prompt = tuple(range(100))
    whole = Stage(0, 2, True, True)

    async def ask() -> list[tuple[bytes, bytes | None]]:
        board = offering((NEAR, whole), (FAR, whole), is_linked=True)
        board.orchestrator.links_are(links(HF=0.2))
        params = DistributedChatParams(settings=GenerationSettings(keeps_kv=True))
        asked = msgspec.structs.replace(request(), prompt=prompt)
        kept = Kept((*prompt[:shared], 7, 7, 7), (Placed(FAR, "F:1", whole),), (b"k" * 16,))
        board.orchestrator._kept.put(reuse_key(asked, "auto"), kept, asyncio.get_running_loop().time())
        asking = asyncio.ensure_future(anext(board.orchestrator.chat(asked, params)))
        await soon()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return [(effect.node, effect.message.resumes) for effect in board.sent if isinstance(effect.message, Open)]

    assert asyncio.run(ask()) == [(expected, b"k" * 16 if expected == FAR else None)]


# ---------------------------------------------------------------- answers that broke off


def account(board: Switchboard, sender: bytes, nonce: int, prompt: int, *tokens: int) -> None:
    board.orchestrator.on_answer(sender, AnswerData(nonce, prompt), packed_tokens(tokens))


def test_all_accounts_of_an_answer_are_told_and_rubbish_is_not() -> None:
    async def ask() -> None:
        board = Switchboard()
        nodes = [bytes([number]) + bytes(31) for number in range(1, 9)]
        asked = asyncio.ensure_future(board.orchestrator.ask_for_answer({node: node[::-1] for node in nodes}, 5))
        await soon()
        sent = board.take()
        assert [(effect.node, effect.message.proof) for effect in sent] == [(node, node[::-1]) for node in nodes]  # type: ignore[union-attr]
        nonces = [effect.message.nonce for effect in sent]  # type: ignore[union-attr]
        account(board, nodes[0], nonces[0], 2, 1, 2, 3)
        account(board, nodes[1], nonces[1], 2, 1, 2, 3, 4)
        account(board, nodes[2], nonces[2], 9, 1, 2, 3, 4, 5)  # a prompt longer than all
        account(board, nodes[3], nonces[3], 0, 1, 2, 3, 4, 5)
        board.orchestrator.on_answer(nodes[4], AnswerData(nonces[4], 2), b"no numbers")
        board.orchestrator.on_answer(nodes[5], Failed(nonces[5], "resume_impossible", "nothing here"), b"")
        board.describe(nodes[6], nonces[6], "not what was asked for")
        account(board, nodes[7], nonces[7], 2, 1, 2, 3, 4, 5, 6)  # more than the answer can have
        assert sorted(await asked) == [AnswerSoFar(2, (1, 2, 3)), AnswerSoFar(2, (1, 2, 3, 4))]

    run(ask())


def test_who_does_not_answer_is_not_waited_for_long() -> None:
    async def ask() -> None:
        board = Switchboard()
        began_s = asyncio.get_running_loop().time()
        asked = asyncio.ensure_future(board.orchestrator.ask_for_answer({SHARD: bytes(32), STRANGER: bytes(32)}))
        await soon()
        account(board, SHARD, board.take()[0].message.nonce, 1, 1, 2)  # type: ignore[union-attr]
        assert await asked == (AnswerSoFar(1, (1, 2)),)
        assert asyncio.get_running_loop().time() - began_s < 2.0
        assert await board.orchestrator.ask_for_answer({}) == ()

    run(ask())


def test_a_head_knows_the_answers_that_it_heads_and_tells_of_them_when_they_end() -> None:
    async def use() -> None:
        board, told = Switchboard(), list[tuple[bytes, AnswerSoFar]]()
        board.orchestrator.on_ended = lambda key, answer: told.append((key, answer))
        params = DistributedChatParams(pipeline=WHOLE)
        for key in (b"", b"k" * 32):
            asked = msgspec.structs.replace(request(), resume_key=key)
            frames = board.orchestrator.chat(asked, params)
            reading = asyncio.ensure_future(anext(frames))
            await soon()
            assert board.orchestrator.recall(b"k" * 32) == (
                AnswerSoFar(len(asked.prompt), asked.prompt) if key else None
            )
            assert board.orchestrator.resume_keys == ([key] if key else [])
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await frames.aclose()
        assert told == [(b"k" * 32, AnswerSoFar(len(asked.prompt), asked.prompt))]
        assert board.orchestrator.recall(b"k" * 32) is None

    run(use())


def test_a_tokenizer_is_asked_for_where_its_holder_can_be_dialled() -> None:
    """In a large swarm there may be no link to any holder."""

    async def main() -> None:
        board = Switchboard()
        board.orchestrator.store.put(SHARD, "10.0.0.7:7475", Described(0, SHARD, "1", (), 1, ()))
        asking = asyncio.ensure_future(board.orchestrator.fetch_tokenizer(SHARD, "a" * 64))
        await soon()
        [question] = board.take()
        assert (question.node, question.address) == (SHARD, "10.0.0.7:7475")
        asking.cancel()

    run(main())
