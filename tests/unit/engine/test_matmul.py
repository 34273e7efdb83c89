"""Products of packed weights: every format on every kind of processor that runs here equals the numpy reference, bit for bit."""

import os
from functools import cache

import numpy as np
import pytest

from potluck.engine import reference
from potluck.engine.kernels.matmul import with_whole_tiles
from potluck.engine.kernels.processor import LARGEST_TILE, PROCESSORS
from potluck.engine.packed_cache import PackedTensor
from potluck.engine.program import padded_to
from tests.support.kernel_calls import RUNNABLE, Floats, multiply, packed
from tests.support.random_weights import (
    FLOAT_FORMATS,
    FORMATS,
    LARGEST_HALF,
    QUANTISED_FORMATS,
    SMALLEST_HALF,
    Bytes,
    filled_weights,
    float_weights,
    random_weights,
)
from tests.support.same_bits import assert_same_bits

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))
ROUNDS = 60 if IS_LONG else 6

pytestmark = pytest.mark.parametrize("processor", RUNNABLE)


@cache
def matrix(format_name: str, rows: int, columns: int, seed: int = 0) -> tuple[Bytes, PackedTensor]:
    raw = random_weights(np.random.default_rng([seed, rows, columns]), format_name, rows, columns)
    return raw, packed(format_name, raw, columns)


def assert_equals_reference(
    format_name: str, raw: Bytes, tensor: PackedTensor, x: Floats, processor: str, chunks: int = 1
) -> None:
    with np.errstate(all="ignore"):
        wanted = reference.matmul(raw, format_name, len(raw), x)
    assert_same_bits(multiply(tensor, x, processor, chunks), wanted, f"{format_name} {processor} {x.shape} in {chunks}")


@pytest.mark.parametrize("format_name", FORMATS)
def test_random_shapes_equal_the_reference(format_name: str, processor: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(ROUNDS):
        rows, tokens = int(rng.integers(1, 70)), int(rng.integers(1, 10))
        columns = int(rng.integers(1, 200)) if format_name in FLOAT_FORMATS else 256 * int(rng.integers(1, 4))
        raw, tensor = matrix(format_name, rows, columns)
        x = rng.standard_normal((tokens, columns)).astype(np.float32)
        assert_equals_reference(format_name, raw, tensor, x, processor, chunks=int(rng.integers(1, 8)))


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_count_of_tokens_and_chunks_gives_the_same_bits(format_name: str, processor: str) -> None:
    raw, tensor = matrix(format_name, 37, 256)
    x = np.random.default_rng(12).standard_normal((9, 256)).astype(np.float32)
    wanted = reference.matmul(raw, format_name, 37, x)
    for tokens in range(1, 10):
        for chunks in (1, 2, 3, 7) if tokens % 3 else range(1, 8):
            got = multiply(tensor, x[:tokens], processor, chunks)
            assert_same_bits(got, wanted[:tokens], f"{tokens} tokens, {chunks} chunks")


@pytest.mark.parametrize("format_name", FORMATS)
def test_many_tokens_at_once_equal_one_after_the_other(format_name: str, processor: str) -> None:
    """More rows than one pass over the weights takes, so that the activations are cut into spans as well."""
    columns = 4096
    raw, tensor = matrix(format_name, 21, columns)
    x = np.random.default_rng(13).standard_normal((75, columns)).astype(np.float32)
    together = multiply(tensor, x, processor, chunks=2)
    assert_same_bits(together, np.concatenate([multiply(tensor, row[None], processor) for row in x]))
    assert_equals_reference(format_name, raw, tensor, x[70:], processor)


@pytest.mark.parametrize("format_name", [name for name in QUANTISED_FORMATS if not name.endswith("_K")])
def test_an_odd_number_of_blocks_equals_the_reference(format_name: str, processor: str) -> None:
    for columns in (32, 96, 160):
        raw, tensor = matrix(format_name, 19, columns)
        x = np.random.default_rng(columns).standard_normal((3, columns)).astype(np.float32)
        assert_equals_reference(format_name, raw, tensor, x, processor)


@pytest.mark.parametrize(("format_name", "rows", "columns"), [("Q4_K", 59_001, 256), ("F32", 66_000, 32)])
def test_tensors_that_are_packed_in_several_pieces_equal_the_reference(
    format_name: str, rows: int, columns: int, processor: str
) -> None:
    """More than 8 MiB, as output heads are."""
    raw, tensor = matrix(format_name, rows, columns)
    assert raw.nbytes > 8 << 20
    x = np.random.default_rng(18).standard_normal((2, columns)).astype(np.float32)
    assert_equals_reference(format_name, raw, tensor, x, processor, chunks=4)


def hard_rows(columns: int) -> Floats:
    """Activations at every limit: all products of one sign at ±127, single spikes, and floats that are not numbers."""
    rng = np.random.default_rng(14)
    plain = rng.standard_normal(columns).astype(np.float32)
    alternating = np.where(np.arange(columns) % 2, 1.0, -1.0).astype(np.float32)
    spike = np.zeros(columns, np.float32)
    spike[5] = 3.0
    rows = [
        np.ones(columns), -np.ones(columns), alternating, np.zeros(columns), -np.zeros(columns), spike, plain * 1e-20,
        plain * 1e-30, plain * 1e-38, plain * 1e-44, plain * 1e20, plain * 9e37, np.full(columns, 2.9e38),
        np.full(columns, 3.1e38), np.full(columns, 1e-30), np.full(columns, 1.0000001e-30), np.full(columns, 1e-45),
    ]  # fmt: skip
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        row = plain.copy()
        row[columns // 2] = bad
        rows.append(row)
    return np.array(rows, np.float32)


def extreme_weights(format_name: str, columns: int) -> Bytes:
    """One row for each kind of extreme: bytes that are all the same, scales at their limits, and rubbish."""
    rng = np.random.default_rng(15)
    rows = [
        filled_weights(format_name, 1, columns, byte, half)
        for byte in (0x00, 0xFF, 0x80, 0x7F, 0xF0, 0x0F)
        for half in (0x3C00, LARGEST_HALF, SMALLEST_HALF, 0xFBFF, 0x7C00, 0x7E00, 0x8000)
    ]
    rows.append(random_weights(rng, format_name, 5, columns, reach=3e4))
    rows.append(random_weights(rng, format_name, 5, columns, reach=1e-6))
    rubbish = rng.integers(0, 256, (8, rows[0].shape[1]), dtype=np.uint8)
    return np.concatenate([*rows, rubbish])


@pytest.mark.parametrize("format_name", FORMATS)
def test_extremes_equal_the_reference(format_name: str, processor: str) -> None:
    columns = 256 if format_name in QUANTISED_FORMATS else 77
    raw = extreme_weights(format_name, columns)
    assert_equals_reference(
        format_name, raw, packed(format_name, raw, columns), hard_rows(columns), processor, chunks=3
    )


@pytest.mark.parametrize("format_name", QUANTISED_FORMATS)
def test_the_largest_sums_of_integers_do_not_overflow(format_name: str, processor: str) -> None:
    """All weights at one end of their range and all activations at ±127: every 16-bit partial sum is as large as it gets."""
    columns, rng = 512, np.random.default_rng(16)
    raw = np.concatenate([filled_weights(format_name, 16, columns, byte, 0x3C00) for byte in (0x00, 0xFF, 0x80, 0x7F)])
    signs = rng.choice([-1.0, 1.0], (6, columns))
    x = np.concatenate([np.ones((1, columns)), -np.ones((1, columns)), signs]).astype(np.float32)
    tensor = packed(format_name, raw, columns)
    assert_equals_reference(format_name, raw, tensor, x, processor)
    exact = reference.quantise(x)[0].astype(np.int64)
    assert np.abs(exact).min() == 127


@pytest.mark.parametrize("format_name", FLOAT_FORMATS)
def test_float_weights_of_every_size_equal_the_reference(format_name: str, processor: str) -> None:
    """Subnormal, infinite and not-a-number weights, and every half there is."""
    everything = np.arange(65536, dtype=np.uint16)
    values = everything.view(np.float16).astype(np.float32).reshape(1024, 64)
    if format_name != "F16":
        values = (everything.astype(np.uint32) << 16).view(np.float32).reshape(1024, 64)
    raw = float_weights(format_name, values)
    x = np.random.default_rng(17).standard_normal((3, 64)).astype(np.float32)
    x[1] *= np.float32(1e-40)
    assert_equals_reference(format_name, raw, packed(format_name, raw, 64), x, processor, chunks=5)


def test_rows_that_nobody_looks_at_have_room_and_fill_up_tiles(processor: str) -> None:
    tiles = PROCESSORS[processor].tiles
    for rows in range(1, 70):
        computed = with_whole_tiles(rows, tiles[0])
        assert rows <= computed <= padded_to(LARGEST_TILE, rows)
        assert computed % tiles[0] in (0, *tiles[1:])
