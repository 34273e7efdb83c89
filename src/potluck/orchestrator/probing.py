"""What answers to probes mean: who lives, whether anything moves, and between which two stages it stopped. Pure.

A shard may say of itself what it likes; the head asks all of them, and compares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from potluck.orchestrator.recovery import HeadStage
from potluck.wire.messages import Probed

_PATIENCE_WHILE_OPENING = 4  # times the usual, with a worker that reads weights or compiles


@dataclass
class Probing:
    """One round of questions to every stage: who has answered, and how."""

    started_s: float
    nonce: int
    answers: dict[bytes, Probed] = field(default_factory=dict)


def looks_alive(answer: Probed | None, patience_s: float, *, is_opening: bool) -> bool:
    """Whether it has answered, knows the session, and its worker has not been silent at work for too long."""
    if answer is None:
        return False
    patience_s *= _PATIENCE_WHILE_OPENING if is_opening else 1
    return (answer.is_known or is_opening) and answer.worker_idle_us <= patience_s * 1e6


def progress_of(answers: Mapping[bytes, Probed], most: int) -> int:
    """Grows while any stage takes or gives positions; no shard can claim more than there are."""
    return sum(min(a.position_in, most) + min(a.position_out, most) for a in answers.values())


def has_waited_its_turn(answers: Mapping[bytes, Probed], batches: Mapping[bytes, int]) -> bool:
    """Whether a stage has something to do for this session and has begun other batches since it told `batches`."""
    return any(
        answer.position_in > answer.position_out and answer.batches > batches.get(session, answer.batches)
        for session, answer in answers.items()
    )


def stalled_hop(
    stages: Sequence[HeadStage], answers: Mapping[bytes, Probed], sent: int
) -> tuple[HeadStage | None, HeadStage]:
    """The stage that has taken more than it has given (and None); or two, of which one says it gave and the other it got nothing."""
    given, giver = sent, None
    for stage in stages:
        answer = answers[stage.session]
        if answer.position_in < given:
            return giver, stage
        if answer.position_in > answer.position_out:
            return None, stage
        given, giver = answer.position_out, stage
    return None, stages[-1]
