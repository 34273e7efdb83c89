"""One batch: bodies to steps, steps of the same layers through their engine together, results to outputs.

An item that fails says so in its own output, leaves its session as it was, and does not keep the others from running.
"""

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from potluck.core.errors import BadRequest, PotluckError, ShardCorruption
from potluck.engine.sampling import Chosen
from potluck.engine.shard_engine import Step, StepResult
from potluck.wire.codecs import check_rows, decode, encode
from potluck.wire.prompt_scores import TokenScore
from potluck.wire.work import BatchDone, RunBatch, WorkItem, WorkOutput
from potluck.worker.prompt_scoring import score_rows
from potluck.worker.sampler import TokenChooser
from potluck.worker.session import WorkerSession, rounded, roundings

_MESSAGE_CHARACTERS = 1024  # what the protocol takes
_TOKEN_BYTES = 4


@dataclass
class _Job:
    """An item on its way; ends with a result or an error."""

    item: WorkItem
    session: WorkerSession
    step: Step
    turn: int  # which of its session's steps in this batch it is
    result: StepResult | None = None
    chosen: Chosen | None = None
    data: bytes = b""  # scores of the prompt, where those are wanted
    error: PotluckError | None = None

    @property
    def group(self) -> tuple[object, ...]:
        return self.turn, id(self.session.engine), self.session.layers, self.session.boundaries


class BatchRunner:
    """Runs batches on the sessions of one worker."""

    def __init__(self, sessions: Mapping[bytes, WorkerSession], row_norm_limit: float) -> None:
        self._sessions = sessions
        self._row_norm_limit = row_norm_limit

    def run(self, batch: RunBatch, body: bytes) -> tuple[BatchDone, list[bytes]]:
        """The answer, and the parts of its body."""
        view, offset, turns = memoryview(body), 0, dict[bytes, int]()
        jobs: list[_Job | PotluckError] = []
        for item in batch.items:
            turn = turns[item.session] = turns.get(item.session, 0) + 1
            try:
                jobs.append(self._prepare(item, view[offset : offset + item.size_bytes], turn))
            except PotluckError as error:
                jobs.append(error)
            offset += item.size_bytes
        start = time.perf_counter()
        for group in _groups([job for job in jobs if isinstance(job, _Job)]):
            _run_group(group)
        compute_us = int((time.perf_counter() - start) * 1e6)
        return _answer(batch, jobs, compute_us)

    def _prepare(self, item: WorkItem, data: memoryview, turn: int) -> _Job:
        session = self._sessions.get(item.session)
        if session is None:
            raise BadRequest("there is no such session in the worker")
        if item.count < 1 or item.position + item.count > session.positions:
            raise BadRequest(
                f"{item.count} tokens from position {item.position} do not fit into the {session.positions} reserved"
            )
        if item.chooses and session.chooser is None:
            raise BadRequest("this session chooses no tokens here")
        tokens = _token_ids(item, data, session) if item.codec is None else None
        rows = self._rows(item, data, session) if item.codec is not None else None
        step = Step(
            session.number, item.position, tokens, rows, (item.count - 1,) if item.chooses else (),
            is_greedy=session.chooser is not None and session.chooser.takes_likeliest,
            wants_hidden=item.output_codec is not None or item.scores_prompt,
        )  # fmt: skip
        return _Job(item, session, step, turn)

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


def _groups(jobs: list[_Job]) -> list[list[_Job]]:
    """Jobs that an engine can run together; a session's second step in the batch comes after its first."""
    if len(jobs) < 2:
        return [jobs] if jobs else []
    groups: dict[tuple[object, ...], list[_Job]] = {}
    for job in jobs:
        groups.setdefault(job.group, []).append(job)
    return sorted(groups.values(), key=lambda group: group[0].turn)


def _run_group(group: list[_Job]) -> None:
    session = group[0].session
    try:
        results = session.engine.forward([job.step for job in group], roundings(session.boundaries))
    except PotluckError as error:
        # The engine checks before it computes, so nothing has happened yet; alone, each job meets only its own error.
        if len(group) == 1:
            group[0].error = error
        else:
            for job in group:
                _run_group([job])
        return
    for job, result in zip(group, results, strict=True):
        _finish(job, result)


def _finish(job: _Job, result: StepResult) -> None:
    chooser, step = job.session.chooser, job.step
    try:
        if chooser is not None and step.tokens is not None:
            chooser.learn(step.position, step.tokens)
        if job.item.chooses:
            assert chooser is not None
            job.chosen = _chosen(chooser, result, step.position + step.count)
        if job.item.scores_prompt:
            job.data = _scores(job, result)
    except PotluckError as error:
        job.session.engine.truncate(job.session.number, step.position)
        job.error = error
        return
    job.result = result


def _chosen(chooser: TokenChooser, result: StepResult, position: int) -> Chosen | None:
    if result.likeliest is not None:
        return chooser.take(result.likeliest[0], position)
    assert result.logits is not None
    return chooser.choose(result.logits[0], position)


def _scores(job: _Job, result: StepResult) -> bytes:
    session, step = job.session, job.step
    if session.chooser is None:
        raise BadRequest("this session scores no prompt here")

    def scored(following: Sequence[int], top: int) -> list[TokenScore]:
        return score_rows(session.engine, session.number, result.hidden, following, top, roundings(session.boundaries))

    return session.chooser.score(step.position, step.count, scored)


def _answer(batch: RunBatch, jobs: list[_Job | PotluckError], compute_us: int) -> tuple[BatchDone, list[bytes]]:
    outputs, parts = [], []
    for item, job in zip(batch.items, jobs, strict=True):
        error = job.error if isinstance(job, _Job) else job
        if error is not None:
            outputs.append(WorkOutput(item.session, 0, None, None, (), error.code, str(error)[:_MESSAGE_CHARACTERS]))
            continue
        assert isinstance(job, _Job)
        data = job.data
        if item.output_codec is not None and job.result is not None:
            data = encode(item.output_codec, job.result.hidden)
        if data:
            parts.append(data)
        token, logprob, top = job.chosen or (None, None, ())
        outputs.append(WorkOutput(item.session, len(data), token, logprob, top, "", ""))
    return BatchDone(batch.batch, tuple(outputs), compute_us), parts
