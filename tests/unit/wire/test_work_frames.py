"""Frames between daemon and worker: what goes in comes out, however it is cut, and nothing else does."""

import random
import struct

import msgspec
import pytest

from potluck.core.errors import ProtocolViolation, WireMisuse
from potluck.wire.work import FromWorker, RunBatch, ToWorker, WorkItem
from potluck.wire.work_frames import MAX_BODY_BYTES, encode, from_worker_decoder, to_worker_decoder
from tests.support.work_messages import FROM_WORKER, TO_WORKER

ITEM = WorkItem(bytes(16), 5, 1, "fp32", None, True, 4)


def written(*messages: tuple[ToWorker | FromWorker, bytes]) -> bytes:
    return b"".join(b"".join(encode(message, body)) for message, body in messages)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 1000, 1 << 20])
def test_messages_survive_any_cut(size: int) -> None:
    for messages, decoder in ((TO_WORKER, to_worker_decoder()), (FROM_WORKER, from_worker_decoder())):
        data = written(*messages)
        frames = [frame for at in range(0, len(data), size) for frame in decoder.feed(data[at : at + size])]
        assert frames == messages


def test_parts_of_a_body_are_joined_and_not_copied() -> None:
    first, second = b"x" * 2304, memoryview(b"y" * 100)
    head, *parts = encode(TO_WORKER[2][0], first, second)
    assert parts[0] is first
    assert parts[1] is second
    [(message, body)] = to_worker_decoder().feed(b"".join([head, *parts]))
    assert (message, body) == (TO_WORKER[2][0], first + bytes(second))


@pytest.mark.parametrize("cut", [None, 1, 8, 60])
def test_what_was_expected_comes_as_it_would_have(cut: int | None) -> None:
    expected, other = RunBatch(7, (ITEM,)), RunBatch(8, (ITEM,))
    data = written((expected, b"body"))
    for pieces in (
        [data],
        [data + written((other, b"more"))],
        [written((other, b"body"))],
        [written((expected, b"x"))],
    ):
        decoder = to_worker_decoder()
        decoder.expect(expected, 4)
        parts = pieces if cut is None else [pieces[0][:cut], pieces[0][cut:]]
        frames = [frame for part in parts for frame in decoder.feed(part)]
        assert frames == list(to_worker_decoder().feed(pieces[0]))


def test_what_was_expected_is_not_decoded_and_expected_once() -> None:
    expected, decoder = RunBatch(7, (ITEM,)), to_worker_decoder()
    decoder.expect(expected, 4)
    [(first, _)] = decoder.feed(written((expected, b"body")))
    [(second, body)] = decoder.feed(written((expected, b"also")))
    assert first is expected
    assert second is not expected
    assert (second, body) == (expected, b"also")


def test_nothing_is_expected_inside_a_frame() -> None:
    data = written((RunBatch(7, (ITEM,)), b"body"))
    outer, decoder = written((RunBatch(6, ()), data)), to_worker_decoder()
    assert decoder.feed(outer[: -len(data)]) == []
    decoder.expect(RunBatch(7, (ITEM,)), 4)
    assert decoder.feed(data) == [(RunBatch(6, ()), data)]


def test_sizes_past_the_limits_are_refused_on_the_header() -> None:
    for sizes in ((17 << 20, 0), (1, (256 << 20) + 1), (0xFFFFFFFF, 0xFFFFFFFF)):
        with pytest.raises(ProtocolViolation):
            to_worker_decoder().feed(struct.pack("<II", *sizes))


def test_a_body_past_the_limit_is_our_own_fault() -> None:
    with pytest.raises(WireMisuse):
        encode(RunBatch(1, ()), memoryview(bytearray(1)).cast("B"), *[bytes(MAX_BODY_BYTES // 4)] * 4)


def test_messages_of_the_other_direction_are_refused() -> None:
    with pytest.raises(ProtocolViolation):
        to_worker_decoder().feed(written(FROM_WORKER[0]))
    with pytest.raises(ProtocolViolation):
        from_worker_decoder().feed(written(TO_WORKER[0]))


@pytest.mark.parametrize("seed", range(200))
def test_rubbish_gives_typed_errors_only(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(written(*TO_WORKER))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    decoder = to_worker_decoder()
    try:
        frames = decoder.feed(bytes(data))
    except ProtocolViolation:
        return
    assert len(frames) <= len(TO_WORKER) + 1


def test_a_message_that_is_not_msgpack_is_refused() -> None:
    meta = msgspec.msgpack.encode(["ping", "no number"])
    with pytest.raises(ProtocolViolation):
        to_worker_decoder().feed(struct.pack("<II", len(meta), 0) + meta)
