"""The plain readers of every format against the `gguf` package, which nobody here wrote."""

import gguf
import numpy as np
import pytest

from potluck.engine.formats import READERS, as_blocks, dequantise_rows, to_float32
from potluck.engine.shard_weights import Embedding
from tests.support.memory_checkpoint import random_checkpoint
from tests.support.random_models import MIXES, facts_of
from tests.support.random_weights import (
    FORMATS,
    LARGEST_HALF,
    MINUS_ZERO_HALF,
    QUANTISED_FORMATS,
    SMALLEST_HALF,
    Bytes,
    filled_weights,
    float_weights,
    random_weights,
)
from tests.support.same_bits import assert_same_bits


def theirs(raw: Bytes, format_name: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format_name])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (33, 1024)])
def test_random_rows_read_as_gguf_reads_them(format_name: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(list(shape))
    for reach in (1e-3, 0.2, 30.0):
        raw = random_weights(rng, format_name, *shape, reach)
        assert_same_bits(dequantise_rows(raw, format_name, shape[0]), theirs(raw, format_name), format_name)


@pytest.mark.parametrize("format_name", FORMATS)
def test_rubbish_bytes_read_as_gguf_reads_them(format_name: str) -> None:
    """Any half may come up: infinite, subnormal or not a number."""
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, filled_weights(format_name, 64, 2048, 0).shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        assert_same_bits(dequantise_rows(raw, format_name, 64), theirs(raw, format_name), format_name)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("half_bits", [None, LARGEST_HALF, SMALLEST_HALF, MINUS_ZERO_HALF, 0xFBFF, 0x7C00])
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x0F, 0xF0])
def test_extremes_read_as_gguf_reads_them(format_name: str, half_bits: int | None, byte: int) -> None:
    raw = filled_weights(format_name, 3, 512, byte, half_bits)
    with np.errstate(all="ignore"):
        assert_same_bits(dequantise_rows(raw, format_name, 3), theirs(raw, format_name), format_name)


@pytest.mark.parametrize(
    ("format_name", "lowest", "highest"),
    [
        ("Q4_0", -8, 7), ("Q4_1", 0, 15), ("Q5_0", -16, 15), ("Q5_1", 0, 31), ("Q8_0", -128, 127), ("Q4_K", 0, 15),
        ("Q5_K", 0, 31), ("Q6_K", -32, 31),
    ],
)  # fmt: skip
def test_integers_reach_both_ends_of_their_range(format_name: str, lowest: int, highest: int) -> None:
    raw = np.random.default_rng(1).integers(0, 256, filled_weights(format_name, 64, 1024, 0).shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        integers = READERS[format_name](as_blocks(raw, format_name, 64)).integers
    assert (integers.min(), integers.max()) == (lowest, highest)
    assert integers.shape == (64, 32, 32)


@pytest.mark.parametrize("format_name", QUANTISED_FORMATS)
def test_a_buffer_reads_as_an_array_does(format_name: str) -> None:
    raw = random_weights(np.random.default_rng(2), format_name, 5, 256)
    assert_same_bits(dequantise_rows(memoryview(raw.tobytes()), format_name, 5), dequantise_rows(raw, format_name, 5))


def test_every_half_and_every_brain_float_becomes_the_float_it_names() -> None:
    everything = np.arange(65536, dtype=np.uint16)
    assert_same_bits(to_float32(everything.view(np.uint8), "F16"), everything.view(np.float16).astype(np.float32))
    brain = to_float32(everything.view(np.uint8), "BF16")
    assert np.array_equal(brain.view(np.uint32), everything.astype(np.uint32) << 16)
    assert np.array_equal(float_weights("BF16", brain).view(np.uint16), everything)


def test_a_quantised_format_is_no_plain_float() -> None:
    with pytest.raises(ValueError, match="quantised"):
        to_float32(bytes(18), "Q4_0")


@pytest.mark.parametrize("mix", ["Q4_1", "mixed", "F16"])  # embeddings of Q8_0, Q4_1 and F16
def test_one_embedding_row_reads_as_it_does_among_others(mix: str) -> None:
    embedding = Embedding(random_checkpoint(facts_of(vocabulary_size=50), MIXES[mix]))
    together = embedding.look_up([3, 7, 49])
    for row, token in zip(together, (3, 7, 49), strict=True):
        assert_same_bits(embedding.look_up([token])[0], row)
