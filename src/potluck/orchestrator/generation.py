"""One generation, decided without I/O: messages, losses and the clock in; messages and frames out.

Whatever breaks, the pipeline is rebuilt under a new epoch, cut back to the journal, fed what it lacks, and goes on with the same
token. Sampling is a pure function of the journal, so nothing that was delivered can change and nothing that follows can differ.
Here is the answer's way from the first OPEN to the last token; what each part knows is its own: `journal` and `flow` the tokens,
`pipeline` the stages, `progress` the clock, `repair` what is done when something breaks.
"""

import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

from potluck.core.exactness import Exactness, exactness_of
from potluck.core.limits import ARITHMETIC_VERSION
from potluck.core.remembered import AnswerSoFar
from potluck.orchestrator.flow import Flow
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, StreamFrame, TokenDelta
from potluck.orchestrator.journal import Journal
from potluck.orchestrator.outage import Outage
from potluck.orchestrator.pipeline import Pipeline, send_to
from potluck.orchestrator.progress import ProgressWatch
from potluck.orchestrator.recovery import Feed, HeadStage
from potluck.orchestrator.repair import Decision, Deed, Repair, Repick
from potluck.orchestrator.request import GenerationRequest, GenerationSettings, StepTiming
from potluck.orchestrator.reuse import LEAST_POSITIONS, Kept, Resumption
from potluck.planner.cover import Placed
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    MAX_STEP_TOKENS,
    Close,
    Credit,
    Fault,
    Message,
    Opened,
    Probe,
    Probed,
    Refused,
    Replay,
    Result,
    Rewired,
    Step,
)
from potluck.wire.spent import read_spent

__all__ = ["Generation", "GenerationRequest", "GenerationSettings", "Phase", "Repick", "StepTiming"]


_UNASKED = 0  # the number of a probe whose answer says nothing new


class Phase(enum.Enum):
    """FORMING: waiting for OPENED and REWIRED of an epoch; WAITING: nobody holds some layers; RUNNING; ENDED."""

    NEW = "new"
    FORMING = "forming"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


def _ignore(timing: StepTiming) -> None:
    return


class Generation:
    """The head's side of one session. `repick(kept, excluded, local_allowed)` gives replacements for each gap (None) in `kept`."""

    def __init__(
        self, request: GenerationRequest, pipeline: Sequence[Placed], repick: Repick, settings: GenerationSettings,
        new_session_id: Callable[[], bytes], head: bytes, resumption: Resumption | None = None,
    ) -> None:  # fmt: skip
        """`resumption`: of exactly these stages; what of it is left when it comes to that, the shards say."""
        self.request, self.settings = request, settings
        self.kept: Kept | None = None  # after the end: what the shards still have
        self.phase = Phase.NEW
        self.failovers = 0
        self.formed_s: float | None = None  # when the first pipeline stood
        self.counters: Counter[str] = Counter()
        self.on_timing: Callable[[StepTiming], None] = _ignore
        self._head = head
        self._journal = Journal(request, 0 if resumption is None else resumption.length)
        self._pipeline = Pipeline(request, settings, pipeline, new_session_id, self.counters)
        longest = self._journal.scores.most_positions
        self._flow = Flow(settings, wants_tokens=request.max_tokens > 0, longest_chunk=longest)
        self._watch = ProgressWatch(settings, sum(placed.step_us for placed in pipeline) / 1e6)
        self._repair = Repair(request, settings, self._pipeline, repick, self.counters)
        self._troubles = self._repair.troubles
        self._effects: list[SendTo] = []
        self._frames: deque[StreamFrame] = deque()
        if resumption is not None:
            self._pipeline.resume(resumption.kept.sessions)

    def __repr__(self) -> str:
        stages = ", ".join(self.stage_names)
        return f"<Generation {self.phase.value} epoch {self.epoch} {len(self.tokens)} tokens over {stages}>"

    # ------------------------------------------------------------ outside

    def take_effects(self) -> list[SendTo]:
        effects, self._effects = self._effects, []
        return effects

    def take_frames(self) -> list[StreamFrame]:
        frames = list(self._frames)
        self._frames.clear()
        return frames

    @property
    def tokens(self) -> list[int]:
        return self._journal.tokens

    @property
    def generated(self) -> list[int]:
        return self._journal.generated

    @property
    def answer(self) -> AnswerSoFar:
        return AnswerSoFar(len(self.request.prompt), tuple(self.tokens))

    @property
    def epoch(self) -> int:
        return self._pipeline.epoch

    @property
    def stages(self) -> tuple[Placed, ...]:
        return self._pipeline.placed

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._pipeline.stages)

    @property
    def sessions(self) -> tuple[bytes, ...]:
        return tuple(stage.session for stage in self._pipeline.stages)

    def has_session(self, session: bytes) -> bool:
        return any(stage.session == session for stage in self._pipeline.stages)

    @property
    def fell_back(self) -> bool:
        """Whether the head itself runs some stage now that another ran before."""
        return self._pipeline.has_fallen_back_to(self._head)

    @property
    def exactness(self) -> Exactness:
        return exactness_of(self._pipeline.arithmetics, self.failovers)

    @property
    def is_ended(self) -> bool:
        return self.phase is Phase.ENDED

    def start(self, now_s: float) -> None:
        assert self.phase is Phase.NEW
        self._watch.start(now_s)
        self._form(now_s)

    def consumed(self, count: int, now_s: float) -> None:
        """The reader has taken `count` tokens: so many more may be made."""
        flow, is_running = self._flow, self.phase is Phase.RUNNING
        if is_running and flow.is_reader_slow():
            self._watch.moved(now_s)  # until now there was nothing to do, and perhaps nobody looked at the clock
        credit = flow.read(count, is_running=is_running)
        if credit:
            self._give_credit(credit)
        if is_running and not flow.is_ring_running:
            self._pump()

    def cancel(self) -> None:
        self._end(self._finished("cancelled"))

    def next_wake_s(self) -> float:
        """When `on_time` wants to be called, at the latest."""
        return self._troubles.next_try_s() if self.phase is Phase.WAITING else self._watch.wake_s()

    def on_candidates(self, now_s: float) -> None:
        """The set of shards that can be reached has changed; somebody who was missing may be back."""
        if self.phase is Phase.WAITING:
            self._carry_out(self._repair.rebuild(now_s), now_s)

    def on_returned(self, node: bytes, now_s: float) -> None:
        """A node that was lost has been reached again."""
        self._repair.blame.returned(node)
        self.on_candidates(now_s)

    # ------------------------------------------------------------ forming an epoch

    def _form(self, now_s: float) -> None:
        """Opens new stages and rewires those that stay; steps flow when all have answered."""
        self._effects += self._pipeline.form(self._journal.confirmed, self._journal.sampler())
        self.phase = Phase.FORMING
        self._flow.stop()
        self._watch.forming(now_s)

    def _on_answer(self, stage: HeadStage, message: Opened | Rewired, now_s: float) -> None:
        pipeline = self._pipeline
        if message.epoch != pipeline.epoch or self.phase is not Phase.FORMING:
            self.counters["stale_epoch"] += 1
        elif not pipeline.take_answer(stage, message, self._journal.confirmed):
            self._again(now_s)
        else:
            self._watch.moved(now_s)
            if not pipeline.awaited:
                self._run(now_s)

    def _again(self, now_s: float) -> None:
        self._pipeline.epoch += 1
        self._form(now_s)

    def _run(self, now_s: float) -> None:
        """Every stage is in place: feed what is empty, then go on where the journal ends."""
        feeds = self._pipeline.settle()
        if feeds is None:
            return self._again(now_s)
        for feed in feeds:
            self._feed(feed)
        if self.formed_s is None:
            self.formed_s = now_s
            if feeds:
                self._journal.reused = 0  # some shard had not kept its part after all
        self.phase = Phase.RUNNING
        self._watch.formed(now_s, is_feeding=bool(feeds) or self._journal.has_prompt_left)
        # A GPU takes as long for a short chunk as for a long one.
        cuts_short = self._pipeline.arithmetics == {ARITHMETIC_VERSION}
        credit = self._flow.restart(self._journal.confirmed, len(self._pipeline.stages), cuts_short=cuts_short)
        if credit:
            self._give_credit(credit)
        return self._pump()

    def _feed(self, feed: Feed) -> None:
        resume = self._journal.confirmed
        if self._troubles.current is not None:
            self._troubles.current.fed(resume, is_from_tokens=feed.source is None and feed.first == 0)
        if feed.source is not None:
            source = self._pipeline.stages[feed.source]
            self._effects.append(send_to(source, Replay(source.session, self.epoch, 0, resume)))
            return
        chunk = min(max(self.settings.prefill_chunk, -(-resume // 32)), MAX_STEP_TOKENS)
        for start in range(0, resume, chunk):
            self._send_tokens(start, min(start + chunk, resume), chooses=False)

    def _give_credit(self, tokens: int) -> None:
        last = self._pipeline.stages[-1]
        self._effects.append(send_to(last, Credit(last.session, self._pipeline.epoch, tokens)))

    # ------------------------------------------------------------ running

    def _pump(self) -> None:
        """Sends what the journal has and the pipeline has not, as far as it may."""
        for chunk in self._flow.take_due(len(self._journal.tokens)):
            self._send_tokens(chunk.start, chunk.stop, chooses=chunk.chooses)

    def _send_tokens(self, start: int, stop: int, *, chooses: bool) -> None:
        stage = self._pipeline.stages[0]
        body = b"".join(token.to_bytes(4, "little") for token in self._journal.tokens[start:stop])
        step = Step(stage.session, self._pipeline.epoch, start, stop - start, 0, None, chooses)
        self._effects.append(send_to(stage, step, body))

    def on_message(self, node: bytes, message: Message, now_s: float, body: bytes = b"") -> None:
        """From an authenticated node. What does not come from the stage whose session it names is counted and dropped."""
        if self.phase is Phase.ENDED:
            return None
        stage = self._pipeline.stage_of(node, getattr(message, "session", b""))
        if stage is None:
            self.counters["unknown_session"] += 1
            return None
        if isinstance(message, Result):
            return self._on_result(stage, message, body, now_s)
        if isinstance(message, Opened | Rewired):
            return self._on_answer(stage, message, now_s)
        if isinstance(message, Refused):
            return self._carry_out(self._repair.on_refused(stage, message, self._watch.moved_s, now_s), now_s)
        if isinstance(message, Fault):
            return self._on_fault(stage, message, now_s)
        if isinstance(message, Probed):
            return self._on_probed(stage, message, now_s)
        self.counters["unexpected_message"] += 1
        return None

    def _on_result(self, stage: HeadStage, message: Result, body: bytes, now_s: float) -> None:
        pipeline, journal, flow, watch = self._pipeline, self._journal, self._flow, self._watch
        if message.epoch != pipeline.epoch or stage is not pipeline.stages[-1] or self.phase is not Phase.RUNNING:
            self.counters["stale_epoch"] += 1
            return
        if not journal.is_next(message, flow.sent):
            self.counters["unexpected_position"] += 1
            return
        problem = journal.problem_with(message, body)
        if problem is not None:
            return self._carry_out(self._repair.on_rubbish(stage, problem, watch.moved_s, now_s), now_s)
        journal.confirmed = message.position
        flow.arrived(message.position)
        self._tell_scores(now_s)
        if message.token is not None:
            spent = tuple((each.compute_us / 1e6, each.queue_us / 1e6) for each in read_spent(message.spent))
            since_s = now_s - watch.moved_s
            # Without a ring a round lasts as long as the reader takes.
            round_us = message.round_us if self.settings.uses_ring else 0
            self.on_timing(StepTiming(round_us / 1e6 or since_s, spent))
            watch.note_step(since_s)
            self._accept(message, message.token, now_s)
        watch.on_result(now_s, is_feeding=journal.has_prompt_left)
        if self.phase is Phase.RUNNING and not flow.is_ring_running:
            self._pump()

    def _tell_scores(self, now_s: float) -> None:
        """The prompt is through: tells its scores, and ends where nothing else was asked for."""
        frame = self._journal.scores.frame()
        if frame is not None:
            self._frames.append(frame)
        if self.request.max_tokens == 0 and self._journal.confirmed == len(self._journal.tokens):
            self._recovered(self._troubles.over(), now_s)
            self._end(self._finished("length"))

    def _accept(self, message: Result, token: int, now_s: float) -> None:
        outage = self._troubles.over()
        if outage is not None:
            self._recovered(outage, now_s)
        self._journal.tokens.append(token)
        self._flow.unread += 1
        is_end = token in self.request.eos
        if not is_end:
            self._frames.append(TokenDelta(token, message.position, message.logprob, message.top))
        if is_end or len(self._journal.tokens) - len(self.request.prompt) >= self.request.max_tokens:
            self._end(self._finished("stop" if is_end else "length"))

    def _recovered(self, outage: Outage | None, now_s: float) -> None:
        if outage is None:
            return
        self.failovers += 1
        lost, pause_ms = tuple(outage.lost), (now_s - outage.began_s) * 1000
        self._frames.append(
            ShardFailover(
                lost, self.stage_names, self.epoch, pause_ms, outage.replayed, outage.method, self.exactness
            )
        )  # fmt: skip

    # ------------------------------------------------------------ trouble

    def on_lost(self, node: bytes, reason: str, now_s: float) -> None:
        """The link to a node broke."""
        self._repair.blame.confirm(node)
        if self.phase not in (Phase.NEW, Phase.ENDED):  # who is lost before the start is found lost when asked to open
            self._fail(self._pipeline.on(node), f"connection lost: {reason}", now_s)

    def _fail(self, stages: Sequence[HeadStage], reason: str, now_s: float) -> None:
        self._carry_out(self._repair.lose(stages, reason, self._watch.moved_s, now_s), now_s)

    def _on_fault(self, stage: HeadStage, message: Fault, now_s: float) -> None:
        is_running, moved_s = self.phase is Phase.RUNNING, self._watch.moved_s
        self._carry_out(self._repair.on_fault(stage, message, moved_s, now_s, is_running=is_running), now_s)

    def _carry_out(self, decision: Decision, now_s: float) -> None:
        self._effects += decision.effects
        self._frames += decision.frames
        if decision.deed is Deed.FORM:
            self._again(now_s)
        elif decision.deed is Deed.WAIT:
            self.phase = Phase.WAITING
            self._watch.drop_questions()
        elif decision.deed is Deed.ABORT:
            self._end(PipelineAborted(*decision.reason, len(self.generated)))

    # ------------------------------------------------------------ the clock

    def on_time(self, now_s: float) -> None:
        """Called at or after `next_wake_s`, and harmless at any other time."""
        if self.phase is Phase.ENDED:
            return
        watch, late_s = self._watch, now_s - self.next_wake_s()
        if watch.has_slept(late_s):
            self._woke(late_s, now_s)
        elif self.phase is Phase.WAITING:
            self._give_sign_of_life(now_s)
            self._carry_out(self._repair.keep_waiting(now_s), now_s)
        elif watch.is_probing:
            if watch.is_time_up(now_s):
                self._judge(now_s)
        elif self.phase is Phase.RUNNING and self._flow.is_reader_slow():
            watch.moved(now_s)
            self._give_sign_of_life(now_s)
        elif watch.is_silence_long(now_s):
            self._probe(now_s)

    def _woke(self, late_s: float, now_s: float) -> None:
        """This process did not run: that nobody was heard meanwhile says nothing about them."""
        self._troubles.slept(late_s)
        self._watch.slept(late_s, now_s)
        if self._watch.is_probing:
            self._probe(now_s)

    def _probe(self, now_s: float) -> None:
        nonce = self._watch.ask(now_s)
        self._effects += [send_to(stage, Probe(stage.session, nonce)) for stage in self._pipeline.stages]

    def _give_sign_of_life(self, now_s: float) -> None:
        """This answer waits, for its reader or for a holder; those who have a part in it may wait for long."""
        if self._watch.takes_sign_of_life(now_s):
            stages = [stage for stage in self._pipeline.stages if not stage.is_lost]
            self._effects += [send_to(stage, Probe(stage.session, _UNASKED)) for stage in stages]

    def _on_probed(self, stage: HeadStage, message: Probed, now_s: float) -> None:
        if self._watch.answered(stage.session, message, len(self._pipeline.stages)):
            self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        """Who does not answer is gone; whose worker is silent at work is frozen; nobody moving for very long is a stall."""
        pipeline = self._pipeline
        finding = self._watch.judge(pipeline.stages, pipeline.awaited, self._flow.sent, len(self.tokens), now_s)
        if finding is None:
            return
        if finding.stalled is None:
            return self._fail(finding.silent, "does not answer", now_s)
        return self._carry_out(self._repair.on_stall(*finding.stalled, self._watch.moved_s, now_s), now_s)

    # ------------------------------------------------------------ the end

    def _finished(self, reason: Literal["stop", "length", "cancelled"]) -> Finished:
        return Finished(reason, len(self.generated), self.failovers, self.exactness, self._journal.reused)

    def _end(self, frame: StreamFrame) -> None:
        if self.phase is Phase.ENDED:
            return
        keeps = self._kept_positions(frame)
        self.phase = Phase.ENDED
        self._effects += [send_to(stage, Close(stage.session, keeps)) for stage in self._pipeline.stages]
        if keeps:
            self.kept = Kept(tuple(self.tokens[:keeps]), self.stages, self.sessions, self.request.boundaries)
        self._frames.append(frame)

    def _kept_positions(self, frame: StreamFrame) -> int:
        """How much may stay with the shards. Nothing of an answer that its reader has left: that frees everything."""
        confirmed = self._journal.confirmed
        is_whole = isinstance(frame, Finished) and frame.reason != "cancelled" and self.phase is Phase.RUNNING
        return confirmed if is_whole and self.settings.keeps_kv and confirmed >= LEAST_POSITIONS else 0
