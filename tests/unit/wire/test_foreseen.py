"""A step's frame that was made beforehand is the very frame that it would have been."""

import random

import msgspec
import pytest

from potluck.core.errors import WireMisuse
from potluck.wire.channel import Channel
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.frame_writer import FrameWriter
from potluck.wire.frames import URGENT_BYTES
from potluck.wire.messages import MAX_POSITIONS, Codec, Step
from potluck.wire.spent import SPENT_BYTES
from tests.support.wire_messages import session_id, step


def drawn(chance: random.Random) -> tuple[Step, int, bytes]:
    """A step, of how many stages it tells times, and its body."""
    stages = chance.choice((0, 1, 2, 31, 32, 64))
    codecs: tuple[Codec | None, ...] = (None, "fp32", "int8")
    said = Step(
        chance.randbytes(16), chance.choice((0, 1, 127, 128, 70_000)), chance.choice((1, 127, 128, 65_536, MAX_POSITIONS)), 1,
        chance.choice((0, 15, 200, 4096)), chance.choice(codecs), chance.random() < 0.5,
        chance.choice((None, chance.randbytes(16))), spent=chance.randbytes(stages * SPENT_BYTES),
    )  # fmt: skip
    return said, stages, chance.randbytes(chance.choice((0, 4, 2304, URGENT_BYTES)))


def written(message: Step, body: bytes) -> bytes:
    writer = FrameWriter()
    writer.push(message, body)
    return b"".join(writer.take(1 << 20))


@pytest.mark.parametrize("seed", range(200))
def test_it_is_what_would_have_been_written(seed: int) -> None:
    said, stages, body = drawn(random.Random(seed))
    foreseen = ForeseenStep(msgspec.structs.replace(said, spent=b""), stages, len(body))
    frame = foreseen.frame(said.spent, body)
    assert frame == written(said, body)
    assert foreseen.body_in(frame) == body
    [received] = Channel().receive(frame)
    assert (received.message, received.body, received.stream) == (said, body, foreseen.stream)


@pytest.mark.parametrize("seed", range(50))
def test_every_byte_counts_but_those_of_the_times_and_the_body(seed: int) -> None:
    said, stages, body = drawn(random.Random(seed))
    foreseen = ForeseenStep(said, stages, len(body))
    frame = written(said, body)
    numbers_at = len(frame) - len(body) - len(said.spent)
    for place in [*range(numbers_at), *range(numbers_at, len(frame), 97)]:
        other = bytearray(frame)
        other[place] ^= 1
        assert (foreseen.body_in(bytes(other)) is not None) == (place >= numbers_at)


def test_less_or_more_is_something_else() -> None:
    foreseen = ForeseenStep(step(), 1, 8)
    frame = written(step(), b"activate")
    assert foreseen.body_in(frame) == b"activate"
    for other in (b"", frame[:-1], frame + b"\0", frame + frame, frame[1:]):
        assert foreseen.body_in(other) is None


@pytest.mark.parametrize(
    "changes", [{"position": 1}, {"epoch": 4}, {"session": session_id(9)}, {"chooses": False}, {"is_rehearsal": True}]
)
def test_another_step_is_something_else(changes: dict[str, object]) -> None:
    assert ForeseenStep(step(), 1, 8).body_in(written(msgspec.structs.replace(step(), **changes), bytes(8))) is None


def test_what_was_not_foreseen_cannot_be_sent_as_if_it_were() -> None:
    foreseen = ForeseenStep(step(), 1, 8)
    for spent, body in ((b"", bytes(8)), (bytes(8), bytes(9)), (bytes(16), bytes(8))):
        with pytest.raises(WireMisuse):
            foreseen.frame(spent, body)


def test_a_step_of_several_frames_is_not_foreseen() -> None:
    with pytest.raises(WireMisuse):
        ForeseenStep(step(), 1, URGENT_BYTES + 1)


def test_a_frame_made_beforehand_keeps_its_place_in_the_queue() -> None:
    writer = FrameWriter()
    foreseen = ForeseenStep(step(1, 7), 1, 4)
    writer.push(step(1, 6), b"before")
    writer.push_frame(foreseen.stream, foreseen.frame(step().spent, b"body"))
    writer.push(step(1, 8), b"after")
    received = Channel().receive(b"".join(writer.take(1 << 20)))
    assert [(each.message, each.body) for each in received] == [
        (step(1, 6), b"before"), (step(1, 7), b"body"), (step(1, 8), b"after"),
    ]  # fmt: skip
    assert writer.queued_bytes == 0


def test_behind_bulk_of_its_session_it_waits() -> None:
    writer = FrameWriter()
    foreseen = ForeseenStep(step(1, 7), 1, 4)
    writer.push(step(1, 6), bytes(3 << 20))
    writer.push_frame(foreseen.stream, foreseen.frame(step().spent, b"body"))
    there = Channel()
    received = [each for frame in iter(lambda: b"".join(writer.take_frame()), b"") for each in there.receive(frame)]
    assert [each.message for each in received] == [step(1, 6), step(1, 7)]
