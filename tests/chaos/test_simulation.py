"""Seeds of the simulation: texts identical, nothing left behind. And the other way round: broken code does not get through.

5,000 seeds here, 100,000 with POTLUCK_LONG=1. A seed that fails is printed with the command that repeats it.
"""

import concurrent.futures
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest

from potluck.orchestrator.generation import Generation, GenerationRequest
from potluck.orchestrator.journal import Journal
from potluck.orchestrator.prompt_scores import PromptScores
from potluck.shard.ahead import Ahead
from potluck.shard.batching import Running
from potluck.shard.core import ShardCore
from potluck.shard.foresight import ForeseenAnswer, ForeseenArrival, Foresight
from potluck.shard.sessions import ShardSession
from potluck.testing.simulation import Outcome, Parts, repeat_command, run_seed, run_seeds
from potluck.wire.effects import SendTo
from potluck.wire.frame_writer import FrameWriter
from potluck.wire.frames import Buffer
from potluck.wire.messages import Message, Result, Rewire, Sampler, Step
from potluck.wire.work import RunBatch

SEEDS = 100_000 if os.environ.get("POTLUCK_LONG") else 5_000
PROCESSES = min(2, os.cpu_count() or 1)
CHUNK = 100


def run_chunk(seeds: range) -> list[Outcome]:
    """Looking for garbage once a chunk, and not all the time, saves a quarter of the time; a chunk leaves ten megabytes."""
    done = run_seeds(seeds)
    gc.collect()
    return done


def outcomes(seeds: int) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, context, initializer=gc.disable) as pool:
        for done in pool.map(run_chunk, [range(first, first + CHUNK) for first in range(0, seeds, CHUNK)]):
            yield from done


def test_every_text_is_the_undisturbed_one_and_nothing_is_left_behind() -> None:
    bad: list[str] = []
    failovers = faults = foreseen = 0
    longest_s = 0.0
    for outcome in outcomes(SEEDS):
        failovers += outcome.failovers
        faults += len(outcome.faults)
        foreseen += outcome.foreseen
        longest_s = max(longest_s, outcome.longest_pause_s)
        if outcome.problem:
            bad.append(f"{repeat_command(outcome.seed)}  # {outcome.problem[:300]} ({', '.join(outcome.faults)})")
    print(
        f"\n{SEEDS} seeds, {faults} faults, {failovers} failovers, longest pause {longest_s:.1f} s simulated; {foreseen} sent ahead"
    )
    assert not bad, "\n".join(bad[:10])
    assert failovers > SEEDS // 4  # it did go wrong, often enough
    assert foreseen > 10 * SEEDS  # and most of what went right had left before it was decided


def test_a_seed_repeats_itself() -> None:
    for seed in range(20):
        told: list[list[str]] = [[], []]
        first, second = (run_seed(seed, tell=lines.append) for lines in told)
        assert first == second
        assert told[0] == told[1]


# ---------------------------------------------------------------- the simulation can fail


class IgnoresEpochs(ShardCore):
    """Takes a zombie's late frames for the present ones."""

    def _on_step(self, sender: bytes, session: ShardSession, step: Step, body: bytes, now_s: float) -> None:
        super()._on_step(sender, session, msgspec.structs.replace(step, epoch=session.epoch), body, now_s)


class IgnoresPositions(ShardCore):
    """Takes every step for the next one."""

    def _on_step(self, sender: bytes, session: ShardSession, step: Step, body: bytes, now_s: float) -> None:
        super()._on_step(sender, session, msgspec.structs.replace(step, position=session.length_in), body, now_s)


class TakesRehearsalsForSteps(ShardCore):
    def _on_step(self, sender: bytes, session: ShardSession, step: Step, body: bytes, now_s: float) -> None:
        super()._on_step(sender, session, msgspec.structs.replace(step, is_rehearsal=False), body, now_s)


class ForgetsToTruncate(ShardCore):
    """Keeps what the head never saw: what it answers at a rewire is what the head hoped for."""

    def _cut(self, session: ShardSession, length: int) -> None:
        super()._cut(session, length)
        session.length_in = session.length_out = length
        self._effects.items.pop()


class NeverFreesTheWorker(ShardCore):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        drop = self._life.drop

        def leak(session: ShardSession, now_s: float) -> None:
            drop(session, now_s)
            if self._effects.items:
                self._effects.items.pop()

        self._life.drop = leak  # type: ignore[method-assign]


class WaitsForADeadHead(ShardCore):
    """Keeps the sessions of a head whose link broke."""

    def on_node_lost(self, node: bytes, now_s: float) -> None:
        if all(session.head != node for session in self.sessions):
            super().on_node_lost(node, now_s)


class ObeysAnybody(ShardCore):
    """Takes whoever speaks for the session's head."""

    def on_message(self, sender: bytes, message: Message, body: bytes, now_s: float, worker_idle_us: int) -> None:
        session = self._sessions.get(getattr(message, "session", b""))
        is_step = isinstance(message, Step)
        super().on_message(sender if session is None or is_step else session.head, message, body, now_s, worker_idle_us)


class KeepsTheOutbox(ShardCore):
    """Replays what belongs to a past that was cut off."""

    def _cut(self, session: ShardSession, length: int) -> None:
        kept, self._outbox.truncate = self._outbox.truncate, lambda *_: None  # type: ignore[method-assign]
        super()._cut(session, length)
        self._outbox.truncate = kept  # type: ignore[method-assign]


class SendsOnPastAGap(ShardCore):
    """Relies on the order to replay being there before the next step is."""

    def _on_rewire(self, session: ShardSession, message: Rewire) -> None:
        super()._on_rewire(session, message)
        session.passed_on = max(session.passed_on, session.length_in)


class ResumesOneTooLate(Generation):
    def _send_tokens(self, start: int, stop: int, *, chooses: bool) -> None:
        super()._send_tokens(start, stop, chooses=chooses)
        last = self._effects[-1]
        if self.epoch and start == self._journal.confirmed and isinstance(last.message, Step):
            late = msgspec.structs.replace(last.message, position=start + 1)
            self._effects[-1] = SendTo(last.node, last.address, late, last.body)


class ShortJournal(Journal):
    def sampler(self) -> Sampler:
        return msgspec.structs.replace(super().sampler(), history=self._request.prompt)


class ForgetsWhatWasSaid(Generation):
    """A new sampling shard gets the prompt, and not what was generated since."""

    def __init__(self, request: GenerationRequest, *rest: object) -> None:
        super().__init__(request, *rest)  # type: ignore[arg-type]
        self._journal = ShortJournal(request)


class CredulousJournal(Journal):
    def is_next(self, message: Result, sent: int) -> bool:
        return True


class BelievesEveryResult(Generation):
    """Takes a token twice where it comes twice."""

    def __init__(self, request: GenerationRequest, *rest: object) -> None:
        super().__init__(request, *rest)  # type: ignore[arg-type]
        self._journal = CredulousJournal(request)


class NeverCloses(Generation):
    def _end(self, frame: object) -> None:
        before = len(self._effects)
        super()._end(frame)  # type: ignore[arg-type]
        del self._effects[before:]


class ForgetsScores(Generation):
    """Starts to collect the prompt's log probabilities anew with every epoch."""

    def _form(self, now_s: float) -> None:
        super()._form(now_s)
        request = self.request
        self._journal.scores = PromptScores(request.prompt, request.prompt_logprobs, request.vocabulary_size)


class LaxJournal(Journal):
    is_asked = False

    def sampler(self) -> Sampler:
        was_asked, self.is_asked = self.is_asked, True
        sampler = super().sampler()
        return msgspec.structs.replace(sampler, grammar=None) if was_asked else sampler


class ForgetsTheGrammar(Generation):
    """A new epoch's sampler is not held to anything."""

    def __init__(self, request: GenerationRequest, *rest: object) -> None:
        super().__init__(request, *rest)  # type: ignore[arg-type]
        self._journal = LaxJournal(request)


class NeverReplays(Generation):
    """Marks new stages as fed without feeding them."""

    def _feed(self, feed: object) -> None:
        return


class ForeseesPastTheCredit(Foresight):
    """Sends tokens round the ring that its reader has not asked for."""

    def _next_token(self, number: int, running: Running, session: ShardSession) -> ForeseenAnswer | None:
        credits_left, session.credits = session.credits, 1
        foreseen = super()._next_token(number, running, session)
        session.credits = credits_left
        return foreseen


class ForeseesWhatWasCut(Foresight):
    """Takes what the worker computes for wanted, whatever has been cut off since."""

    def _next_answer(self) -> ForeseenAnswer | None:
        for number, batch in self._batches.running.items():
            if len(batch) != 1:
                continue
            [running] = batch
            self._batches.running[number] = [msgspec.structs.replace(running, cuts=running.session.cuts)]
            foreseen = super()._next_answer()
            self._batches.running[number] = [running]
            return foreseen
        return None


class ForgetsThatTheSamplerIsNew(Foresight):
    def _next_arrival(self, session: ShardSession) -> ForeseenArrival | None:
        untold, session.untold_sampler = session.untold_sampler, None
        foreseen = super()._next_arrival(session)
        session.untold_sampler = untold
        return foreseen


class NotesTheWrongBatch(Foresight):
    def _next_arrival(self, session: ShardSession) -> ForeseenArrival | None:
        foreseen = super()._next_arrival(session)
        if foreseen is None or foreseen.step.position % 7:
            return foreseen
        return msgspec.structs.replace(foreseen, batch=RunBatch(foreseen.batch.batch + 1, foreseen.batch.items))


def foreseeing(kind: type[Foresight]) -> Parts:
    class Core(ShardCore):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self.foresight = kind(self.node, self._batches, self._residency, self._life)

    Core.__name__ = kind.__name__
    return Parts(core=Core)


MUTANTS = [
    Parts(core=IgnoresEpochs), Parts(core=IgnoresPositions), Parts(core=TakesRehearsalsForSteps),
    Parts(core=ForgetsToTruncate), Parts(core=NeverFreesTheWorker),
    Parts(core=WaitsForADeadHead), Parts(core=ObeysAnybody),
    Parts(core=KeepsTheOutbox), Parts(core=SendsOnPastAGap), Parts(generation=ResumesOneTooLate), Parts(generation=ForgetsWhatWasSaid),
    Parts(generation=BelievesEveryResult), Parts(generation=NeverCloses), Parts(generation=NeverReplays),
    Parts(generation=ForgetsScores), Parts(generation=ForgetsTheGrammar), foreseeing(ForeseesPastTheCredit),
    foreseeing(ForeseesWhatWasCut), foreseeing(ForgetsThatTheSamplerIsNew), foreseeing(NotesTheWrongBatch),
]  # fmt: skip


def name_of(parts: Parts) -> str:
    return parts.core.__name__ if parts.core is not ShardCore else parts.generation.__name__


@pytest.mark.parametrize("parts", MUTANTS, ids=name_of)
def test_broken_code_is_found_within_a_few_hundred_seeds(parts: Parts) -> None:
    assert first_problem(parts), f"{name_of(parts)} got through 600 seeds"


def first_problem(parts: Parts | None = None) -> str:
    for seed in range(600):
        try:
            problem = run_seed(seed, parts=parts).problem
        except Exception as error:  # a mutant may also break what the code relies on
            problem = repr(error)
        if problem:
            print(f"\nseed {seed}: {problem[:120]}")
            return problem
    return ""


def mixes_up_bodies(writer: FrameWriter, message: Message, body: Buffer = b"") -> None:
    """Sends a step with the activations of the one before it, as a buffer that is used again too early would."""
    before, writer.before = getattr(writer, "before", body), body  # type: ignore[attr-defined]
    _push(writer, message, before if type(message) is Step and len(before) == len(body) else body)


def forgets_the_epoch(writer: FrameWriter, message: Message, body: Buffer = b"") -> None:
    _push(writer, msgspec.structs.replace(message, epoch=0) if type(message) is Step else message, body)


_push = FrameWriter.push


def test_foresight_that_outlives_its_moment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ahead, "forget", lambda ahead: None)
    assert first_problem()


@pytest.mark.parametrize("push", [mixes_up_bodies, forgets_the_epoch])
def test_a_broken_wire_is_found_too(push: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameWriter, "push", push)
    problems = [outcome.problem for outcome in run_seeds(range(100)) if outcome.problem]
    assert len(problems) > 10
