"""Frames: order, priorities, credits, limits, any cut of the bytes."""

import itertools
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import LinkFull, ProtocolViolation, WireMisuse
from potluck.core.limits import TENSOR_CHUNK_BYTES, TENSOR_FLOW_CONTROL_WINDOW
from potluck.core.sampling_params import MAX_TOP_LOGPROBS
from potluck.identity.signed import Signed
from potluck.weights.manifest import CHUNK_BYTES
from potluck.wire.channel import Channel
from potluck.wire.frame_decoder import FrameDecoder, HalfReceived
from potluck.wire.frame_writer import FrameWriter
from potluck.wire.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_HALF_RECEIVED,
    MAX_LONG_META_BYTES,
    MAX_META_BYTES,
    URGENT_BYTES,
    URGENT_RESERVE_BYTES,
    Credited,
    Kind,
    Progress,
    Received,
    stream_of,
)
from potluck.wire.messages import (
    MAX_HISTORY,
    MAX_STEP_TOKENS,
    AgedRecord,
    AnswerData,
    ChunkData,
    Message,
    Records,
    Result,
    Step,
    TokenizerData,
)
from potluck.wire.prompt_scores import TokenScore, encode_scores
from tests.support.wire_messages import (
    close,
    describe,
    one_of_every_message,
    opening,
    session_id,
    session_of,
    step,
)

MIB = 1 << 20


def frame_of(writer: FrameWriter) -> bytes:
    return b"".join(writer.take_frame())


def all_bytes(writer: FrameWriter) -> bytes:
    return b"".join(writer.take(1 << 62))


def messages(decoder: FrameDecoder, data: bytes) -> list[tuple[Message, bytes]]:
    return [(event.message, event.body) for event in decoder.feed(data) if isinstance(event, Received)]


def header(
    kind: int,
    stream: int = 1,
    payload: int = 0,
    meta: int = 0,
    body: int = 0,
    value: int = 0,
    flags: int = 0,
    reserved: int = 0,
) -> bytes:
    return HEADER.pack(kind, flags, reserved, stream, payload, meta, body, value)


# ---------------------------------------------------------------- there and back


def test_header_has_24_bytes() -> None:
    assert HEADER_BYTES == 24


def test_small_message_is_one_frame() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    writer.push(step(), b"x" * 2304)
    buffers = writer.take(1)
    assert len(buffers) == 1
    assert decoder.feed(bytes(buffers[0])) == [Received(step(), b"x" * 2304, stream_of(session_id(1)), 0)]
    assert writer.queued_bytes == 0


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 2304, URGENT_BYTES, URGENT_BYTES + 1, MIB - 1, MIB, MIB + 1, 3 * MIB]), max_size=6
    ),
    cuts=st.lists(st.integers(1, 300_000), min_size=1, max_size=8),
)
@settings(deadline=None, max_examples=40)
def test_any_cut_gives_the_same_messages(sizes: list[int], cuts: list[int]) -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    sent = [(step(number % 3, number), random.Random(number).randbytes(size)) for number, size in enumerate(sizes)]
    for message, body in sent:
        writer.push(message, body)
    data, received, place = all_bytes(writer), [], 0
    for size in itertools.cycle((*cuts, 200_000)):  # the last, so that it ends some time
        received += messages(decoder, data[place : place + size])
        place += size
        if place >= len(data):
            break
    for session in range(3):
        mine = session_id(session)
        assert [each for each in received if session_of(each[0]) == mine] == [
            each for each in sent if session_of(each[0]) == mine
        ]


def test_byte_by_byte() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    writer.push(step(), b"body")
    writer.push(opening(history=300))
    writer.push(describe())
    received = [each for byte in all_bytes(writer) for each in messages(decoder, bytes([byte]))]
    assert received == [(step(), b"body"), (opening(history=300), b""), (describe(), b"")]


def test_longest_history_passes_and_takes_bounded_memory() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    message = opening(history=MAX_HISTORY - 100)
    writer.push(message)
    data = all_bytes(writer)
    assert MAX_META_BYTES < len(data) < MAX_LONG_META_BYTES
    assert messages(decoder, data) == [(message, b"")]


def test_body_may_be_any_view() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    body = memoryview(bytearray(range(256)) * 800)
    writer.push(step(), body.cast("I"))
    writer.push(step(), body[:100].cast("I"))
    assert [body for _, body in messages(decoder, all_bytes(writer))] == [bytes(body), bytes(body[:100])]


def test_large_bodies_are_not_copied() -> None:
    writer = FrameWriter()
    body = bytes(64 * MIB)
    tracemalloc.start()
    writer.push(step(), body)
    taken = [writer.take_frame() for _ in range(10)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(taken) == 10
    assert peak < MIB // 10


# ---------------------------------------------------------------- order and priorities


def test_urgent_overtakes_other_sessions_bulk() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    writer.push(step(1), bytes(5 * MIB))
    first = frame_of(writer)
    writer.push(step(2), b"small")
    assert decoder.feed(first) == [Progress(1, 1)]
    assert messages(decoder, frame_of(writer)) == [(step(2), b"small")]


def test_order_within_a_session_is_kept() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    writer.push(step(1, 0), bytes(3 * MIB))
    writer.push(step(1, 1), b"small")
    writer.push(step(1, 2), bytes(2 * MIB))
    writer.push(close(1))
    writer.push(close(2))
    received = [message for message, _ in messages(decoder, all_bytes(writer))]
    assert received == [close(2), step(1, 0), step(1, 1), step(1, 2), close(1)]


def test_bulk_of_several_sessions_takes_turns() -> None:
    writer = FrameWriter()
    for session in (1, 2, 3):
        writer.push(step(session), bytes(2 * MIB))
    streams = [HEADER.unpack_from(frame_of(writer))[3] for _ in range(9)]
    assert streams == [1, 2, 3] * 3


def test_credit_goes_first() -> None:
    writer = FrameWriter()
    writer.push(step(1), b"small")
    writer.grant(9, 4)
    assert FrameDecoder().feed(frame_of(writer)) == [Credited(9, 4)]


def test_messages_without_a_session_use_stream_0() -> None:
    writer = FrameWriter()
    writer.push(describe())
    assert HEADER.unpack_from(frame_of(writer))[3] == 0


# ---------------------------------------------------------------- credits


def test_writer_stops_at_the_window_and_goes_on_with_credit() -> None:
    writer = FrameWriter()
    writer.push(step(1), bytes(20 * MIB))
    frames = [frame_of(writer) for _ in range(TENSOR_FLOW_CONTROL_WINDOW + 1)]
    assert frames[-1] == b""
    assert not writer.has_frames
    writer.credit(1, 2)
    assert len([frame for frame in (frame_of(writer) for _ in range(4)) if frame]) == 2


def test_a_stopped_session_stops_nobody_else() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    writer.push(step(1), bytes(40 * MIB))
    writer.push(step(2), bytes(4 * MIB))
    writer.push(step(3), b"small")
    received = [message for message, _ in messages(decoder, all_bytes(writer))]
    assert received == [step(3), step(2)]
    assert 23 * MIB < writer.queued_bytes < 25 * MIB


def test_stream_is_forgotten_when_all_is_credited() -> None:
    writer = FrameWriter()
    writer.push(step(1), bytes(MIB))
    all_bytes(writer)
    writer.credit(1, 1)
    writer.credit(1, 1)
    assert "0 of 0 streams" in repr(writer)


def test_credit_for_nothing_is_a_violation() -> None:
    writer = FrameWriter()
    with pytest.raises(ProtocolViolation):
        writer.credit(1, 1)
    writer.push(step(1), bytes(MIB))
    all_bytes(writer)
    with pytest.raises(ProtocolViolation):
        writer.credit(1, 3)


def test_sender_without_credit_is_found_out() -> None:
    decoder = FrameDecoder()
    writer = FrameWriter()
    writer.push(step(1), bytes(17 * MIB))
    for _ in range(TENSOR_FLOW_CONTROL_WINDOW):
        decoder.feed(frame_of(writer))
    offset = TENSOR_FLOW_CONTROL_WINDOW * MIB
    with pytest.raises(ProtocolViolation, match="credit"):
        decoder.feed(header(Kind.CHUNK, payload=MIB, value=offset))


def test_chunks_on_ever_new_streams_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within its own window; what is remembered of them must end somewhere too."""
    monkeypatch.setattr("potluck.wire.frame_decoder.MAX_BUSY_STREAMS", 8)
    decoder = FrameDecoder()
    chunks = []
    for number in range(1, 11):
        writer = FrameWriter()
        writer.push(step(number), bytes(100_000))
        chunks.append(frame_of(writer))
    for chunk in chunks[:-1]:
        decoder.feed(chunk)
    with pytest.raises(ProtocolViolation, match="credit"):
        decoder.feed(chunks[-1])


def test_granting_more_than_was_received_is_misuse() -> None:
    with pytest.raises(WireMisuse):
        FrameDecoder().grant(1, 1)


def exchange(sender: Channel, receiver: Channel) -> list[Message]:
    """Move bytes both ways until nothing moves; what the receiver got."""
    received = []
    while True:
        there = all_bytes(sender.writer)
        for each in receiver.receive(there):
            received.append(each.message)
            receiver.consumed(each)
        back = all_bytes(receiver.writer)
        for each in sender.receive(back):
            sender.consumed(each)
        if not there and not back:
            return received


def test_largest_body_passes_through_the_window() -> None:
    sender, receiver = Channel(), Channel()
    sender.send(step(1), bytes(MAX_BODY_BYTES))
    assert exchange(sender, receiver) == [step(1)]
    assert sender.writer.queued_bytes == 0


def test_hold_stops_one_session_and_release_continues_it() -> None:
    sender, receiver = Channel(), Channel()
    receiver.hold(session_id(1))
    for position in range(10):
        sender.send(step(1, position), bytes(3 * MIB))
        sender.send(step(2, position), bytes(3 * MIB))
        sender.send(close(3))
    received = exchange(sender, receiver)
    assert [message for message in received if session_of(message) == session_id(2)] == [
        step(2, number) for number in range(10)
    ]
    held = [message for message in received if session_of(message) == session_id(1)]
    assert held == [step(1, number) for number in range(4)]  # four chunks each: three and the meta
    receiver.release(session_id(1))
    assert exchange(sender, receiver) == [step(1, number) for number in range(4, 10)]
    receiver.release(session_id(1))


def test_goodbye_comes_after_everything_and_ends_it() -> None:
    sender, receiver = Channel(), Channel()
    sender.send(step(1), bytes(40 * MIB))
    sender.send(close(1))
    sender.writer.finish()
    assert exchange(sender, receiver) == [step(1), close(1)]
    assert receiver.is_ended
    with pytest.raises(ProtocolViolation, match="goodbye"):
        receiver.receive(header(Kind.CREDIT, value=1))


def test_no_credit_is_sent_after_goodbye() -> None:
    sender, receiver = Channel(), Channel()
    receiver.writer.finish()
    goodbye = all_bytes(receiver.writer)
    sender.send(step(1), bytes(MIB))
    for received in receiver.receive(all_bytes(sender.writer)):
        receiver.consumed(received)
    assert not receiver.writer.has_frames
    assert all_bytes(receiver.writer) == b""
    sender.receive(goodbye)
    assert sender.is_ended


@pytest.mark.parametrize("size", [1, 23, 24, 60])
def test_nothing_may_follow_goodbye(size: int) -> None:
    writer = FrameWriter()
    writer.push(step(5), b"x" * 40)
    more = all_bytes(writer)[:size]
    with pytest.raises(ProtocolViolation, match="goodbye"):
        Channel().receive(header(Kind.GOODBYE, stream=0) + more)
    channel = Channel()
    channel.receive(header(Kind.GOODBYE, stream=0))
    with pytest.raises(ProtocolViolation, match="goodbye"):
        channel.receive(more)


def test_it_knows_whether_what_comes_next_begins_a_message() -> None:
    writer, decoder = FrameWriter(), FrameDecoder()
    assert decoder.is_between_messages
    writer.push(step(1), b"body")
    small = all_bytes(writer)
    for cut in (1, 23, 24, 25, len(small) - 1):
        part = FrameDecoder()
        part.feed(small[:cut])
        assert not part.is_between_messages
        part.feed(small[cut:])
        assert part.is_between_messages
    writer.push(step(2), bytes(3 * TENSOR_CHUNK_BYTES))
    chunks = list(iter(lambda: frame_of(writer), b""))
    for chunk in chunks[:-1]:
        decoder.feed(chunk)
        assert not decoder.is_between_messages, "the message goes on"
    decoder.feed(chunks[-1])
    assert decoder.is_between_messages
    writer.finish()
    decoder.feed(all_bytes(writer))
    assert not decoder.is_between_messages, "nothing comes any more"


def test_after_a_violation_no_message_begins() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolViolation):
        decoder.feed(header(9))
    assert not decoder.is_between_messages


def test_more_large_messages_than_may_be_under_way_all_arrive() -> None:
    sender, receiver = Channel(), Channel()
    count = MAX_HALF_RECEIVED + 20
    for session in range(1, count + 1):
        sender.send(step(session), bytes(2 * MIB))
    received = exchange(sender, receiver)
    assert sorted(map(session_of, received)) == sorted(session_id(session) for session in range(1, count + 1))


def test_three_of_the_largest_take_turns_within_the_receivers_memory() -> None:
    sender, receiver = Channel(max_queued_bytes=1 << 40), Channel()
    body = bytes(MAX_BODY_BYTES)
    for session in (1, 2, 3):
        sender.send(step(session), body)
    assert len(exchange(sender, receiver)) == 3


# ---------------------------------------------------------------- bounds and misuse


def test_full_queue_refuses_but_keeps_room_for_small_messages() -> None:
    writer = FrameWriter(max_queued_bytes=3 * MIB)
    writer.push(step(1), bytes(2 * MIB))
    with pytest.raises(LinkFull):
        writer.push(step(2), bytes(2 * MIB))
    for _ in range(1000):
        writer.push(close(2))
    while writer.queued_bytes < 3 * MIB + URGENT_RESERVE_BYTES - 1000:
        writer.push(close(2))
    with pytest.raises(LinkFull):
        writer.push(close(2), bytes(1000))
    all_bytes(writer)
    writer.credit(1, 2)
    assert writer.queued_bytes == 0
    writer.push(step(2), bytes(2 * MIB))


def test_queued_bytes_return_to_zero() -> None:
    chance = random.Random(1)
    sender, receiver = Channel(), Channel()
    for number in range(200):
        size = chance.choice([0, 10, 5000, URGENT_BYTES + 1, MIB, 2 * MIB + 5])
        sender.send(step(chance.randrange(5), number), bytes(size))
        if chance.random() < 0.1:
            exchange(sender, receiver)
    exchange(sender, receiver)
    assert sender.writer.queued_bytes == 0
    assert "0 of 0 streams" in repr(sender.writer)


def test_a_body_that_no_peer_accepts_is_misuse() -> None:
    writer = FrameWriter(max_queued_bytes=1 << 40)
    with pytest.raises(WireMisuse):
        writer.push(step(), bytes(MAX_BODY_BYTES + 1))
    assert writer.queued_bytes == 0


BAD_HEADERS = {
    "unknown kind": header(9),
    "kind 0": header(0),
    "flags": header(Kind.MESSAGE, payload=5, meta=5, flags=1),
    "reserved": header(Kind.MESSAGE, payload=5, meta=5, reserved=1),
    "no meta": header(Kind.MESSAGE, payload=100, body=100),
    "long meta": header(Kind.MESSAGE, payload=MIB, meta=MAX_META_BYTES + 1),
    "too long meta": header(Kind.LONG_MESSAGE, payload=MIB, meta=MAX_LONG_META_BYTES + 1),
    "largest numbers": header(Kind.MESSAGE, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    "long message with a body": header(Kind.LONG_MESSAGE, payload=MIB, meta=MAX_META_BYTES + 1, body=MIB),
    "too long body": header(Kind.MESSAGE, payload=MIB, meta=50, body=MAX_BODY_BYTES + 1),
    "small message in pieces": header(Kind.MESSAGE, payload=100, meta=50, body=1000),
    "small message with more": header(Kind.MESSAGE, payload=2000, meta=50, body=1000),
    "tiny chunk": header(Kind.MESSAGE, payload=100, meta=50, body=MIB),
    "empty chunk": header(Kind.MESSAGE, payload=0, meta=50, body=MIB),
    "large chunk": header(Kind.MESSAGE, payload=MIB + 1, meta=50, body=2 * MIB),
    "offset in a first frame": header(Kind.MESSAGE, payload=MIB, meta=50, body=2 * MIB, value=1),
    "chunk of nothing": header(Kind.CHUNK, payload=MIB, value=MIB),
    "goodbye with a stream": header(Kind.GOODBYE, stream=1),
    "goodbye with a value": header(Kind.GOODBYE, stream=0, value=1),
    "credit with payload": header(Kind.CREDIT, payload=1, value=1),
    "credit of nothing": header(Kind.CREDIT),
    "credit beyond the window": header(Kind.CREDIT, value=TENSOR_FLOW_CONTROL_WINDOW + 1),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header_is_refused_at_once_and_for_ever(name: str) -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    with pytest.raises(ProtocolViolation):
        decoder.feed(BAD_HEADERS[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    writer = FrameWriter()
    writer.push(describe())
    with pytest.raises(ProtocolViolation):
        decoder.feed(all_bytes(writer))


def half_sent(session: int, size: int) -> tuple[bytes, bytes]:
    """The first frame of a large message, and the rest."""
    writer = FrameWriter(max_queued_bytes=1 << 40)
    writer.push(step(session), bytes(size))
    return frame_of(writer), all_bytes(writer)


def test_wrong_continuations_are_refused() -> None:
    first, _ = half_sent(1, 4 * MIB)
    for bad in (
        header(Kind.CHUNK, payload=MIB, value=0),
        header(Kind.CHUNK, payload=MIB, value=MIB + 1),
        header(Kind.CHUNK, payload=MIB, value=MIB, body=1),
        header(Kind.CHUNK, payload=10, value=MIB),
        header(Kind.CHUNK, payload=MIB + 1, value=MIB),
        first,
        b"".join([header(Kind.MESSAGE, payload=4, meta=4), b"\x92\xa5cl"]),
    ):
        decoder = FrameDecoder()
        decoder.feed(first)
        with pytest.raises(ProtocolViolation):
            decoder.feed(bad)


def test_small_message_inside_a_large_one_of_its_stream_is_refused() -> None:
    decoder, writer = FrameDecoder(), FrameWriter()
    decoder.feed(half_sent(1, 4 * MIB)[0])
    writer.push(close(1))
    with pytest.raises(ProtocolViolation, match="inside"):
        decoder.feed(all_bytes(writer))


def test_too_many_messages_begun() -> None:
    decoder = FrameDecoder()
    start, _ = half_sent(1, 2 * MIB)
    for session in range(2, MAX_HALF_RECEIVED + 2):
        decoder.feed(half_sent(session, 2 * MIB)[0])
    with pytest.raises(ProtocolViolation, match="too many"):
        decoder.feed(start)


def test_too_many_bytes_begun() -> None:
    decoder = FrameDecoder()
    for session in (1, 2, 3):
        start, _ = half_sent(session, MAX_BODY_BYTES - 1000)
        if session < 3:
            decoder.feed(start)
    with pytest.raises(ProtocolViolation, match="too many"):
        decoder.feed(start)


def test_too_many_bytes_begun_on_several_connections_together() -> None:
    shared = HalfReceived(5 * MIB)
    first, second, third = FrameDecoder(), FrameDecoder(), FrameDecoder()
    start, rest = half_sent(1, 2 * MIB)
    first.feed(start)  # before it shares
    for decoder in (first, second, third):
        decoder.share(shared)
    second.feed(start)
    with pytest.raises(ProtocolViolation, match="too many"):
        third.feed(start)
    third.end()
    first.feed(rest)
    third = FrameDecoder()
    third.share(shared)
    third.feed(start)
    for decoder in (second, third, third):
        decoder.end()
    assert shared.used_bytes == 0
    with pytest.raises(ProtocolViolation):
        second.feed(rest)


def test_announced_sizes_take_no_memory() -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    for stream in range(1, 3):
        start, _ = half_sent(stream, MAX_BODY_BYTES // 2)
        decoder.feed(start[: HEADER_BYTES + 1000] if stream == 2 else start)
    del start
    _, peak = tracemalloc.get_traced_memory()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 * MIB
    assert peak < MAX_BODY_BYTES * 2  # what the test itself made


def with_meta(meta: bytes, stream: int = 1, kind: int = Kind.MESSAGE, body: bytes = b"") -> bytes:
    return header(kind, stream, len(meta) + len(body), len(meta), len(body)) + meta + body


DEEP = b"\x91" * 50_000 + b"\xc0"

BAD_METAS = {
    "nothing known": with_meta(b"\xc0"),
    "unknown tag": with_meta(b"\x91\xa4nope"),
    "cut short": with_meta(b"\x92\xa5close\xc4\x10abc"),
    "too much": with_meta(b"\x92\xa5close\xc4\x10" + session_id(1) + b"\xc0"),
    "short session": with_meta(b"\x92\xa5close\xc4\x04\x01\x00\x00\x00"),
    "text for bytes": with_meta(b"\x92\xa5close\xb0" + session_id(1)),
    "not utf-8": with_meta(b"\x93\xadget_tokenizer\x01\xa4\xff\xfe\xff\xff", stream=0),
    "huge array": with_meta(b"\xdd\xff\xff\xff\xff"),
    "huge map": with_meta(b"\xdf\xff\xff\xff\xff"),
    "deep": with_meta(DEEP),
    "deep in a message": with_meta(b"\x92\xa8describe" + DEEP, stream=0),
    "wrong stream": with_meta(b"\x92\xa5close\xc4\x10" + session_id(1), stream=2),
    "session on stream 0": with_meta(b"\x92\xa5close\xc4\x10" + session_id(1), stream=0),
    "long form of a short type": with_meta(b"\x92\xa5close\xc4\x10" + session_id(1), kind=Kind.LONG_MESSAGE),
}


@pytest.mark.parametrize("name", BAD_METAS)
def test_bad_meta_is_refused(name: str) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        FrameDecoder().feed(BAD_METAS[name])
    assert "session-body" not in str(caught.value)


def test_violation_by_chunked_meta() -> None:
    """A long message of the wrong type is found when its meta is complete."""
    meta = b"\x92\xa5close\xc4\x10" + session_id(1) + bytes(MAX_META_BYTES)
    with pytest.raises(ProtocolViolation):
        FrameDecoder().feed(with_meta(meta, kind=Kind.LONG_MESSAGE))


# ---------------------------------------------------------------- bodies

BODIES: dict[type, int] = {
    Step: MAX_BODY_BYTES,
    Result: MAX_STEP_TOKENS
    * len(encode_scores([TokenScore(0.0, True, ((1, 0.0),) * MAX_TOP_LOGPROBS)], MAX_TOP_LOGPROBS)),
    TokenizerData: 128 * MIB,
    AnswerData: 4 * MAX_HISTORY,
    ChunkData: CHUNK_BYTES,
}  # what those who send them may have to say; all other types have none


@pytest.mark.parametrize("message", one_of_every_message(), ids=lambda message: type(message).__name__)
def test_a_body_that_its_type_does_not_have_is_refused_before_it_comes(message: Message) -> None:
    """Small, and large: then with the first frame, not when hundreds of megabytes have been waited for."""
    most = BODIES.get(type(message), 0)
    assert most <= type(message).most_body_bytes <= most + most // 20
    for size in (1, URGENT_BYTES + 1, 2 * MIB, MAX_BODY_BYTES):
        writer, decoder = FrameWriter(max_queued_bytes=1 << 40), FrameDecoder()
        writer.push(message, bytes(size))
        first = frame_of(writer)
        if size <= most:
            [event] = decoder.feed(first)
            assert isinstance(event, Received if size < MIB else Progress)
            continue
        with pytest.raises(ProtocolViolation, match="a body"):
            decoder.feed(first)


def test_a_meta_of_several_frames_is_looked_at_when_it_is_there() -> None:
    """A first frame that ends before it does not hide the type for long."""
    record = AgedRecord(Signed("advert", bytes(700), bytes(32), bytes(64)), 0)
    meta = msgspec.msgpack.encode(Records((record,) * 100))
    assert URGENT_BYTES < len(meta) < 2 * URGENT_BYTES
    decoder = FrameDecoder()
    first = header(Kind.MESSAGE, 0, URGENT_BYTES, len(meta), MAX_BODY_BYTES) + meta[:URGENT_BYTES]
    assert decoder.feed(first) == [Progress(0, 1)]
    rest = meta[URGENT_BYTES:].ljust(URGENT_BYTES, b"x")
    with pytest.raises(ProtocolViolation, match="a body"):
        decoder.feed(header(Kind.CHUNK, 0, URGENT_BYTES, value=URGENT_BYTES) + rest)


def test_chunk_size_is_the_named_constant() -> None:
    first, _ = half_sent(1, 4 * MIB)
    assert len(first) == HEADER_BYTES + TENSOR_CHUNK_BYTES
