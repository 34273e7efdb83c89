"""One batch: bodies to steps, steps of the same layers through their engine together, results to outputs.

An item that fails says so in its own output, leaves its session as it was, and does not keep the others from running.
"""

import contextlib
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from potluck.core.errors import BadRequest, PotluckError, ShardCorruption
from potluck.engine.sampling import Chosen
from potluck.engine.shard_engine import Step, StepResult
from potluck.wire.codecs import check_rows, decode, encode
from potluck.wire.prompt_scores import TokenScore
from potluck.wire.work import BatchDone, RunBatch, WorkItem, WorkOutput
from potluck.worker.prompt_scoring import score_rows
from potluck.worker.sampler import TokenChooser
from potluck.worker.session import WorkerSession, rounded

_MESSAGE_CHARACTERS = 1024  # what the protocol takes
_TOKEN_BYTES = 4


class _Job(msgspec.Struct):
    """An item on its way. It ends with its output, and perhaps bytes to go with it."""

    item: WorkItem
    session: WorkerSession
    step: Step
    output: WorkOutput | None = None
    data: bytes = b""


class BatchRunner:
    """Runs batches on the sessions of one worker."""

    def __init__(self, sessions: Mapping[bytes, WorkerSession], row_norm_limit: float) -> None:
        self._sessions = sessions
        self._row_norm_limit = row_norm_limit
        self._last = RunBatch(0, ())
        self._decoding = b""  # the session whose next token is likely to be next
        self.compute_s = 0.0  # of the last batch
        self.on_core_s = 0.0  # for so much of that the thread had a core

    def run(self, batch: RunBatch, body: bytes) -> tuple[BatchDone, list[bytes]]:
        """The answer, and the parts of its body."""
        view, offset = memoryview(body), 0
        jobs: list[_Job] = []
        refused: dict[int, WorkOutput] = {}
        for index, item in enumerate(batch.items):
            try:
                jobs.append(self._prepare(item, view[offset : offset + item.size_bytes]))
            except PotluckError as error:
                refused[index] = _failed(item, error)
            offset += item.size_bytes
        start, start_on_core = time.perf_counter(), time.thread_time()
        for group in _groups(jobs):
            _run_group(group)
        self.compute_s, self.on_core_s = time.perf_counter() - start, time.thread_time() - start_on_core
        self._last = batch
        self._decoding = jobs[0].item.session if len(jobs) == 1 and _is_decoding(jobs[0]) else b""
        outputs = [job.output for job in jobs if job.output is not None]
        for index, output in refused.items():  # in the order of their places
            outputs.insert(index, output)
        return BatchDone(batch.batch, tuple(outputs), int(self.compute_s * 1e6)), [job.data for job in jobs if job.data]

    def look_ahead(self) -> RunBatch | None:
        """To be called right after an answer, where nothing waits: makes ready what is likely to be asked for next, and tells it."""
        session = self._sessions.get(self._decoding)
        if session is None:
            return None
        if not session.roundings:
            with contextlib.suppress(
                PotluckError
            ):  # no memory for the next page, say: the step will be answered with it
                session.engine.expect(session.number)
        item, *more = self._last.items
        if more or item.count > 1:  # of a prompt: as an item, what follows is of another kind
            return None
        return RunBatch(self._last.batch + 1, (msgspec.structs.replace(item, position=item.position + 1),))

    def claim_device(self) -> None:
        """To be called while nothing has come since: where the next step will need a device that others use too."""
        session = self._sessions.get(self._decoding)
        if session is not None:
            session.engine.claim_device()

    def rehearse(self, item: WorkItem, body: bytes) -> None:
        """Does what comes before the computing and forgets it, so that the code is in the caches when the step comes."""
        with contextlib.suppress(PotluckError):  # whatever is wrong, the step itself will be answered with it
            self._prepare(item, memoryview(body))

    def _prepare(self, item: WorkItem, data: memoryview) -> _Job:
        session = self._sessions.get(item.session)
        if session is None:
            raise BadRequest("there is no such session in the worker")
        if item.count < 1 or item.position + item.count > session.positions:
            raise BadRequest(
                f"{item.count} tokens from position {item.position} do not fit into the {session.positions} reserved"
            )
        chooser = session.chooser
        if item.chooses and chooser is None:
            raise BadRequest("this session chooses no tokens here")
        tokens = _token_ids(item, data, session) if item.codec is None else None
        rows = self._rows(item, data, session) if item.codec is not None else None
        step = Step(
            session.number, item.position, tokens, rows, (item.count - 1,) if item.chooses else (),
            chooser is not None and chooser.takes_likeliest, item.output_codec is not None or item.scores_prompt,
        )  # fmt: skip
        return _Job(item, session, step)

    def _rows(self, item: WorkItem, data: memoryview, session: WorkerSession) -> np.ndarray:
        assert item.codec is not None
        if session.stage.has_embedding:
            raise BadRequest("this session takes token ids, not activations")
        rows = decode(item.codec, data, item.count, session.engine.facts.hidden_size)
        # All rows together are within the limit nearly always, and that is quicker to see; NaN and Inf are not.
        if not np.vdot(rows, rows) <= self._row_norm_limit**2:
            problem = check_rows(rows, self._row_norm_limit)
            if problem is not None:
                raise ShardCorruption(f"corrupted activations arrived: {problem}")
        codec = session.rounds_input_as
        return rows if codec is None or codec == item.codec else rounded(codec, rows)


def _token_ids(item: WorkItem, data: memoryview, session: WorkerSession) -> tuple[int, ...]:
    if not session.stage.has_embedding:
        raise BadRequest("this session takes activations, not token ids")
    if len(data) != item.count * _TOKEN_BYTES:
        raise BadRequest(f"{len(data)} bytes are not {item.count} token ids")
    return struct.unpack(f"<{item.count}i", data)


def _failed(item: WorkItem, error: PotluckError) -> WorkOutput:
    return WorkOutput(item.session, 0, None, None, (), error.code, str(error)[:_MESSAGE_CHARACTERS])


def _is_decoding(job: _Job) -> bool:
    """Whether one more token is likely to follow."""
    return job.output is not None and not job.output.code and (job.item.count == 1 or job.item.chooses)


def _groups(jobs: list[_Job]) -> list[list[_Job]]:
    """Jobs that an engine can run together; a session's second step in the batch comes after its first."""
    if len(jobs) < 2:
        return [jobs] if jobs else []
    turns: Counter[bytes] = Counter()
    groups: dict[tuple[object, ...], list[_Job]] = {}
    for job in jobs:
        session = job.session
        turns[job.item.session] += 1
        key = (turns[job.item.session], id(session.engine), session.layers, session.boundaries)
        groups.setdefault(key, []).append(job)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # type: ignore[arg-type, return-value]


def _run_group(group: list[_Job]) -> None:
    session = group[0].session
    try:
        results = session.engine.forward([job.step for job in group], session.roundings)
    except PotluckError as error:
        # The engine checks before it computes, so nothing has happened yet; alone, each job meets only its own error.
        if len(group) == 1:
            group[0].output = _failed(group[0].item, error)
        else:
            for job in group:
                _run_group([job])
        return
    for job, result in zip(group, results, strict=True):
        try:
            _finish(job, result)
        except PotluckError as error:
            job.session.engine.truncate(job.session.number, job.step.position)
            job.output, job.data = _failed(job.item, error), b""


def _finish(job: _Job, result: StepResult) -> None:
    """The token that follows, where one is to be chosen; the bytes that are wanted back."""
    item, step, chooser = job.item, job.step, job.session.chooser
    chosen = None
    if chooser is not None:
        if step.tokens is not None:
            chooser.learn(step.position, step.tokens)
        if item.chooses:
            chosen = _chosen(chooser, result, step.position + item.count)
        if item.scores_prompt:
            job.data = _scores(job, result)
    elif item.scores_prompt:
        raise BadRequest("this session scores no prompt here")
    if item.output_codec is not None:
        job.data = encode(item.output_codec, result.hidden)
    token, logprob, top = chosen or (None, None, ())
    job.output = WorkOutput(item.session, len(job.data), token, logprob, top, "", "")


def _chosen(chooser: TokenChooser, result: StepResult, position: int) -> Chosen | None:
    if result.likeliest is not None:
        return chooser.take(result.likeliest[0], position)
    assert result.logits is not None
    return chooser.choose(result.logits[0], position)


def _scores(job: _Job, result: StepResult) -> bytes:
    session, step = job.session, job.step
    assert session.chooser is not None

    def scored(following: Sequence[int], top: int) -> list[TokenScore]:
        return score_rows(session.engine, session.number, result.hidden, following, top, session.roundings)

    return session.chooser.score(step.position, step.count, scored)
