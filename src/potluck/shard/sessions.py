"""One session on one shard: its phase, its place in the pipeline, what waits to be computed and which step fits. Pure state.

And which sessions have ended lately. Knows nothing of the others, of batches or of the worker.
"""

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from potluck.core.remembered import AnswerSoFar
from potluck.wire.messages import Boundary, Codec, Hop, Neighbour, Open, Rewire, Sampler, Stage, Step, Wiring
from potluck.wire.spent import stages_in


class Phase(enum.Enum):
    """OPENING until the worker has reserved KV; ACTIVE until CLOSE, a lost head or a lost worker, after which it is gone."""

    OPENING = "opening"
    ACTIVE = "active"


class Waiting(msgspec.Struct, frozen=True):
    """A step that has been accepted and not yet computed."""

    step: Step
    body: bytes
    arrived_s: float


@dataclass
class ShardSession:
    """`length_in` positions were accepted in this epoch, `length_out` of them computed; both fall back at a rewire."""

    id: bytes
    head: bytes
    epoch: int
    stage: Stage
    wiring: Wiring
    positions: int
    boundaries: tuple[Boundary, ...]
    sampler: Sampler | None
    keeps_outbox: bool
    phase: Phase = Phase.OPENING
    length_in: int = 0
    length_out: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)
    batches_running: int = 0  # of the worker's, that hold steps of this session
    is_faulty: bool = False  # a step could not be computed, so none after it can, until it is cut back
    cuts: int = 0  # how often it was cut back; what was computed before the last time is void
    credits: int = 0
    held_token: Waiting | None = None  # chosen, and waiting for the ring's credit
    has_replayed: bool = False  # in this epoch, told to or not
    untold_sampler: Sampler | None = None  # of the last rewire; the worker learns it with the next step
    resumes: bytes | None = None  # a parked session that it begins with …
    resumed: int = 0  # … and how much of it
    input_row_bytes: int = 4  # of one position, as it enters
    resume_key: bytes = b""  # by which its tokens are remembered where the head is lost; empty: they are not
    stages_before: int = 0  # that its last step had been through in its round
    used_s: float = 0.0  # when something was last heard of it, or done for it
    chose_s: float | None = None  # when its last token was chosen here, in this epoch
    chosen: list[int] = field(default_factory=list)  # since the sampler's history, where they are to be remembered

    def __post_init__(self) -> None:
        # How activations travel; None where tokens enter, or only tokens leave.
        self.input_codec = None if self.stage.has_embedding else self.codec_at(self.stage.start)
        self.output_codec = None if self.stage.has_output else self.codec_at(self.stage.stop)
        # Whoever follows has everything below: from before this epoch, or sent in it. Nothing is sent on past a gap.
        self.passed_on = self.wiring.forward_from

    @classmethod
    def of(cls, message: Open, head: bytes) -> "ShardSession":
        return cls(
            message.session, head, message.epoch, message.stage, message.wiring, message.positions, message.boundaries,
            message.sampler, message.keeps_outbox, resume_key=message.resume_key if message.stage.has_output else b"",
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"<ShardSession {self.id.hex()[:8]} {self.phase.value} epoch {self.epoch} layers {self.stage.start}-{self.stage.stop - 1} "
            f"in {self.length_in} out {self.length_out} waiting {len(self.waiting)}>"
        )

    @property
    def is_running(self) -> bool:
        return self.batches_running > 0

    def codec_at(self, layer: int) -> Codec:
        """How activations that enter `layer` are rounded in this session."""
        return next((boundary.codec for boundary in self.boundaries if boundary.layer == layer), "fp32")

    def rewire(self, message: Rewire) -> None:
        """Other neighbours, perhaps new ones: only what the head says is known to have reached the next."""
        self.epoch, self.wiring = message.epoch, message.wiring
        self.passed_on, self.has_replayed = message.wiring.forward_from, False
        self.chose_s = None

    def may_feed(self, node: bytes, source: bytes | None) -> bool:
        """Whether steps may come from that session of `node`'s: the neighbour named by the head, or the head itself."""
        if source is None:
            return node == self.head and self.wiring.previous is None
        neighbour = self.fed_by
        return neighbour is not None and neighbour.session == source and neighbour.node == node

    @property
    def fed_by(self) -> Neighbour | None:
        """None: by its head."""
        return self.wiring.previous or self.wiring.ring_from

    def problem_with(self, step: Step, body: bytes, most_waiting: int) -> str | None:
        """Why a step of this epoch, from whoever may send it, cannot be taken; None where it can."""
        if self.phase is not Phase.ACTIVE:
            return "the session is not open yet"
        if step.position != self.length_in:
            return f"step at position {step.position}, expected {self.length_in}"
        if step.position + step.count > self.positions:
            return f"position {step.position + step.count - 1} is past the {self.positions} that were reserved"
        if step.layer != self.stage.start:
            return f"activations for layer {step.layer}, expected {self.stage.start}"
        if step.codec != self.input_codec:
            return f"codec {step.codec}, expected {self.input_codec}"
        if len(body) != step.count * self.input_row_bytes:
            return f"{len(body)} bytes for {step.count} positions, expected {step.count * self.input_row_bytes}"
        if len(self.waiting) >= most_waiting:
            return f"more than {most_waiting} steps are waiting"
        return None

    def take(self, step: Step, body: bytes, now_s: float) -> None:
        """A step that may be taken; it waits now."""
        self.length_in += step.count
        self.used_s = now_s
        self.stages_before = stages_in(step.spent)
        self.waiting.append(Waiting(step, body, now_s))

    def onward(self, position: int, count: int, spent: bytes, *, chooses: bool) -> Step:
        """What whoever follows is sent of its output. A remote prefix returns hidden states to the head, never logits."""
        hop = self.wiring.next
        target = self.id if hop is None else hop.session
        return Step(
            target, self.epoch, position, count, self.stage.stop, self.output_codec, chooses, self.id, spent=spent
        )

    def round_again(self, ring: Hop, position: int) -> Step:
        """What the first shard is sent of a token that was chosen here."""
        return Step(ring.session, self.epoch, position, 1, 0, None, True, self.id)

    def scores_prompt(self, step: Step) -> bool:
        """Whether scores of the prompt are wanted from a step: not where it repeats what the head has had already."""
        sampler = self.sampler
        if sampler is None or sampler.prompt_logprobs is None or not self.stage.has_output:
            return False
        return step.position + 1 < sampler.prompt_length and step.position + step.count > self.wiring.forward_from

    def note_choice(self, sampler: Sampler, position: int, token: int) -> None:
        """A step that is repeated after a cut chooses the same token again."""
        chosen, index = self.chosen, position - len(sampler.history)
        if index != len(chosen):
            del chosen[index:]
        chosen.append(token)

    def end_round(self, now_s: float) -> int:
        """A token was chosen: microseconds since the one before it in this epoch, 0 where there was none."""
        before_s, self.chose_s = self.chose_s, now_s
        return 0 if before_s is None else int((now_s - before_s) * 1e6)

    def renew_sampler(self, sampler: Sampler | None) -> None:
        """A new epoch's knows what was accepted in those before."""
        if sampler is not None:
            self.sampler = self.untold_sampler = sampler
            self.chosen.clear()

    def is_silent(self, now_s: float, patience_s: float) -> bool:
        """Whether nothing has come for so long, and it is not the worker that is waited for."""
        is_with_worker = self.phase is Phase.OPENING or self.is_running or bool(self.waiting)
        return not is_with_worker and now_s - self.used_s >= patience_s

    @property
    def answer(self) -> AnswerSoFar | None:
        """What whoever takes the answer up needs of it; None where nobody may."""
        if not self.resume_key or self.sampler is None:
            return None
        return AnswerSoFar(self.sampler.prompt_length, (*self.sampler.history, *self.chosen))

    @property
    def next(self) -> Hop | None:
        return self.wiring.next


class ClosedSessions:
    """The last few, so that a late OPEN cannot bring one back."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._closed: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ClosedSessions {len(self._closed)} of {self._most}>"

    def __len__(self) -> int:
        return len(self._closed)

    def __contains__(self, session: bytes) -> bool:
        return session in self._closed

    def add(self, session: bytes) -> None:
        self._closed[session] = None
        while len(self._closed) > self._most:
            self._closed.popitem(last=False)
