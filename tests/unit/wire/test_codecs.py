"""Codecs: exact where they promise it, the same bits when repeated, honest about what is not a number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from potluck.core.errors import ProtocolViolation
from potluck.wire.codecs import BLOCK, FP16_MAX, Rows, check_rows, decode, encode, encoded_bytes
from potluck.wire.messages import Codec

CODECS: tuple[Codec, ...] = ("fp32", "fp16", "int8")
WIDTHS = (1, 31, 32, 33, 64, 576)


def any_rows(seed: int, count: int, width: int) -> Rows:
    """Numbers of every size that float32 has, row by row and here and there within a row."""
    chance = np.random.default_rng(seed)
    rows = chance.standard_normal((count, width)) * 10.0 ** chance.uniform(-44, 37, (count, 1))
    rows *= np.where(chance.random((count, width)) < 0.1, 10.0 ** chance.uniform(-10, 1, (count, width)), 1.0)
    return rows.astype(np.float32)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_rounded_once_stays(codec: Codec, width: int) -> None:
    for seed in range(50):
        rows = any_rows(seed, 20, width)
        data = encode(codec, rows)
        decoded = decode(codec, data, 20, width)
        assert len(data) == encoded_bytes(codec, 20, width)
        assert decoded.shape == (20, width)
        assert decoded.dtype == np.float32
        assert encode(codec, decoded) == data


def test_scale_survives_a_round_trip_for_every_significand() -> None:
    """max / 127 of every float32 between 1 and 2 (other powers of two behave alike): 127 times it, divided by 127, is it again."""
    for start in range(0, 1 << 23, 1 << 20):
        largest = (np.arange(start, start + (1 << 20), dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
        scales = largest / np.float32(127)
        assert np.array_equal(scales * np.float32(127) / np.float32(127), scales)


@given(arrays(np.float32, (2, 40), elements=st.floats(width=32)))
@settings(deadline=None)
def test_any_bits_at_all(rows: Rows) -> None:
    for codec in CODECS:
        data = encode(codec, rows)
        assert encode(codec, decode(codec, data, 2, 40)) == data


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_encoded_one_by_one(codec: Codec) -> None:
    rows = any_rows(3, 8, 70)
    assert encode(codec, rows) == b"".join(encode(codec, rows[number : number + 1]) for number in range(8))
    size = encoded_bytes(codec, 1, 70)
    middle = memoryview(encode(codec, rows))[2 * size : 5 * size]
    assert np.array_equal(decode(codec, middle, 3, 70), decode(codec, encode(codec, rows[2:5]), 3, 70))


def test_fp32_keeps_every_bit() -> None:
    rows = any_rows(1, 4, 100)
    rows[0, :4] = [np.nan, np.inf, -0.0, 1e-45]
    assert decode("fp32", encode("fp32", rows), 4, 100).tobytes() == rows.tobytes()


def test_fp16_rounds_to_even_and_clamps() -> None:
    rows = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 1e9, -1e9, 65519.0, 2**-25, 2**-24, -0.0]], np.float32)
    expected = np.array([[1.0, 1 + 2**-9, FP16_MAX, -FP16_MAX, FP16_MAX, 0.0, 2**-24, -0.0]], np.float32)
    assert decode("fp16", encode("fp16", rows), 1, 8).tobytes() == expected.tobytes()


def test_int8_known_block() -> None:
    rows = np.zeros((1, BLOCK), np.float32)
    rows[0, :6] = [127.0, -127.0, 0.5, 1.5, 2.5, -0.5]  # halves go to even
    data = encode("int8", rows)
    assert data[:4] == np.float32(1).tobytes()
    assert list(np.frombuffer(data[4:10], np.int8)) == [127, -127, 0, 2, 2, 0]


def test_int8_error_is_at_most_half_a_step() -> None:
    rows = np.random.default_rng(5).standard_normal((50, 576)).astype(np.float32)
    error = np.abs(decode("int8", encode("int8", rows), 50, 576) - rows).reshape(50, 18, 32)
    step = np.abs(rows).reshape(50, 18, 32).max(axis=2) / 127
    assert (error <= step[:, :, None] * 0.5001).all()


def test_int8_zero_and_tiny_blocks() -> None:
    rows = np.zeros((2, 64), np.float32)
    rows[1, 3] = 1e-40
    rows[1, 40] = 3.0
    decoded = decode("int8", encode("int8", rows), 2, 64)
    assert not decoded[0].any()
    assert not decoded[1, :32].any()
    assert decoded[1, 40] == pytest.approx(3.0, rel=1e-6)


def test_padding_never_shows() -> None:
    rows = any_rows(2, 3, 33)
    data = encode("int8", rows)
    assert len(data) == 3 * 2 * (4 + 32)
    assert decode("int8", data, 3, 33).shape == (3, 33)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_at_the_other_end(codec: Codec, value: float) -> None:
    rows = np.ones((3, 50), np.float32)
    rows[1, 20] = value
    decoded = decode(codec, encode(codec, rows), 3, 50)
    assert check_rows(decoded, 1e6) == "row 1 holds NaN or Inf"
    assert check_rows(decoded[:1], 1e6) is None


def test_largest_numbers_do_not_overflow_unseen() -> None:
    rows = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    assert check_rows(decode("int8", encode("int8", rows), 1, 32), 1e6) is not None


@pytest.mark.parametrize("codec", CODECS)
def test_hostile_bytes_decode_to_something_or_are_refused(codec: Codec) -> None:
    for byte in (0, 0x7F, 0x80, 0xFF):
        data = bytes([byte]) * encoded_bytes(codec, 2, 40)
        rows = decode(codec, data, 2, 40)
        check_rows(rows, 1e6)


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_length_is_the_senders_fault(codec: Codec) -> None:
    data = encode(codec, any_rows(1, 2, 40))
    for bad in (data[:-1], data + b"x", b""):
        with pytest.raises(ProtocolViolation):
            decode(codec, bad, 2, 40)


def test_norm_bound() -> None:
    rows = np.ones((4, 16), np.float32)
    assert check_rows(rows, 4.0) is None
    rows[2] *= 2
    assert check_rows(rows, 4.0) == "row 2 has norm 8, above 4"
    rows[2] = 1e30
    assert check_rows(rows, 4.0) is not None
    assert check_rows(np.zeros((0, 16), np.float32), 1.0) is None


def test_no_rows() -> None:
    for codec in CODECS:
        assert encode(codec, np.zeros((0, 40), np.float32)) == b""
        assert decode(codec, b"", 0, 40).shape == (0, 40)
