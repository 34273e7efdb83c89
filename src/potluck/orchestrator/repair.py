"""What is done about a stage that fails, refuses, lies or stalls: who goes, who comes instead, or how long one waits. Pure.

Knows the stages, whom to believe and how to find others; not what is generated. What it decides the generation carries out.
"""

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from potluck.orchestrator.blame import UNFIT, Blame
from potluck.orchestrator.frames import ShardStatus
from potluck.orchestrator.outage import Troubles
from potluck.orchestrator.pipeline import Pipeline
from potluck.orchestrator.recovery import HeadStage
from potluck.orchestrator.request import GenerationRequest, GenerationSettings
from potluck.planner.cover import Placed
from potluck.wire.effects import SendTo
from potluck.wire.messages import Close, Fault, Refused

# Chooses a covering pipeline for the whole model, keeping the given stages where they are; None where there is none.
Repick = Callable[[Sequence[Placed | None], frozenset[bytes], bool], list[list[Placed]] | None]
_LONGEST_LOAD = 10  # stall timeouts: gigabytes from an old disk take minutes


class Deed(enum.Enum):
    """FORM: a new epoch of the stages as they are now. WAIT: nobody holds some layers. ABORT: nothing helps."""

    NOTHING = "nothing"
    FORM = "form"
    WAIT = "wait"
    ABORT = "abort"


class Decision(NamedTuple):
    """A deed, after the reader was told `frames` and the shards `effects`; `reason`: of an ABORT, code and words."""

    deed: Deed
    effects: Sequence[SendTo] = ()
    frames: Sequence[ShardStatus] = ()
    reason: tuple[str, str] = ("", "")


NOTHING = Decision(Deed.NOTHING)


class Repair:
    """`troubles` lasts from the first sign to the next token; whom one believes, to the end of the answer."""

    def __init__(
        self, request: GenerationRequest, settings: GenerationSettings, pipeline: Pipeline, repick: Repick,
        counters: Counter[str],
    ) -> None:  # fmt: skip
        self._request, self._pipeline, self._repick, self._counters = request, pipeline, repick, counters
        self._load_patience_s = _LONGEST_LOAD * settings.stall_timeout_s
        self.blame = Blame()
        self.troubles = Troubles(settings)

    def __repr__(self) -> str:
        return f"<Repair of {self._pipeline!r}: {self.blame!r}, {self.troubles!r}>"

    # ------------------------------------------------------------ what shards say

    def on_fault(self, stage: HeadStage, message: Fault, moved_s: float, now_s: float, *, is_running: bool) -> Decision:
        """`moved_s`: when something last went on."""
        pipeline = self._pipeline
        if message.epoch != pipeline.epoch and message.culprit != stage.placed.node:
            self._counters["stale_epoch"] += 1
            return NOTHING
        self._counters[message.code] += 1
        if self._is_hopeless(stage, message.code):
            return Decision(Deed.ABORT, reason=(message.code, message.message))
        if message.code == "outbox_dropped":
            return self._on_outbox_dropped(stage, message, moved_s, now_s, is_running=is_running)
        self._note_reason(message.code, message.message)
        culprits = pipeline.on(message.culprit)
        if not culprits:
            # It blames the head, or somebody who is not part of this: whoever is right, the two cannot go on together.
            culprits = [stage]
        elif all(culprit.is_lost for culprit in culprits):
            return NOTHING  # no news, such as the second chunk of the same rubbish, and nothing to hold against whoever brings it
        elif message.code in UNFIT:
            culprits = self.blame.of_rubbish(stage, culprits, pipeline.stages)
        elif stage not in culprits:
            culprits = self._after_report(stage, culprits)
        return self.lose(culprits, message.message, moved_s, now_s, message.code)

    def _note_reason(self, code: str, words: str) -> None:
        """How the answer ends where nobody takes over. HearthNet §6 has no code for rubbish: whoever sent it counts as gone."""
        is_rubbish = code == "shard_corruption"
        self.troubles.last_refusal = (
            ("shard_unavailable", f"nobody else holds some layers: {words}"[:1024]) if is_rubbish else (code, words)
        )

    def _after_report(self, accuser: HeadStage, accused: list[HeadStage]) -> list[HeadStage]:
        """Who goes where one stage says of another that it is gone, or sends what does not fit."""
        if not any(stage in accused for stage in self._pipeline.neighbours_of(accuser)):
            return [accuser]
        is_doubtful = self.blame.is_doubtful(accuser, accused)
        both = [*accused, accuser]
        # It may be honest and unlucky: where it is needed, it stays.
        return both if is_doubtful and self._found(both) is not None else accused

    def _on_outbox_dropped(
        self, stage: HeadStage, message: Fault, moved_s: float, now_s: float, *, is_running: bool
    ) -> Decision:
        """Only whoever was asked for its outbox can have found it gone; and what follows it is computed anew once, not for ever."""
        if message.epoch != self._pipeline.epoch or not is_running:
            stage.has_outbox = False
            return NOTHING
        if not self._pipeline.has_to_replay(stage):
            self._counters["unexpected_message"] += 1
            return NOTHING
        if stage.session in self.troubles.without_outbox:
            return self.lose([stage], message.message, moved_s, now_s, message.code)
        self.troubles.without_outbox.add(stage.session)
        stage.has_outbox = False
        self._pipeline.empty_after(stage)
        return Decision(Deed.FORM)

    def on_refused(self, stage: HeadStage, message: Refused, moved_s: float, now_s: float) -> Decision:
        if message.epoch != self._pipeline.epoch:
            return NOTHING
        if self._is_hopeless(stage, message.code):
            return Decision(Deed.ABORT, reason=(message.code, message.message))
        self.troubles.last_refusal = (message.code, message.message)
        if message.code in UNFIT:
            self.blame.distrust(stage.placed.node)
        return self.lose([stage], f"refused: {message.message}", moved_s, now_s, message.code, is_gone=False)

    def _is_hopeless(self, stage: HeadStage, code: str) -> bool:
        """Whether the request is at fault, as the shard that chooses tokens says: another would say the same."""
        return code == "bad_grammar" and self._request.grammar is not None and stage is self._pipeline.stages[-1]

    def on_rubbish(self, stage: HeadStage, problem: str, moved_s: float, now_s: float) -> Decision:
        """What cannot be a result has come from the last stage, to the head itself."""
        self._counters["shard_corruption"] += 1
        self._note_reason("shard_corruption", problem)
        self.blame.distrust(stage.placed.node)
        return self.lose([stage], problem, moved_s, now_s, "shard_corruption")

    def on_stall(self, giver: HeadStage | None, taker: HeadStage, moved_s: float, now_s: float) -> Decision:
        """Nothing moves at `taker`, or between the two."""
        is_opening = giver is None and taker.is_new
        if is_opening and now_s - moved_s < self._load_patience_s and not self._has_others(taker):
            return NOTHING  # it lives, and is perhaps still loading; without it there would be no answer either
        stalled = taker if giver is None else self.blame.of_two(giver, taker)
        self.troubles.last_refusal = ("pipeline_stalled", "no progress within the time allowed")
        return self.lose([stalled], "made no progress", moved_s, now_s, "pipeline_stalled")

    # ------------------------------------------------------------ losing and replacing

    def lose(
        self, stages: Sequence[HeadStage], reason: str, moved_s: float, now_s: float, code: str = "shard_unavailable", *,
        is_gone: bool = True,
    ) -> Decision:  # fmt: skip
        """The nodes of these stages are lost: say so, and rebuild without them. What is lost already is no news."""
        lost = self._pipeline.lose(stages)
        if not lost:
            return NOTHING
        self.troubles.lost([stage.name for stage in lost], moved_s)
        self.blame.exclude(stage.placed.node for stage in lost)
        told = [ShardStatus(stage.name, stage.placed.node.hex(), "degraded", reason, code) for stage in lost]
        # Where it still lives it must not keep KV for a session that has moved on; where not, it is not dialled for that.
        sent = [SendTo(stage.placed.node, None, Close(stage.session)) for stage in lost]
        if is_gone:
            sent += self._pipeline.news_of(lost, reason)
        return self.rebuild(now_s)._replace(effects=sent, frames=told)

    def rebuild(self, now_s: float) -> Decision:
        """Somebody else for every stage that is lost, or patience. Survivors keep their KV; the stream stays open for a while."""
        groups = self._found()
        if groups is not None:
            self._pipeline.replace(groups)
            return Decision(Deed.FORM)
        self.troubles.wait(now_s)
        return self._given_up() if self.troubles.is_hopeless(now_s) else Decision(Deed.WAIT)

    def _has_others(self, stage: HeadStage) -> bool:
        """Whether somebody could do without it, be it one who failed before: that may be well again by now."""
        return self._found([stage], self.blame.distrusted) is not None

    def _found(
        self, lost: Sequence[HeadStage] = (), excluded: frozenset[bytes] | None = None
    ) -> list[list[Placed]] | None:
        """Others for what is lost, and for `lost`; the head's own layers where nobody else has them."""
        nodes = {stage.placed.node for stage in lost}
        kept = [None if each is None or each.node in nodes else each for each in self._pipeline.kept]
        excluded = (self.blame.excluded if excluded is None else excluded) | nodes
        groups = self._repick(kept, excluded, self.troubles.prefers_local)
        if groups is None and not self.troubles.prefers_local:
            groups = self._repick(kept, excluded, True)
        return groups

    def keep_waiting(self, now_s: float) -> Decision:
        if self.troubles.is_hopeless(now_s):
            return self._given_up()
        if not self.troubles.is_retry_due(now_s):
            return NOTHING
        self.blame.forgive()
        return self.rebuild(now_s)

    def _given_up(self) -> Decision:
        return Decision(Deed.ABORT, reason=self.troubles.last_refusal)
