"""Real worker processes: the same bits as the engine, errors that stay where they belong, and deaths that are noticed."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from potluck.core.sampling_params import SamplingParams
from potluck.engine.cpu_engine import CpuEngine, Step
from potluck.engine.kv_cache import KvShape
from potluck.engine.sampling import choose
from potluck.shard.worker_process import worker_environment
from potluck.shard.worker_supervisor import RestartPolicy, WorkerState, WorkerSupervisor
from potluck.wire.messages import Boundary, Sampler, Stage
from potluck.wire.work import (
    CloseSession,
    Load,
    Loaded,
    LoadFailed,
    OpenSession,
    ParkSession,
    SessionOpened,
    SessionRefused,
    TruncateSession,
    Unload,
)
from potluck.wire.worker_settings import WorkerSettings
from tests.support.worker_clients import (
    FIRST,
    MIDDLE,
    SECOND,
    SHAPE,
    WHOLE,
    Part,
    WorkerClient,
    rows_of,
    tiny_engine,
    tiny_settings,
    tokens_part,
)

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
PROMPT = [7, 300, 12, 500, 44, 9]
GREEDY = Sampler(SamplingParams(), 0, len(PROMPT), tuple(PROMPT), (2,), 200)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    return tiny_settings(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(settings: WorkerSettings) -> Iterator[CpuEngine]:
    engine = tiny_engine(settings)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def shared(run: Run, settings: WorkerSettings) -> Iterator[WorkerClient]:
    """A worker with all of the model, for tests that leave it as they found it."""
    client = run(WorkerClient.start(settings, WHOLE))
    yield client
    run(client.stop())


def sampler(prompt: list[int], **params: object) -> Sampler:
    return Sampler(SamplingParams(**params).check(), 0, len(prompt), tuple(prompt), (2,), 200)  # type: ignore[arg-type]


def expected(engine: CpuEngine, prompt: list[int], count: int, **params: object) -> list[int]:
    """What the engine generates in this process."""
    session, tokens, position = engine.open(64), list(prompt), 0
    for _ in range(count):
        [result] = engine.forward(
            [Step(session, position, tokens=tokens[position:], logits=[len(tokens) - position - 1])]
        )
        position = len(tokens)
        assert result.logits is not None
        chosen = choose(
            result.logits[0], SamplingParams(**params), position=position, prompt=prompt, generated=tokens[len(prompt) :]  # type: ignore[arg-type]
        )  # fmt: skip
        tokens.append(chosen.token)
    engine.close_session(session)
    return tokens[len(prompt) :]


async def generate(client: WorkerClient, session: bytes, tokens: list[int], position: int, count: int) -> list[int]:
    """`tokens` from `position` on, then what is chosen, on a session of the whole model."""
    chosen: list[int] = []
    for _ in range(count):
        [(output, _)] = await client.run(tokens_part(session, position, tokens, chooses=True))
        assert output.code == "", output.message
        assert output.token is not None
        position += len(tokens)
        tokens = [output.token]
        chosen.append(output.token)
    return chosen


# ---------------------------------------------------------------- the same bits


def test_a_batch_equals_the_engine_run_directly(run: Run, shared: WorkerClient, whole: CpuEngine) -> None:
    async def scenario() -> None:
        prompts = {A: [1, 2, 3], B: [400, 3, 77, 8, 123, 9, 10], C: [5]}
        parts = []
        for session, prompt in prompts.items():
            assert await shared.open(session, WHOLE, sampler=sampler(prompt)) == SessionOpened(session)
            parts.append(tokens_part(session, 0, prompt, output="fp32", chooses=True))
        for (output, data), (session, prompt) in zip(await shared.run(*parts), prompts.items(), strict=True):
            number = whole.open(64)
            [result] = whole.forward([Step(number, 0, tokens=prompt, logits=[len(prompt) - 1])])
            whole.close_session(number)
            assert output.session == session
            assert data == result.hidden.tobytes()
            assert result.logits is not None
            assert output.token == int(result.logits[0].argmax())
        for session in prompts:
            shared.process.send(CloseSession(session))

    run(scenario())


def test_two_workers_one_after_the_other_equal_the_whole_model(
    run: Run, settings: WorkerSettings, whole: CpuEngine
) -> None:
    async def scenario() -> None:
        first, second = await WorkerClient.start(settings, FIRST), await WorkerClient.start(settings, SECOND)
        await first.open(A, FIRST)
        await second.open(B, SECOND, sampler=GREEDY)
        tokens, position, got = PROMPT, 0, []
        for _ in range(12):
            [(_, data)] = await first.run(tokens_part(A, position, tokens, output="fp32"))
            [(output, _)] = await second.run(Part(B, position, len(tokens), data, "fp32", chooses=True))
            position += len(tokens)
            tokens = [output.token or 0]
            got += tokens
        assert got == expected(whole, PROMPT, 12)
        await first.stop()
        await second.stop()

    run(scenario())


def test_part_of_a_loaded_stage_can_be_used(run: Run, shared: WorkerClient, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        rows = np.random.default_rng(1).standard_normal((5, SHAPE.hidden_size)).astype(np.float32)
        assert isinstance(await shared.ask(Load(MIDDLE)), Loaded)  # lies within what is there
        await shared.open(A, MIDDLE)
        [(_, data)] = await shared.run(Part(A, 0, 5, rows.tobytes(), "fp32", "fp32"))
        engine = tiny_engine(settings, MIDDLE)
        [result] = engine.forward([Step(engine.open(64), 0, hidden=rows)])
        assert data == result.hidden.tobytes()
        engine.close()
        shared.process.send(CloseSession(A))
        shared.process.send(Unload(MIDDLE))

    run(scenario())


async def through_cuts(clients: list[WorkerClient], cuts: list[int], codec: str, count: int) -> list[int]:
    """Greedy tokens over stages cut at `cuts`, with links in `codec`; an end may stand alone."""
    edges = [0, *cuts, SHAPE.layer_count]
    stages = [
        Stage(start, stop, place == 0, place == len(cuts))
        for place, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    ids = [os.urandom(16) for _ in stages]
    for client, session, stage in zip(clients, ids, stages, strict=True):
        assert await client.open(session, stage, sampler=GREEDY if stage.has_output else None) == SessionOpened(session)
    tokens, position, chosen = PROMPT, 0, []
    for _ in range(count):
        part = tokens_part(ids[0], position, tokens, output=codec)
        for session in ids[1:]:
            [(output, data)] = await clients[ids.index(part.session)].run(part)
            assert output.code == "", output.message
            is_last = session == ids[-1]
            part = Part(session, position, len(tokens), data, codec, None if is_last else codec, is_last)  # type: ignore[arg-type]
        [(output, _)] = await clients[-1].run(part)
        assert output.token is not None
        position += len(tokens)
        tokens = [output.token]
        chosen += tokens
    for client, session in zip(clients, ids, strict=True):
        client.process.send(CloseSession(session))
    return chosen


@pytest.mark.parametrize("cuts", [[2], [1, 3], [0, 4], [0, 2, 4]])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_boundaries_inside_a_worker_equal_links(run: Run, shared: WorkerClient, cuts: list[int], codec: str) -> None:
    async def scenario() -> None:
        linked = await through_cuts([shared] * (len(cuts) + 1), cuts, codec, 10)
        await shared.open(A, WHOLE, 64, tuple(Boundary(cut, codec) for cut in cuts), GREEDY)  # type: ignore[arg-type]
        assert await generate(shared, A, PROMPT, 0, 10) == linked
        shared.process.send(CloseSession(A))

    run(scenario())


def test_an_int8_link_between_two_workers_equals_a_boundary_inside_one(
    run: Run, shared: WorkerClient, settings: WorkerSettings
) -> None:
    async def scenario() -> None:
        first, second = await WorkerClient.start(settings, FIRST), await WorkerClient.start(settings, SECOND)
        linked = await through_cuts([first, second], [2], "int8", 10)
        await shared.open(A, WHOLE, 64, (Boundary(2, "int8"),), GREEDY)
        assert await generate(shared, A, PROMPT, 0, 10) == linked
        shared.process.send(CloseSession(A))
        await first.stop()
        await second.stop()

    run(scenario())


SAMPLED = {"temperature": 0.9, "top_k": 40, "seed": 11, "repetition_penalty": 1.3, "frequency_penalty": 0.5}


def test_sampling_survives_truncation_and_replay(run: Run, shared: WorkerClient, whole: CpuEngine) -> None:
    async def scenario() -> None:
        reference = expected(whole, PROMPT, 16, **SAMPLED)
        await shared.open(A, WHOLE, 64, (), sampler(PROMPT, **SAMPLED))
        assert await generate(shared, A, PROMPT, 0, 16) == reference
        journal = PROMPT + reference
        for length in (len(PROMPT) + 4, len(PROMPT), 2):  # back into the answer, to its start, into the prompt
            shared.process.send(TruncateSession(A, length, None))
            known = journal[length : max(len(PROMPT), length + 1)]
            already = length + len(known) - len(PROMPT)
            assert await generate(shared, A, known, length, 16 - already) == reference[already:]
        # A replacement gets the journal and computes it again.
        await shared.open(
            B, WHOLE, 64, (), Sampler(sampler(PROMPT, **SAMPLED).params, 0, len(PROMPT), tuple(journal[:12]), (2,), 200)
        )
        assert await generate(shared, B, journal[:12], 0, 10) == reference[6:16]
        shared.process.send(CloseSession(A))
        shared.process.send(CloseSession(B))

    run(scenario())


def test_a_sampler_in_a_truncation_replaces_the_history(run: Run, shared: WorkerClient, whole: CpuEngine) -> None:
    async def scenario() -> None:
        reference = expected(whole, PROMPT, 12, **SAMPLED)
        part = Stage(0, 4, False, True)  # does not see token ids, so that only the sampler tells them
        await shared.open(A, Stage(0, 0, True, False))
        await shared.open(B, part, 64, (), sampler(PROMPT, **SAMPLED))
        tokens, position, chosen = PROMPT, 0, []
        while len(chosen) < 12:
            [(_, data)] = await shared.run(tokens_part(A, position, tokens, output="fp32"))
            [(output, _)] = await shared.run(Part(B, position, len(tokens), data, "fp32", chooses=True))
            position += len(tokens)
            tokens = [output.token or 0]
            chosen += tokens
            if len(chosen) == 8:  # the head saw only five of them: a new epoch begins there
                position, chosen = len(PROMPT) + 4, chosen[:5]
                tokens = chosen[4:]
                journal = tuple(PROMPT + chosen)
                shared.process.send(TruncateSession(A, position, None))
                shared.process.send(
                    TruncateSession(
                        B, position, Sampler(sampler(PROMPT, **SAMPLED).params, 0, len(PROMPT), journal, (2,), 200)
                    )
                )
                reference_left = reference[5:]
                while reference_left:
                    [(_, data)] = await shared.run(tokens_part(A, position, tokens, output="fp32"))
                    [(output, _)] = await shared.run(Part(B, position, 1, data, "fp32", chooses=True))
                    position += 1
                    tokens = [output.token or 0]
                    assert tokens[0] == reference_left.pop(0)
                break
        shared.process.send(CloseSession(A))
        shared.process.send(CloseSession(B))

    run(scenario())


# ---------------------------------------------------------------- errors


def test_a_bad_item_does_not_spoil_the_others(run: Run, shared: WorkerClient, whole: CpuEngine) -> None:
    async def scenario() -> None:
        for session in (A, B, C):
            await shared.open(session, WHOLE, 16, (), GREEDY)
        bad = [
            tokens_part(b"x" * 16, 0, [1]),  # no such session
            tokens_part(B, 3, [1]),  # not at its position
            tokens_part(B, 0, [512]),  # no such token
            tokens_part(B, 0, [1] * 17),  # more than was reserved
            Part(B, 0, 2, b"\0" * 4),  # half of the bytes
            Part(B, 0, 1, b"\0" * 256, "fp32"),  # activations for a session that takes tokens
            Part(B, 0, 0, b""),
        ]
        for position, part in enumerate(bad):
            outputs = await shared.run(
                tokens_part(A, position, [5], output="fp32"), part, tokens_part(C, position, [6])
            )
            assert [output.code for output, _ in outputs] == ["", "bad_request", ""], part
        [(output, _)] = await shared.run(tokens_part(B, 0, PROMPT, chooses=True))
        assert [output.token] == expected(whole, PROMPT, 1)
        for session in (A, B, C):
            shared.process.send(CloseSession(session))

    run(scenario())


def test_a_failed_choice_leaves_the_session_as_it_was(run: Run, shared: WorkerClient) -> None:
    async def scenario() -> None:
        await shared.open(A, WHOLE, 16, (), sampler(PROMPT, logit_bias={511: 1.0, 512: 1.0}))
        for _ in range(2):
            [(output, _)] = await shared.run(tokens_part(A, 0, PROMPT, chooses=True))
            assert output.code == "bad_request"
        await shared.open(B, WHOLE, 16, (), GREEDY)
        [(output, _)] = await shared.run(tokens_part(B, 0, PROMPT[:3], chooses=True))  # in the middle of the prompt
        assert output.code == "bad_request"
        shared.process.send(CloseSession(A))
        shared.process.send(CloseSession(B))

    run(scenario())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_corrupted_activations_are_reported(run: Run, shared: WorkerClient, value: float) -> None:
    async def scenario() -> None:
        await shared.open(A, Stage(2, 4, False, True), 16, (), GREEDY)
        rows = np.ones((2, SHAPE.hidden_size), np.float32)
        rows[1, 5] = value
        [(output, _)] = await shared.run(Part(A, 0, 2, rows.tobytes(), "fp32"))
        assert output.code == "shard_corruption"
        rows[1, 5] = 1.0
        [(output, _)] = await shared.run(Part(A, 0, 2, rows.tobytes(), "fp32"))
        assert output.code == ""
        shared.process.send(CloseSession(A))

    run(scenario())


def test_sessions_are_refused_with_a_reason(run: Run, shared: WorkerClient, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        small = await WorkerClient.start(
            tiny_settings(Path(settings.model_path).parent, kv_budget_bytes=90_000), FIRST, SECOND
        )
        cases = [
            (shared, WHOLE, 257, None, "context_length_exceeded"),
            (shared, WHOLE, 0, None, "bad_request"),
            (shared, Stage(3, 5), 10, None, "bad_request"),
            (shared, WHOLE, 10, sampler([600]), "bad_request"),
            (shared, WHOLE, 10, Sampler(SamplingParams(top_p=2.0), 0, 0, (), (), 9), "bad_request"),
            (shared, WHOLE, 10, Sampler(SamplingParams(), 0, 5, (1,), (), 9), "bad_request"),
            (small, FIRST, 256, None, "kv_budget_exceeded"),
            (small, WHOLE, 10, None, "bad_request"),
        ]
        for client, stage, positions, tokens, code in cases:
            answer = await client.open(C, stage, positions, (), tokens)
            assert isinstance(answer, SessionRefused), (stage, positions)
            assert answer.code == code, answer.message
        # The budget is one for both stages: what one session took is missing for the next, wherever it is.
        answers = [await small.open(os.urandom(16), stage, 64) for stage in (FIRST, SECOND, FIRST, SECOND, SECOND)]
        assert [type(answer) for answer in answers] == [SessionOpened] * 3 + [SessionRefused] * 2  # 24,576 bytes each
        await small.stop()

    run(scenario())


def test_loading_fails_with_a_reason(run: Run, settings: WorkerSettings, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(Path(settings.model_path).read_bytes()[:10_000])

    async def scenario() -> None:
        for path, stage, code in (
            (tmp_path / "none.gguf", WHOLE, "model_not_found"),
            (tmp_path / "cut.gguf", WHOLE, "bad_model_file"),
            (Path(settings.model_path), Stage(0, 5, True, True), "bad_request"),
            (Path(settings.model_path), Stage(1, 3, True, False), "bad_request"),
        ):
            client = await WorkerClient.start(WorkerSettings(model_path=str(path), source="x"))
            answer = await client.ask(Load(stage))
            assert isinstance(answer, LoadFailed)
            assert answer.code == code
            await client.stop()

    run(scenario())


# ---------------------------------------------------------------- ends


async def gone(pid: int, within_s: float = 5.0) -> float:
    """Seconds until there is no such process (or only what its parent has not collected)."""
    start = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - start < within_s, f"process {pid} is still there"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


def test_unloading_ends_sessions_and_the_last_one_the_process(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        client = await WorkerClient.start(settings, FIRST, SECOND, MIDDLE)
        await client.open(A, FIRST)
        client.process.send(Unload(FIRST))
        refusal, _ = await client.answer()
        assert isinstance(refusal, SessionRefused)
        assert (refusal.session, refusal.code) == (A, "shard_unavailable")
        [(output, _)] = await client.run(tokens_part(A, 0, [1]))
        assert output.code == "bad_request"
        client.process.send(Unload(MIDDLE))
        client.process.send(Unload(SECOND))
        await asyncio.wait_for(client.lost, 5)
        await client.stop()
        assert client.process.exit_status == 0
        assert not psutil.pid_exists(client.process.pid)

    run(scenario())


def test_a_killed_worker_is_lost_at_once_and_comes_back(run: Run, settings: WorkerSettings, whole: CpuEngine) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        client = WorkerClient()
        supervisor = WorkerSupervisor(settings, client.on_message, client.on_lost)
        supervisor.send(Load(FIRST))
        supervisor.send(Load(WHOLE))
        assert [type((await client.answer())[0]) for _ in range(2)] == [Loaded, Loaded]
        pid = supervisor.pid
        assert pid is not None
        start = loop.time()
        os.kill(pid, signal.SIGKILL)
        _, lost_at = await asyncio.wait_for(client.lost, 5)
        assert lost_at - start < 1.0  # milliseconds, on a machine that is not busy
        assert supervisor.state is WorkerState.WAITING
        stages = [(await client.answer())[0] for _ in range(2)]  # loaded again, unasked
        assert [stage.stage for stage in stages if isinstance(stage, Loaded)] == [FIRST, WHOLE]
        assert supervisor.pid not in (None, pid)
        assert not supervisor.needs_attention
        assert supervisor._worker is not None
        client.process = supervisor._worker
        await client.open(A, WHOLE, 64, (), GREEDY)
        assert await generate(client, A, PROMPT, 0, 5) == expected(whole, PROMPT, 5)
        await supervisor.stop()
        assert not supervisor._tasks
        assert not psutil.pid_exists(client.process.pid)

    run(scenario())


def test_a_worker_that_the_system_ended_for_lack_of_memory_comes_back_with_half_the_kv(
    run: Run, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that somebody else has ended comes back with all of it."""
    kills_by_the_system = 0
    monkeypatch.setattr("potluck.shard.worker_process.host_memory_kills", lambda: kills_by_the_system)

    async def scenario() -> None:
        nonlocal kills_by_the_system
        budgets = []
        client = WorkerClient()
        policy = RestartPolicy(first_pause_s=0.01)
        supervisor = WorkerSupervisor(settings, client.on_message, client.on_lost, policy=policy)
        supervisor.send(Load(FIRST))
        for kills in (0, 1, 0):
            loaded, _ = await client.answer()
            assert isinstance(loaded, Loaded)
            budgets.append(loaded.kv_budget_bytes)
            assert supervisor.pid is not None
            kills_by_the_system += kills
            os.kill(supervisor.pid, signal.SIGKILL)
        loaded, _ = await client.answer()
        assert isinstance(loaded, Loaded)
        whole = settings.kv_budget_bytes
        assert [*budgets, loaded.kv_budget_bytes] == [whole, whole, whole // 2, whole // 2]
        assert supervisor.memory_limit.deaths == 1
        supervisor.send(Unload(FIRST))  # whoever needed the memory may be gone when it is loaded again
        supervisor.send(Load(FIRST))
        loaded, _ = await client.answer()
        assert isinstance(loaded, Loaded)
        assert loaded.kv_budget_bytes == whole
        await supervisor.stop()

    run(scenario())


def test_quick_deaths_need_attention_and_are_retried(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        started: asyncio.Queue[None] = asyncio.Queue()
        losses: list[str] = []
        supervisor = WorkerSupervisor(
            settings,
            lambda *_: None,
            losses.append,
            lambda: started.put_nowait(None),
            RestartPolicy(first_pause_s=0.01),
        )
        supervisor.send(Load(FIRST))
        for deaths in range(4):
            await asyncio.wait_for(started.get(), 5)
            assert supervisor.quick_deaths == deaths
            assert supervisor.needs_attention == (deaths >= 3)
            supervisor.kill()
        await asyncio.sleep(0.05)
        assert len(losses) == 4
        await supervisor.stop()

    run(scenario())
    policy = RestartPolicy()
    assert [policy.pause_s(deaths) for deaths in (0, 1, 2, 3, 8, 9, 1000)] == [0.2, 0.2, 0.4, 0.8, 25.6, 30.0, 30.0]


def test_a_worker_that_dies_while_it_loads_is_tried_ever_more_rarely_however_long_loading_takes(
    run: Run, settings: WorkerSettings
) -> None:
    async def scenario() -> None:
        started: asyncio.Queue[None] = asyncio.Queue()
        policy = RestartPolicy(first_pause_s=0.01, quick_death_s=0.0)  # no death is quick by the clock
        client = WorkerClient()
        supervisor = WorkerSupervisor(
            settings, client.on_message, client.on_lost, lambda: started.put_nowait(None), policy
        )
        supervisor.send(Load(FIRST))
        for deaths in range(3):
            await asyncio.wait_for(started.get(), 5)
            assert supervisor.quick_deaths == deaths
            supervisor.kill()
        await asyncio.wait_for(started.get(), 5)
        assert supervisor.needs_attention
        await client.answer()  # it has loaded after all
        supervisor.kill()
        await asyncio.wait_for(started.get(), 5)
        assert not supervisor.needs_attention
        await supervisor.stop()

    run(scenario())


def test_a_load_right_after_the_last_unload_gets_a_new_process(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        client, before = WorkerClient(), psutil.Process().children()
        supervisor = WorkerSupervisor(settings, client.on_message, client.on_lost)
        supervisor.send(Load(FIRST))
        supervisor.send(Unload(FIRST))  # while it is being started
        supervisor.send(Load(FIRST))
        await client.answer()
        first = supervisor.pid
        supervisor.send(Unload(FIRST))
        assert supervisor.state is WorkerState.IDLE
        supervisor.send(Load(SECOND))
        answer, _ = await client.answer()
        assert isinstance(answer, Loaded)
        assert answer.stage == SECOND
        assert supervisor.pid != first
        assert first is not None
        await gone(first)
        assert not client.lost.done()  # it was asked for
        await supervisor.stop()
        assert psutil.Process().children() == before

    run(scenario())


def test_a_stopped_worker_shows_no_sign_of_life_and_can_be_killed(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        client = await WorkerClient.start(settings, FIRST)
        asked_at = loop.time()
        client.process.ping()
        while client.process.last_sign_of_life < asked_at:
            assert loop.time() - asked_at < 5
            await asyncio.sleep(0.005)
        os.kill(client.process.pid, signal.SIGSTOP)
        await asyncio.sleep(0.05)
        asked_at = loop.time()
        client.process.send(Load(MIDDLE))  # work is outstanding, so pings go out by themselves
        before = client.process.last_sign_of_life
        assert before >= asked_at  # silence before that means nothing
        await asyncio.sleep(0.35)
        assert client.process.last_sign_of_life == before
        start = loop.time()
        client.process.kill()
        _, lost_at = await asyncio.wait_for(client.lost, 5)
        assert lost_at - start < 1.0  # milliseconds, on a machine that is not busy
        await client.stop()

    run(scenario())


def test_a_worker_that_stays_frozen_at_work_is_ended_and_replaced(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        client = WorkerClient()
        supervisor = WorkerSupervisor(
            settings, client.on_message, client.on_lost, policy=RestartPolicy(first_pause_s=0.01, frozen_after_s=0.5)
        )
        supervisor.send(Load(FIRST))
        await client.answer()
        pid = supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.7)
        assert supervisor.pid == pid  # it owes nothing, so its silence means nothing
        supervisor.send(Load(MIDDLE))
        await asyncio.wait_for(client.lost, 5)
        assert isinstance((await client.answer())[0], Loaded)
        assert supervisor.pid not in (None, pid)
        await gone(pid)
        await supervisor.stop()

    run(scenario())


def test_pings_are_answered_while_the_worker_computes(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        client = await WorkerClient.start(settings, WHOLE)
        sessions = [os.urandom(16) for _ in range(64)]
        for session in sessions:
            await client.open(session, WHOLE, 256)
        client.process.send(*_batch([tokens_part(session, 0, [3] * 250) for session in sessions]))  # 0.1 s of work
        signs = {client.process.last_sign_of_life}
        while client.messages.empty():
            signs.add(client.process.last_sign_of_life)
            client.process.ping()
            await asyncio.sleep(0.003)
        assert len(signs) > 2  # it was heard of several times before it had any result
        await client.stop()

    run(scenario())


def _batch(parts: list[Part]) -> tuple[Any, ...]:
    from potluck.wire.work import RunBatch, WorkItem

    items = tuple(WorkItem(p.session, p.position, p.count, p.codec, p.output, p.chooses, len(p.data)) for p in parts)
    return RunBatch(1, items), *[part.data for part in parts]


DAEMON = """
import asyncio, sys
from potluck.shard.worker_process import WorkerProcess
from potluck.wire.work import Load
from potluck.wire.messages import Stage
from potluck.wire.worker_settings import WorkerSettings

async def main():
    loaded = asyncio.Event()
    worker = await WorkerProcess.start(WorkerSettings.decode(sys.argv[1]), lambda *_: loaded.set(), print)
    worker.send(Load(Stage(0, 2, True, False)))
    await loaded.wait()
    assert not {"numba", "numpy", "llvmlite", "potluck.engine"} & set(sys.modules), "the daemon imports the engine"
    print(worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_does_not_outlive_its_daemon(run: Run, settings: WorkerSettings, is_stopped: bool) -> None:
    command = [sys.executable, "-c", DAEMON, settings.encode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        daemon.kill()
        daemon.wait()
    assert run(gone(pid)) < 1.0


def test_rubbish_from_the_daemon_ends_the_worker(settings: WorkerSettings) -> None:
    ours, theirs = socket.socketpair()
    our_pulse, their_pulse = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "potluck.worker.process",
        "--fd",
        str(theirs.fileno()),
        "--pulse-fd",
        str(their_pulse.fileno()),
        "--settings",
        settings.encode(),
    ]
    fds = (theirs.fileno(), their_pulse.fileno())
    with ours, our_pulse, subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE) as worker:
        theirs.close()
        their_pulse.close()
        ours.sendall(os.urandom(64))
        _, complaint = worker.communicate(timeout=20)
    assert worker.returncode == 76
    assert b"stream is broken" in complaint


def test_rubbish_from_the_worker_ends_it(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        client = await WorkerClient.start(settings)
        client.process.data_received(b"\xff" * 64)
        reason, _ = await asyncio.wait_for(client.lost, 1)
        assert "broken" in reason
        await client.stop()
        assert not psutil.pid_exists(client.process.pid)

    run(scenario())


def test_a_worker_has_two_sockets_to_its_daemon_and_no_secrets(run: Run, shared: WorkerClient) -> None:
    process = psutil.Process(shared.process.pid)
    assert process.net_connections(kind="inet") == []
    assert len(process.net_connections(kind="unix")) == 2
    assert set(process.environ()) <= {*worker_environment(), "LC_CTYPE"}
    assert "API_KEY" not in worker_environment({"API_KEY": "secret", "PATH": "/bin"})
    if sys.platform.startswith("linux"):
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if "core file" in line).split()[4:6] == ["0", "0"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_loads_no_library_that_it_does_not_use(run: Run, shared: WorkerClient) -> None:
    """numba would: where scipy is installed, as it is here, and cffi, which cryptography brings."""
    mapped = Path(f"/proc/{shared.process.pid}/maps").read_text()
    assert "numba" in mapped
    assert [name for name in ("scipy", "_cffi_backend", "cryptography", "torch") if f"/{name}" in mapped] == []


def test_memory_and_handles_return(run: Run, settings: WorkerSettings) -> None:
    async def scenario() -> None:
        process = psutil.Process()
        handles = process.num_fds()
        for _ in range(2):
            client = await WorkerClient.start(settings, FIRST)
            await client.stop()
        assert process.num_fds() == handles
        assert len(asyncio.all_tasks()) == 1

    run(scenario())


def test_kv_comes_back_with_the_session(run: Run, shared: WorkerClient) -> None:
    async def scenario() -> None:
        worker = psutil.Process(shared.process.pid)
        before = 0
        for round_number in range(30):
            sessions = [os.urandom(16) for _ in range(8)]
            for session in sessions:
                await shared.open(session, WHOLE, 256)
            await shared.run(*[tokens_part(session, 0, [3] * 250) for session in sessions])
            for session in sessions:
                shared.process.send(CloseSession(session))
            if round_number == 5:
                before = worker.memory_info().rss
        assert worker.memory_info().rss - before < 4 << 20

    run(scenario())


def test_rows_of_a_stage_without_output_come_back(run: Run, shared: WorkerClient, whole: CpuEngine) -> None:
    async def scenario() -> None:
        await shared.open(A, FIRST)
        [(_, data)] = await shared.run(tokens_part(A, 0, PROMPT, output="fp32"))
        assert rows_of(data).shape == (len(PROMPT), SHAPE.hidden_size)
        shared.process.send(CloseSession(A))

    run(scenario())


# ---------------------------------------------------------------- sessions that are parked


def sampler_after(tokens: Sequence[int]) -> Sampler:
    return Sampler(SamplingParams(), 0, len(tokens), tuple(tokens), (2,), 200)


def test_a_session_that_resumes_a_parked_one_gives_the_bits_of_one_that_computed_everything(
    settings: WorkerSettings, run: Run
) -> None:
    longer = [*PROMPT[:4], 77, 78]

    async def talk() -> tuple[object, object, list[int]]:
        client = await WorkerClient.start(settings, WHOLE)
        await client.open(A, WHOLE, sampler=GREEDY)
        await client.run(tokens_part(A, 0, PROMPT, chooses=True))
        client.process.send(ParkSession(A, len(PROMPT)))
        resumed = await client.ask(OpenSession(B, WHOLE, 64, (), sampler_after(longer), A, 4))
        again = await client.ask(OpenSession(C, WHOLE, 64, (), sampler_after(longer), b"x" * 16, 4))
        [(one, _)] = await client.run(tokens_part(B, 4, longer[4:], chooses=True))
        [(two, _)] = await client.run(tokens_part(C, 0, longer, chooses=True))
        await client.stop()
        return resumed, again, [one.token or 0, two.token or 0]

    resumed, again, tokens = run(talk())
    assert (resumed, again) == (SessionOpened(B, 4), SessionOpened(C, 0))
    assert tokens[0] == tokens[1] > 0


def test_parked_sessions_give_way_to_those_that_need_the_room(tmp_path: Path, run: Run) -> None:
    """Room for two pages: the parked page is kept while it fits, goes for another's sake, and is never a reason to refuse."""
    page_bytes = KvShape(SHAPE.kv_head_count, SHAPE.head_size, True).page_bytes(SHAPE.layer_count)
    settings = tiny_settings(tmp_path, kv_budget_bytes=3 * page_bytes)

    async def talk() -> list[object]:
        client = await WorkerClient.start(settings, WHOLE)
        await client.open(A, WHOLE, 128, sampler=GREEDY)
        await client.run(tokens_part(A, 0, PROMPT))
        client.process.send(ParkSession(A, len(PROMPT)))
        answers = [await client.ask(OpenSession(B, WHOLE, 128, (), sampler_after(PROMPT), A, 4))]
        client.process.send(CloseSession(B))
        answers.append(await client.open(C, WHOLE, 192, sampler=GREEDY))
        client.process.send(CloseSession(C))
        answers.append(await client.ask(OpenSession(B, WHOLE, 128, (), sampler_after(PROMPT), A, 4)))
        await client.stop()
        return answers

    assert run(talk()) == [SessionOpened(B, 4), SessionOpened(C, 0), SessionOpened(B, 0)]
