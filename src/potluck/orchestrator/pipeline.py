"""The stages of one generation and the epoch they are in: who is asked to open or to rewire, who has answered, who is lost. Pure.

Makes the messages that put a pipeline together; does not know why it broke, whom to take instead, or what tokens are.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from potluck.orchestrator.recovery import Feed, HeadStage, plan_rebuild, spread_emptiness
from potluck.orchestrator.request import GenerationRequest, GenerationSettings
from potluck.planner.cover import Placed
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Close,
    Hop,
    Message,
    Neighbour,
    Open,
    Opened,
    Rewire,
    Rewired,
    Sampler,
    ShardLost,
    Wiring,
)

_LONGEST_REASON = 200  # characters, of what others are told


def send_to(stage: HeadStage, message: Message, body: bytes = b"") -> SendTo:
    return SendTo(stage.placed.node, stage.placed.address, message, body)


class Pipeline:
    """`awaited`: sessions that have not answered in this epoch; steps flow when there are none."""

    def __init__(
        self, request: GenerationRequest, settings: GenerationSettings, placed: Sequence[Placed],
        new_session_id: Callable[[], bytes], counters: Counter[str],
    ) -> None:  # fmt: skip
        self._request, self._settings = request, settings
        self._new_session_id, self._counters = new_session_id, counters
        self._initial = frozenset((each.node, each.stage) for each in placed)
        self.stages = [HeadStage(each, new_session_id()) for each in placed]
        self.epoch = 0
        self.awaited: set[bytes] = set()
        self.arithmetics: set[int] = set()  # of every shard that took part
        self._feeds: list[Feed] = []

    def __repr__(self) -> str:
        return f"<Pipeline epoch {self.epoch} over {', '.join(stage.name for stage in self.stages)}>"

    def resume(self, sessions: Sequence[bytes]) -> None:
        """Each stage begins with what that session of an earlier request has left there."""
        for stage, session in zip(self.stages, sessions, strict=True):
            stage.resumes, stage.is_empty = session, False

    @property
    def placed(self) -> tuple[Placed, ...]:
        return tuple(stage.placed for stage in self.stages)

    def stage_of(self, node: bytes, session: bytes) -> HeadStage | None:
        for stage in self.stages:  # plainly, because every token comes this way
            if stage.session == session and stage.placed.node == node:
                return stage
        return None

    def on(self, node: bytes | None) -> list[HeadStage]:
        return [stage for stage in self.stages if stage.placed.node == node]

    def neighbours_of(self, stage: HeadStage) -> list[HeadStage]:
        """With whom it exchanges steps: the stages before and after it and, at the ends of a ring, the other end."""
        index, count = self.stages.index(stage), len(self.stages)
        if self._settings.uses_ring:
            return [self.stages[index - 1], self.stages[(index + 1) % count]]
        return [self.stages[each] for each in (index - 1, index + 1) if 0 <= each < count]

    def has_fallen_back_to(self, node: bytes) -> bool:
        """Whether `node` runs some stage now that another ran at first."""
        return any((node, stage.placed.stage) not in self._initial for stage in self.on(node))

    # ------------------------------------------------------------ forming an epoch

    def form(self, resume: int, sampler: Sampler) -> list[SendTo]:
        """Opens new stages and rewires those that stay, cut back to `resume` positions."""
        sent = self._rename_unanswered()
        self._counters["recomputed_stages"] += len(spread_emptiness(self.stages))
        plan = plan_rebuild(self.stages, resume)
        self._feeds = plan.feeds
        self.awaited = {stage.session for stage in self.stages}
        for index, stage in enumerate(self.stages):
            wiring = self._wiring(index, plan.forward_from[index])
            chooser = sampler if stage.placed.stage.has_output else None
            if stage.is_new:
                sent.append(send_to(stage, self._open(stage, wiring, chooser, resume)))
            else:
                length = 0 if stage.is_empty else resume
                sent.append(send_to(stage, Rewire(stage.session, self.epoch, length, wiring, chooser)))
        return sent

    def _rename_unanswered(self) -> list[SendTo]:
        """A stage that was asked to open in an older epoch and has not answered is asked anew, as another session."""
        closes = []
        for stage in self.stages:
            if stage.is_new and stage.is_asked:
                closes.append(send_to(stage, Close(stage.session)))
                stage.session = self._new_session_id()
            stage.is_asked = True
        return closes

    def _open(self, stage: HeadStage, wiring: Wiring, sampler: Sampler | None, resume: int) -> Open:
        request = self._request
        positions = len(request.prompt) + request.max_tokens
        return Open(
            stage.session, self.epoch, request.model, request.weights_sha256, self._arithmetic_of(stage), stage.placed.stage, positions,
            wiring, request.boundaries, sampler, self._settings.keeps_outbox, None if stage.is_empty else stage.resumes,
            0 if stage.is_empty else resume, request.resume_key if sampler is not None else b"",
        )  # fmt: skip

    def _arithmetic_of(self, stage: HeadStage) -> int:
        return stage.placed.arithmetic or self._request.arithmetic

    def _wiring(self, index: int, forward_from: int) -> Wiring:
        count = len(self.stages)
        is_first, is_last = index == 0, index == count - 1
        uses_ring = self._settings.uses_ring
        return Wiring(
            None if is_first else self._neighbour(index - 1),
            None if is_last else self._hop(index + 1),
            self._hop(0) if is_last and uses_ring else None,
            self._neighbour(count - 1) if is_first and uses_ring else None,
            forward_from,
            count,
        )

    def _neighbour(self, index: int) -> Neighbour:
        stage = self.stages[index]
        return Neighbour(stage.placed.node, stage.session)

    def _hop(self, index: int) -> Hop:
        stage = self.stages[index]
        return Hop(stage.placed.node, stage.placed.address, stage.session)

    def take_answer(self, stage: HeadStage, message: Opened | Rewired, resume: int) -> bool:
        """Whether the epoch can go on; not where the stage knows less than it should: everything it has is recomputed then."""
        stage.is_new = False
        stage.has_outbox = self._settings.keeps_outbox and not stage.placed.stage.has_output
        if isinstance(message, Rewired):
            stage.has_outbox = stage.has_outbox and message.outbox_from == 0
        if message.length < (0 if stage.is_empty else resume):
            stage.is_empty = True
            return False
        self.awaited.discard(stage.session)
        return True

    def settle(self) -> list[Feed] | None:
        """Every stage is in place: what is to be fed; None where that needs another epoch, which recomputes more."""
        if any(feed.source is not None and not self.stages[feed.source].has_outbox for feed in self._feeds):
            return None  # learned only now: the stage before cannot replay
        for stage in self.stages:
            stage.is_empty = False
        self.arithmetics |= {self._arithmetic_of(stage) for stage in self.stages}
        return self._feeds

    # ------------------------------------------------------------ losing stages

    def lose(self, stages: Sequence[HeadStage]) -> list[HeadStage]:
        """The nodes of these stages are lost, with all that they run. Gives the stages that were not lost before."""
        nodes = {stage.placed.node for stage in stages if not stage.is_lost}
        lost = [stage for stage in self.stages if stage.placed.node in nodes and not stage.is_lost]
        for stage in lost:
            stage.is_lost = True
        return lost

    def news_of(self, lost: Sequence[HeadStage], reason: str) -> list[SendTo]:
        """Those who stay learn of it, each once; they may head generations of their own."""
        survivors = {stage.placed.node: stage for stage in self.stages if not stage.is_lost}
        return [
            SendTo(node, None, _news(stage.session, gone.placed, self._request.model, reason))
            for node, stage in survivors.items()
            for gone in lost
        ]

    @property
    def kept(self) -> list[Placed | None]:
        """None for each stage that is lost."""
        return [None if stage.is_lost else stage.placed for stage in self.stages]

    def replace(self, groups: Sequence[Sequence[Placed]]) -> None:
        """One group per old stage: itself where it stays, its replacements where it is lost (perhaps at the same place)."""
        stages: list[HeadStage] = []
        for old, group in zip(self.stages, groups, strict=True):
            if old.is_lost:
                stages += [HeadStage(placed, self._new_session_id()) for placed in group]
            else:
                stages.append(old)
        self.stages = stages

    def has_to_replay(self, stage: HeadStage) -> bool:
        """Whether this epoch, once it is settled, feeds others from what `stage` has kept."""
        return any(feed.source is not None and self.stages[feed.source] is stage for feed in self._feeds)

    def empty_after(self, stage: HeadStage) -> None:
        """A replay was not possible after all: what follows `stage` starts empty, and `spread_emptiness` does the rest."""
        following = self.stages.index(stage) + 1
        if following < len(self.stages):
            self.stages[following].is_empty = True


def _news(session: bytes, gone: Placed, model: str, reason: str) -> ShardLost:
    return ShardLost(session, gone.node, model, gone.stage, reason[:_LONGEST_REASON])
