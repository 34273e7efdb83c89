"""One generation, decided without I/O: messages, losses and the clock in; messages and frames out.

It owns the journal (prompt and accepted tokens), the only thing that must survive. Whatever breaks, the pipeline is rebuilt under a
new epoch, cut back to the journal, fed what it lacks, and goes on with the same token. Sampling is a pure function of the
journal, so nothing that was delivered can change and nothing that follows can differ.
"""

import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from potluck.core.errors import ProtocolViolation
from potluck.core.exactness import Exactness, exactness_of
from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, ShardStatus, StreamFrame, TokenDelta
from potluck.orchestrator.probing import Probing, looks_alive, progress_of, stalled_hop
from potluck.orchestrator.prompt_scores import PromptScores
from potluck.orchestrator.recovery import Feed, HeadStage, plan_rebuild, spread_emptiness
from potluck.orchestrator.request import GenerationRequest, GenerationSettings, StepTiming
from potluck.orchestrator.reuse import LEAST_POSITIONS, Kept, Resumption
from potluck.planner.cover import Placed
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    MAX_STEP_TOKENS,
    Close,
    Credit,
    Fault,
    Hop,
    Message,
    Neighbour,
    Open,
    Opened,
    Probe,
    Probed,
    Refused,
    Replay,
    Result,
    Rewire,
    Rewired,
    Sampler,
    ShardLost,
    Step,
    Wiring,
)


class Phase(enum.Enum):
    """FORMING: waiting for OPENED and REWIRED of an epoch; WAITING: nobody holds some layers; RUNNING; ENDED."""

    NEW = "new"
    FORMING = "forming"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class _InFlight:
    stop: int
    sent_s: float


@dataclass
class _Outage:
    """From the first sign of trouble to the next token: what the failover frame will report."""

    began_s: float
    lost: list[str] = field(default_factory=list)
    replayed: int = 0
    method: str = "none"


_LONGEST_USUAL_STEP_S = 1.0  # whatever a shard says of itself, silence is looked into after six times this
_PATIENCE_WITHOUT_RESULT = 10  # stall timeouts, where shards say that they are being fed
_SLEPT_S = 2.0  # a timer that comes so late: this process was stopped, or starved
_LONGEST_REASON = 200  # characters, of what others are told
_NO_HOLDER = ("shard_unavailable", "no shard covers some layers")
# Codes that say that a node will not do, now or later.
_UNFIT = frozenset({"shard_corruption", "weights_mismatch"})

__all__ = ["Generation", "GenerationRequest", "GenerationSettings", "Phase", "Repick", "StepTiming"]

# Chooses a covering pipeline for the whole model, keeping the given stages where they are; None where there is none.
Repick = Callable[[Sequence[Placed | None], frozenset[bytes], bool], list[list[Placed]] | None]


def _ignore(timing: StepTiming) -> None:
    return


def _are_logprobs(message: Result, vocabulary_size: int) -> bool:
    told = [logprob for _, logprob in message.top] + ([] if message.logprob is None else [message.logprob])
    # Written so that what is not a number fails as well; a little above zero is rounding.
    return all(logprob <= 1e-3 for logprob in told) and all(token < vocabulary_size for token, _ in message.top)


class Generation:
    """The head's side of one session. `repick(kept, excluded, local_allowed)` gives replacements for each gap (None) in `kept`."""

    def __init__(
        self, request: GenerationRequest, pipeline: Sequence[Placed], repick: Repick, settings: GenerationSettings,
        new_session_id: Callable[[], bytes], head: bytes, resumption: Resumption | None = None,
    ) -> None:  # fmt: skip
        """`resumption`: of exactly these stages; what of it is left when it comes to that, the shards say."""
        self.request, self.settings = request, settings
        self.kept: Kept | None = None  # after the end: what the shards still have
        self.tokens = list(request.prompt)
        self.epoch = 0
        self.phase = Phase.NEW
        self.failovers = 0
        self.formed_s: float | None = None  # when the first pipeline stood
        self.counters: Counter[str] = Counter()
        self.on_timing: Callable[[StepTiming], None] = _ignore
        self._head = head
        self._own_from_start = {placed.stage for placed in pipeline if placed.node == head}
        self._repick = repick
        self._new_session_id = new_session_id
        self._stages = [HeadStage(placed, new_session_id()) for placed in pipeline]
        self._scores = PromptScores(request.prompt, request.prompt_logprobs, request.vocabulary_size)
        self._effects: list[SendTo] = []
        self._frames: deque[StreamFrame] = deque()
        self._awaiting: set[bytes] = set()
        self._feeds: list[Feed] = []
        self._confirmed = 0  # positions that every stage is known to have
        self._reused = 0
        self._sent = 0
        self._is_ring_running = False
        self._in_flight: deque[_InFlight] = deque()
        self._usual_step_s = min(max(0.0, sum(placed.step_us for placed in pipeline) / 1e6), _LONGEST_USUAL_STEP_S)
        self._progress_s = 0.0
        self._progress_probe_s = 0.0
        self._probing: Probing | None = None
        self._nonce = 0
        self._is_feeding = False  # since an epoch began with empty stages, until its first result
        self._furthest = 0  # the sum of all positions that shards have reported meanwhile
        self._result_s = 0.0
        self._accusers: set[bytes] = set()  # reported rubbish once, and were believed
        self._doubted: set[bytes] = set()  # said once that they had not got what another said it had sent
        self._excluded: set[bytes] = set()
        self._distrusted: set[bytes] = set()  # sent rubbish: not taken back, even where nobody else is left
        self._fruitless = 0
        self._outage: _Outage | None = None
        self._waiting_since_s: float | None = None  # for a holder, without a token since
        self._waiting_tried_s = 0.0
        self._credit_owed = 0
        self._unread = 0
        self._was_late = False
        self._last_refusal = _NO_HOLDER
        self._arithmetics: set[int] = set()  # of every shard that took part
        if resumption is not None:
            self._resume(resumption)

    def _resume(self, resumption: Resumption) -> None:
        self._confirmed = self._reused = resumption.length
        for stage, session in zip(self._stages, resumption.kept.sessions, strict=True):
            stage.resumes, stage.is_empty = session, False

    def __repr__(self) -> str:
        stages = ", ".join(stage.name for stage in self._stages)
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
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def stages(self) -> tuple[Placed, ...]:
        return tuple(stage.placed for stage in self._stages)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._stages)

    @property
    def sessions(self) -> tuple[bytes, ...]:
        return tuple(stage.session for stage in self._stages)

    @property
    def fell_back(self) -> bool:
        """Whether the head itself runs some stage now that another ran before."""
        own = {stage.placed.stage for stage in self._stages if stage.placed.node == self._head}
        return bool(own - self._own_from_start)

    @property
    def exactness(self) -> Exactness:
        return exactness_of(self._arithmetics, self.failovers)

    @property
    def is_ended(self) -> bool:
        return self.phase is Phase.ENDED

    def start(self, now_s: float) -> None:
        assert self.phase is Phase.NEW
        self._result_s = now_s
        self._progress(now_s)
        self._form(now_s)

    def consumed(self, count: int, now_s: float) -> None:
        """The reader has taken `count` tokens: so many more may be made."""
        if self._is_reader_slow():
            self._progress(now_s)  # until now there was nothing to do, and perhaps nobody looked at the clock
        self._unread -= count
        self._credit_owed += count
        if self.phase is not Phase.RUNNING:
            return
        if self._credit_owed >= max(1, self.settings.ring_credits // 2):
            self._give_credit(self._credit_owed)
            self._credit_owed = 0
        self._pump(now_s)

    def cancel(self) -> None:
        self._end(self._finished("cancelled"))

    def _finished(self, reason: Literal["stop", "length", "cancelled"]) -> Finished:
        return Finished(reason, len(self.generated), self.failovers, self.exactness, self._reused)

    def next_wake_s(self) -> float:
        """When `on_time` wants to be called, at the latest."""
        if self.phase is Phase.WAITING:
            return min(self._waiting_ends_s(), self._waiting_tried_s + self.settings.holder_retry_s)
        if self._probing is not None:
            return self._probing.started_s + self.settings.probe_patience_s
        return self._progress_probe_s + self._probe_after_s()

    def on_candidates(self, now_s: float) -> None:
        """The set of shards that can be reached has changed; somebody who was missing may be back."""
        if self.phase is Phase.WAITING:
            self._rebuild(now_s)

    def on_returned(self, node: bytes, now_s: float) -> None:
        """A node that was lost has been reached again."""
        if node not in self._distrusted:
            self._excluded.discard(node)
        self.on_candidates(now_s)

    # ------------------------------------------------------------ forming an epoch

    def _form(self, now_s: float) -> None:
        """Opens new stages and rewires those that stay; steps flow when all have answered."""
        self._rename_unanswered()
        self.counters["recomputed_stages"] += len(spread_emptiness(self._stages))
        plan = plan_rebuild(self._stages, self._confirmed)
        self._feeds = plan.feeds
        self.phase = Phase.FORMING
        self._in_flight.clear()
        self._probing = None
        self._is_ring_running = False
        self._furthest = 0
        self._awaiting = {stage.session for stage in self._stages}
        for index, stage in enumerate(self._stages):
            wiring = self._wiring(index, plan.forward_from[index])
            sampler = self._sampler() if stage.placed.stage.has_output else None
            if stage.is_new:
                self._send(stage, self._open(stage, wiring, sampler))
            else:
                length = 0 if stage.is_empty else self._confirmed
                self._send(stage, Rewire(stage.session, self.epoch, length, wiring, sampler))
        self._progress(now_s)

    def _rename_unanswered(self) -> None:
        """A stage that was asked to open in an older epoch and has not answered is asked anew, as another session."""
        for stage in self._stages:
            if stage.is_new and stage.is_asked:
                self._send(stage, Close(stage.session))
                stage.session = self._new_session_id()
            stage.is_asked = True

    def _open(self, stage: HeadStage, wiring: Wiring, sampler: Sampler | None) -> Open:
        request = self.request
        positions = len(request.prompt) + request.max_tokens
        return Open(
            stage.session, self.epoch, request.model, request.weights_sha256, self._arithmetic_of(stage), stage.placed.stage, positions,
            wiring, request.boundaries, sampler, self.settings.keeps_outbox, None if stage.is_empty else stage.resumes,
            0 if stage.is_empty else self._confirmed,
        )  # fmt: skip

    def _arithmetic_of(self, stage: HeadStage) -> int:
        return stage.placed.arithmetic or self.request.arithmetic

    def _sampler(self) -> Sampler:
        request = self.request
        limit = len(request.prompt) + request.max_tokens
        return Sampler(
            request.params, request.choice, len(request.prompt), tuple(self.tokens), request.eos, limit, request.grammar,
            request.prompt_logprobs,
        )  # fmt: skip

    def _wiring(self, index: int, forward_from: int) -> Wiring:
        count = len(self._stages)
        is_first, is_last = index == 0, index == count - 1
        uses_ring = self.settings.uses_ring
        return Wiring(
            None if is_first else self._neighbour(index - 1),
            None if is_last else self._hop(index + 1),
            self._hop(0) if is_last and uses_ring else None,
            self._neighbour(count - 1) if is_first and uses_ring else None,
            forward_from,
            count,
        )

    def _neighbour(self, index: int) -> Neighbour:
        stage = self._stages[index]
        return Neighbour(stage.placed.node, stage.session)

    def _hop(self, index: int) -> Hop:
        stage = self._stages[index]
        return Hop(stage.placed.node, stage.placed.address, stage.session)

    def _on_answer(self, stage: HeadStage, message: Opened | Rewired, now_s: float) -> None:
        if message.epoch != self.epoch or self.phase is not Phase.FORMING:
            self.counters["stale_epoch"] += 1
            return
        stage.is_new = False
        stage.has_outbox = self.settings.keeps_outbox and not stage.placed.stage.has_output
        if isinstance(message, Rewired):
            stage.has_outbox = stage.has_outbox and message.outbox_from == 0
        if message.length < (0 if stage.is_empty else self._confirmed):
            stage.is_empty = True  # it knows less than it should: everything it has is recomputed
            return self._again(now_s)
        self._progress(now_s)
        self._awaiting.discard(stage.session)
        if not self._awaiting:
            self._run(now_s)
        return None

    def _again(self, now_s: float) -> None:
        self.epoch += 1
        self._form(now_s)

    def _run(self, now_s: float) -> None:
        """Every stage is in place: feed what is empty, then go on where the journal ends."""
        for feed in self._feeds:
            if feed.source is not None and not self._stages[feed.source].has_outbox:
                # Learned only now: the stage before cannot replay. The next epoch recomputes it as well.
                return self._again(now_s)
        for feed in self._feeds:
            self._feed(feed)
        self._is_feeding = bool(self._feeds)
        if self.formed_s is None and self._is_feeding:
            self._reused = 0  # some shard had not kept its part after all
        for stage in self._stages:
            stage.is_empty = False
        self._arithmetics |= {self._arithmetic_of(stage) for stage in self._stages}
        self.phase = Phase.RUNNING
        self.formed_s = now_s if self.formed_s is None else self.formed_s
        self._sent = self._confirmed
        self._progress(now_s)
        if self.settings.uses_ring:
            self._credit_owed = 0
            self._give_credit(max(1, self.settings.ring_credits - self._unread))
        return self._pump(now_s)

    def _feed(self, feed: Feed) -> None:
        resume = self._confirmed
        if self._outage is not None:
            self._outage.replayed = max(self._outage.replayed, resume)
            self._outage.method = "re-prefill" if feed.source is None and feed.first == 0 and resume else "replay"
        if feed.source is not None:
            source = self._stages[feed.source]
            self._send(source, Replay(source.session, self.epoch, 0, resume))
            return
        chunk = min(max(self.settings.prefill_chunk, -(-resume // 32)), MAX_STEP_TOKENS)
        for start in range(0, resume, chunk):
            self._send_tokens(start, min(start + chunk, resume), chooses=False)

    def _give_credit(self, tokens: int) -> None:
        if self.settings.uses_ring and tokens > 0:
            last = self._stages[-1]
            self._send(last, Credit(last.session, self.epoch, tokens))

    # ------------------------------------------------------------ running

    def _pump(self, now_s: float) -> None:
        """Sends what the journal has and the pipeline has not, a few chunks ahead; the ring takes over after the prompt."""
        settings = self.settings
        while (
            self._sent < len(self.tokens)
            and len(self._in_flight) < settings.prefill_window
            and not self._is_ring_running
            and (settings.uses_ring or self._unread < settings.ring_credits)
        ):
            chunk = min(settings.prefill_chunk, self._scores.most_positions or MAX_STEP_TOKENS)
            stop = min(self._sent + chunk, len(self.tokens))
            chooses = stop == len(self.tokens) and self.request.max_tokens > 0
            self._send_tokens(self._sent, stop, chooses=chooses)
            self._in_flight.append(_InFlight(stop, now_s))
            self._sent = stop
            self._is_ring_running = chooses and settings.uses_ring

    def _send_tokens(self, start: int, stop: int, *, chooses: bool) -> None:
        stage = self._stages[0]
        body = b"".join(token.to_bytes(4, "little") for token in self.tokens[start:stop])
        self._send(stage, Step(stage.session, self.epoch, start, stop - start, 0, None, chooses), body)

    def on_message(self, node: bytes, message: Message, now_s: float, body: bytes = b"") -> None:
        """From an authenticated node. What does not come from the stage whose session it names is counted and dropped."""
        if self.is_ended:
            return None
        stage = self._stage_of(node, getattr(message, "session", b""))
        if stage is None:
            self.counters["unknown_session"] += 1
            return None
        if isinstance(message, Result):
            return self._on_result(stage, message, body, now_s)
        if isinstance(message, Opened | Rewired):
            return self._on_answer(stage, message, now_s)
        if isinstance(message, Refused):
            return self._on_refused(stage, message, now_s)
        if isinstance(message, Fault):
            return self._on_fault(stage, message, now_s)
        if isinstance(message, Probed):
            return self._on_probed(stage, message, now_s)
        self.counters["unexpected_message"] += 1
        return None

    def _stage_of(self, node: bytes, session: bytes) -> HeadStage | None:
        return next((s for s in self._stages if s.session == session and s.placed.node == node), None)

    def _on_result(self, stage: HeadStage, message: Result, body: bytes, now_s: float) -> None:
        if message.epoch != self.epoch or stage is not self._stages[-1] or self.phase is not Phase.RUNNING:
            self.counters["stale_epoch"] += 1
            return
        if not self._is_next(message):
            self.counters["unexpected_position"] += 1
            return
        problem = self._take_result(message, body)
        if problem is not None:
            self.counters["shard_corruption"] += 1
            self._distrusted.add(stage.placed.node)
            return self._fail([stage], problem, now_s, "shard_corruption")
        self._confirmed = message.position
        self._result_s, self._is_feeding = now_s, False
        while self._in_flight and self._in_flight[0].stop <= message.position:
            self._in_flight.popleft()
        self._tell_scores(now_s)
        if message.token is not None:
            spent = tuple((each.compute_us / 1e6, each.queue_us / 1e6) for each in message.spent)
            self._note_step(StepTiming(now_s - self._progress_s, spent))
            self._accept(message, now_s)
        self._progress(now_s)
        if not self.is_ended:
            self._pump(now_s)

    def _take_result(self, message: Result, body: bytes) -> str | None:
        """What is wrong with a result, if anything; the scores that come with it are kept."""
        if message.token is not None and message.token >= self.request.vocabulary_size:
            return f"chose token {message.token}, which the model does not have"
        if not _are_logprobs(message, self.request.vocabulary_size):
            return "told log probabilities that are none"
        try:
            self._scores.take(message.position, body)
        except ProtocolViolation as error:
            return str(error)
        return None

    def _tell_scores(self, now_s: float) -> None:
        """The prompt is through: tells its scores, and ends where nothing else was asked for."""
        frame = self._scores.frame()
        if frame is not None:
            self._frames.append(frame)
        if self.request.max_tokens == 0 and self._confirmed == len(self.tokens):
            self._recovered(now_s)
            self._end(Finished("length", 0, self.failovers))

    def _is_next(self, message: Result) -> bool:
        """A token belongs right after the journal; a chunk without one lies within what was sent, before the journal's end."""
        if message.token is not None:
            return message.position == len(self.tokens) > self._confirmed
        last = len(self.tokens) - (
            1 if self.request.max_tokens else 0
        )  # the journal's end comes with a token, if any is wanted
        return self._confirmed < message.position <= min(self._sent, last)

    def _note_step(self, timing: "StepTiming") -> None:
        self.on_timing(timing)
        usual, last_s = self._usual_step_s, min(timing.total_s, _LONGEST_USUAL_STEP_S)
        self._usual_step_s = last_s if usual == 0 else 0.8 * usual + 0.2 * last_s

    def _accept(self, message: Result, now_s: float) -> None:
        assert message.token is not None
        self._recovered(now_s)
        self.tokens.append(message.token)
        self._unread += 1
        is_end = message.token in self.request.eos
        if not is_end:
            self._frames.append(TokenDelta(message.token, message.position, message.logprob, message.top))
        if is_end or len(self.generated) >= self.request.max_tokens:
            self._end(self._finished("stop" if is_end else "length"))

    def _recovered(self, now_s: float) -> None:
        self._fruitless = 0
        self._waiting_since_s = None
        self._last_refusal = _NO_HOLDER
        outage, self._outage = self._outage, None
        if outage is None:
            return
        self.failovers += 1
        names = tuple(stage.name for stage in self._stages)
        self._frames.append(
            ShardFailover(
                tuple(outage.lost), names, self.epoch, (now_s - outage.began_s) * 1000, outage.replayed,
                outage.method,  # type: ignore[arg-type]
                self.exactness,
            )
        )  # fmt: skip

    # ------------------------------------------------------------ trouble

    def on_lost(self, node: bytes, reason: str, now_s: float) -> None:
        """The link to a node broke."""
        if self.phase not in (Phase.NEW, Phase.ENDED):  # who is lost before the start is found lost when asked to open
            self._fail([s for s in self._stages if s.placed.node == node], f"connection lost: {reason}", now_s)

    def _on_fault(self, stage: HeadStage, message: Fault, now_s: float) -> None:
        if message.epoch != self.epoch and message.culprit != stage.placed.node:
            self.counters["stale_epoch"] += 1
            return None
        self.counters[message.code] += 1
        if self._is_hopeless(stage, message.code):
            return self._abort(message.code, message.message)
        if message.code == "outbox_dropped":
            stage.has_outbox = False
            if message.epoch == self.epoch and self.phase is Phase.RUNNING:
                self._restart_after(stage, now_s)
            return None
        culprits = [s for s in self._stages if s.placed.node == message.culprit]
        if not culprits:
            # It blames the head, or somebody who is not part of this: whoever is right, the two cannot go on together.
            self._last_refusal = (message.code, message.message)
            culprits = [stage]
        elif message.code in _UNFIT:
            culprits = self._accused(stage, culprits)
        return self._fail(culprits, message.message, now_s, message.code)

    def _accused(self, accuser: HeadStage, culprits: list[HeadStage]) -> list[HeadStage]:
        """Who goes after rubbish is reported. Only what the stage before sends can be judged, and nobody is right time after time."""
        node = accuser.placed.node
        before = self._stages[max(0, self._stages.index(accuser) - 1)]
        if before not in culprits:
            return [accuser]
        self._distrusted.add(before.placed.node)
        if node in self._accusers:
            return [*culprits, accuser]
        self._accusers.add(node)
        return culprits

    def _is_hopeless(self, stage: HeadStage, code: str) -> bool:
        """Whether the request is at fault, as the shard that chooses tokens says: another would say the same."""
        return code == "bad_grammar" and self.request.grammar is not None and stage is self._stages[-1]

    def _restart_after(self, stage: HeadStage, now_s: float) -> None:
        """A replay was not possible after all: what follows `stage` starts empty, and `spread_emptiness` does the rest."""
        following = self._stages.index(stage) + 1
        if following < len(self._stages):
            self._stages[following].is_empty = True
        self._again(now_s)

    def _on_refused(self, stage: HeadStage, message: Refused, now_s: float) -> None:
        if message.epoch != self.epoch:
            return None
        if self._is_hopeless(stage, message.code):
            return self._abort(message.code, message.message)
        self._last_refusal = (message.code, message.message)
        if message.code in _UNFIT:
            self._distrusted.add(stage.placed.node)
        return self._fail([stage], f"refused: {message.message}", now_s, message.code, is_gone=False)

    def _fail(
        self,
        stages: Sequence[HeadStage],
        reason: str,
        now_s: float,
        code: str = "shard_unavailable",
        *,
        is_gone: bool = True,
    ) -> None:
        """The nodes of these stages are lost: say so, and rebuild without them. What is lost already is no news."""
        nodes = {stage.placed.node for stage in stages if not stage.is_lost}
        lost = [stage for stage in self._stages if stage.placed.node in nodes and not stage.is_lost]
        if not lost:
            return
        if self._outage is None:
            self._outage = _Outage(self._progress_s)
        for stage in lost:
            stage.is_lost = True
            self._outage.lost.append(stage.name)
            self._frames.append(ShardStatus(stage.name, stage.placed.node.hex(), "degraded", reason, code))
            # Where it still lives it must not keep KV for a session that has moved on; where not, it is not dialled for that.
            self._effects.append(SendTo(stage.placed.node, None, Close(stage.session)))
        if is_gone:
            self._broadcast(lost, reason)
        self._excluded |= nodes
        self._fruitless += 1
        self._rebuild(now_s)

    def _broadcast(self, lost: Sequence[HeadStage], reason: str) -> None:
        """Those who stay learn of it, each once; they may head generations of their own."""
        survivors = {stage.placed.node: stage for stage in self._stages if not stage.is_lost}
        for stage in survivors.values():
            for gone in lost:
                placed = gone.placed
                news = ShardLost(stage.session, placed.node, self.request.model, placed.stage, reason[:_LONGEST_REASON])
                self._effects.append(SendTo(stage.placed.node, None, news))

    def _rebuild(self, now_s: float) -> None:
        kept = [None if stage.is_lost else stage.placed for stage in self._stages]
        allows_local = self._fruitless > self.settings.fallback_after
        groups = self._repick(kept, frozenset(self._excluded), allows_local)
        if groups is None and not allows_local:
            groups = self._repick(kept, frozenset(self._excluded), True)
        if groups is None:
            return self._wait(now_s)
        self._stages = self._merged(groups)
        self.epoch += 1
        return self._form(now_s)

    def _merged(self, groups: list[list[Placed]]) -> list[HeadStage]:
        """One group per old stage: itself where it stays, its replacements where it is lost (perhaps at the same place)."""
        stages: list[HeadStage] = []
        for old, group in zip(self._stages, groups, strict=True):
            if old.is_lost:
                stages += [HeadStage(placed, self._new_session_id()) for placed in group]
            else:
                stages.append(old)
        return stages

    def _wait(self, now_s: float) -> None:
        """Nobody holds some layers. Survivors keep their KV; the stream stays open for a while."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        self._waiting_tried_s = now_s
        self.phase = Phase.WAITING
        self._probing = None
        if now_s >= self._waiting_ends_s():
            self._abort(*self._last_refusal)

    def _waiting_ends_s(self) -> float:
        assert self._waiting_since_s is not None
        return self._waiting_since_s + self.settings.holder_wait_s

    def _keep_waiting(self, now_s: float) -> None:
        """Whoever failed before may be well again (a worker is restarted in its place), and there is nobody else."""
        if now_s >= self._waiting_ends_s():
            self._abort(*self._last_refusal)
        elif now_s >= self._waiting_tried_s + self.settings.holder_retry_s:
            self._excluded = set(self._distrusted)
            self._rebuild(now_s)

    def on_time(self, now_s: float) -> None:
        """Called at or after `next_wake_s`, and harmless at any other time."""
        if self.is_ended:
            return
        late_s, was_late = now_s - self.next_wake_s(), self._was_late
        self._was_late = late_s > _SLEPT_S
        if self._was_late and not was_late:
            self._woke(late_s, now_s)
        elif self.phase is Phase.WAITING:
            self._keep_waiting(now_s)
        elif self._probing is not None:
            if now_s - self._probing.started_s >= self.settings.probe_patience_s:
                self._judge(now_s)
        elif self._is_reader_slow():
            self._progress(now_s)
        elif now_s - self._progress_probe_s >= self._probe_after_s():
            self._probe(now_s)

    def _woke(self, late_s: float, now_s: float) -> None:
        """This process did not run: that nobody was heard meanwhile says nothing about them. Only believed once in a row."""
        if self._waiting_since_s is not None:
            self._waiting_since_s += late_s
        self._result_s += late_s
        self._progress(now_s)
        if self._probing is not None:
            self._probe(now_s)

    def _is_reader_slow(self) -> bool:
        """No progress because the reader does not read: nobody's fault."""
        owed = self._credit_owed if self.settings.uses_ring else 0  # read, and not yet told to the ring
        return self.phase is Phase.RUNNING and self._unread + owed >= self.settings.ring_credits

    def _probe_after_s(self) -> float:
        return max(self.settings.probe_after_s, 6.0 * self._usual_step_s)

    def _probe(self, now_s: float) -> None:
        self._nonce += 1
        self._probing = Probing(now_s, self._nonce)
        for stage in self._stages:
            self._send(stage, Probe(stage.session, self._nonce))

    def _on_probed(self, stage: HeadStage, message: Probed, now_s: float) -> None:
        probing = self._probing
        if probing is None or message.nonce != probing.nonce:
            return
        probing.answers[stage.session] = message
        if len(probing.answers) == len(self._stages):
            self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        """Who does not answer is gone; whose worker is silent at work is frozen; nobody moving for very long is a stall."""
        assert self._probing is not None
        answers, self._probing = self._probing.answers, None
        self._progress_probe_s = now_s
        dead = [stage for stage in self._stages if not self._looks_alive(stage, answers.get(stage.session))]
        if dead:
            return self._fail(dead, "does not answer", now_s)
        if self._is_feeding and self._has_moved(answers, now_s):
            self._progress_s = now_s
        elif now_s - self._progress_s >= self.settings.stall_timeout_s:
            stalled = self._located(answers)
            self._last_refusal = ("pipeline_stalled", "no progress within the time allowed")
            return self._fail([stalled], "made no progress", now_s, "pipeline_stalled")
        return None

    def _has_moved(self, answers: dict[bytes, Probed], now_s: float) -> bool:
        """Whether shards work through what a new one is fed, of which no result comes. Not believed for ever."""
        total = progress_of(answers, len(self.tokens))
        has_moved = total > self._furthest
        self._furthest = max(self._furthest, total)
        return has_moved and now_s - self._result_s < _PATIENCE_WITHOUT_RESULT * self.settings.stall_timeout_s

    def _looks_alive(self, stage: HeadStage, answer: Probed | None) -> bool:
        # Perhaps loading: it knows nothing yet, and may be slow.
        is_opening = stage.session in self._awaiting and stage.is_new
        return looks_alive(answer, self.settings.worker_patience_s, is_opening=is_opening)

    def _located(self, answers: dict[bytes, Probed]) -> HeadStage:
        """Where nothing moves any more. While an epoch is being formed: the first that has not answered."""
        if self.phase is Phase.FORMING:
            return next(stage for stage in self._stages if stage.session in self._awaiting)
        giver, taker = stalled_hop(self._stages, answers, self._sent)
        return taker if giver is None else self._of_two(giver, taker)

    def _of_two(self, giver: HeadStage, taker: HeadStage) -> HeadStage:
        """One says that it has given, the other that it has got nothing: the giver first; where that did not help, the taker."""
        if taker.placed.node in self._doubted:
            return taker
        self._doubted.add(taker.placed.node)
        return giver

    # ------------------------------------------------------------ the end

    def _abort(self, code: str, message: str) -> None:
        self._end(PipelineAborted(code, message, len(self.generated)))

    def _end(self, frame: StreamFrame) -> None:
        if self.is_ended:
            return
        keeps = self._kept_positions(frame)
        self.phase = Phase.ENDED
        for stage in self._stages:
            self._send(stage, Close(stage.session, keeps))
        if keeps:
            self.kept = Kept(tuple(self.tokens[:keeps]), self.stages, self.sessions, self.request.boundaries)
        self._frames.append(frame)

    def _kept_positions(self, frame: StreamFrame) -> int:
        """How much may stay with the shards. Nothing of an answer that its reader has left: that frees everything."""
        is_whole = isinstance(frame, Finished) and frame.reason != "cancelled" and self.phase is Phase.RUNNING
        is_worth_it = self.settings.keeps_kv and self._confirmed >= LEAST_POSITIONS
        return self._confirmed if is_whole and is_worth_it else 0

    def _progress(self, now_s: float) -> None:
        self._progress_s = self._progress_probe_s = now_s

    def _send(self, stage: HeadStage, message: Message, body: bytes = b"") -> None:
        self._effects.append(SendTo(stage.placed.node, stage.placed.address, message, body))
