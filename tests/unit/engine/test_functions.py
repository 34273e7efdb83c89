"""Functions between the products: compiled = numpy reference bit for bit, and both close to the true values."""

import math
import os

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from potluck.core.exact_math import log64
from potluck.core.model_facts import Rotary, RotaryScaling
from potluck.engine import reference
from potluck.engine.rotary import RotaryTable, exp64, frequencies_of, sin_cos64
from tests.support.compiled_functions import COMPILED, exp_in_lanes, exp_in_loops, half_conversions, normalise
from tests.support.kernel_calls import RUNNABLE, activations_of
from tests.support.same_bits import assert_same_bits

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
IS_LONG = bool(os.environ.get("POTLUCK_LONG"))
COUNT = 1 << (24 if IS_LONG else 21)


def floats_of_all_kinds(count: int, seed: int) -> Floats:
    """Random bit patterns: every exponent, subnormals, infinities and not-a-numbers come up."""
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def special_floats() -> Floats:
    near = [-87.0, 88.0, -88.0, 87.0, 0.0, -0.0, 1.0, -1.0, math.log(2) / 2, -math.log(2) / 2, 20.0, 44.0]
    values = np.array([*near, np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.17e-38], np.float32)
    return np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))])


def all_kinds() -> Floats:
    """Over the range that matters, over all bit patterns, and at the special places."""
    dense = np.random.default_rng(1).uniform(-100, 100, COUNT).astype(np.float32)
    return np.concatenate([dense, floats_of_all_kinds(COUNT, 2), special_floats()])


def relative_error(values: Floats, truth: Doubles) -> float:
    return float(np.max(np.abs(values.astype(np.float64) - truth) / np.abs(truth)))


# ---------------------------------------------------------------- exp and what follows from it


def test_exp_in_loops_and_in_lanes_equals_the_reference() -> None:
    x = all_kinds()
    with np.errstate(all="ignore"):
        wanted = reference.exp(x)
    assert_same_bits(exp_in_loops(x), wanted, "loops")
    assert_same_bits(exp_in_lanes(x), wanted, "lanes")


def test_exp_is_accurate() -> None:
    x = np.random.default_rng(3).uniform(-87, 88, COUNT).astype(np.float32)
    assert relative_error(reference.exp(x), np.exp(x.astype(np.float64))) <= 4e-7


def test_exp_clamps_and_keeps_what_is_not_a_number() -> None:
    lowest, highest = reference.exp(np.array([-87, 88], np.float32))
    low = reference.exp(np.array([-87.0001, -1e9, -np.inf], np.float32))
    high = reference.exp(np.array([88.0001, 1e9, np.inf], np.float32))
    assert (low == lowest).all()
    assert lowest >= np.finfo(np.float32).tiny  # never subnormal
    assert (high == highest).all()
    assert np.isfinite(highest)
    assert np.isnan(exp_in_loops(np.array([np.nan], np.float32))).all()
    assert (reference.exp(np.zeros(2, np.float32)) == 1.0).all()


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_activation_functions_equal_the_reference(name: str) -> None:
    x = all_kinds()
    with np.errstate(all="ignore"):
        assert_same_bits(COMPILED[name](x), getattr(reference, name)(x), name)


TRUTHS = {
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_activation_functions_are_accurate(name: str) -> None:
    x = np.random.default_rng(4).uniform(-30, 30, COUNT).astype(np.float32)
    error = np.abs(getattr(reference, name)(x).astype(np.float64) - TRUTHS[name](x.astype(np.float64)))
    assert np.max(error / np.maximum(1.0, np.abs(x))) <= 5e-7


# ---------------------------------------------------------------- norms and rounding to int8


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 32, 33, 64, 576, 1000])
def test_rms_norm_equals_the_reference_and_is_accurate(columns: int) -> None:
    rng = np.random.default_rng(columns)
    weight = rng.uniform(-2, 2, columns).astype(np.float32)
    x = rng.standard_normal((40, columns)).astype(np.float32)
    assert_same_bits(normalise(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    exact = x.astype(np.float64)
    truth = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.max(np.abs(normalise(x, weight, 1e-5) - truth) / np.abs(truth)) <= 1e-6


def test_rms_norm_of_extremes_equals_the_reference() -> None:
    rng = np.random.default_rng(5)
    plain = rng.standard_normal(70).astype(np.float32)
    scales = [0.0, -0.0, 1e-45, 1e-38, 1e-20, 1e18, 1e19, 1e38, np.inf, np.nan]
    with np.errstate(all="ignore"):
        x = np.array([plain * np.float32(scale) for scale in scales], np.float32)
        x = np.concatenate([x, floats_of_all_kinds(70 * 50, 6).reshape(50, 70)])
        for epsilon in (1e-5, 1e-6, 1e-12):
            assert_same_bits(normalise(x, plain, epsilon), reference.rms_norm(x, plain, epsilon), f"{epsilon}")


def rows_to_round() -> Floats:
    rng = np.random.default_rng(7)
    plain = rng.standard_normal((200, 96))
    scales = 10.0 ** rng.uniform(-44, 38, (200, 1))
    halves = rng.integers(-254, 255, (50, 96)) / 2.0  # ties, once the largest is 127
    halves[:, ::32] = 127.0
    with np.errstate(all="ignore"):
        bad = floats_of_all_kinds(100 * 96, 8).reshape(100, 96)
        edges = np.array([[1e-30] * 96, [3e38] * 96, [1e-45] * 96, [0.0] * 96, [-0.0] * 96], np.float32)
        edges = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(0))])
        return np.concatenate([(plain * scales).astype(np.float32), halves.astype(np.float32), bad, edges])


def test_rounding_to_int8_equals_the_reference() -> None:
    x = rows_to_round()
    got = activations_of(x, is_quantised=True)
    with np.errstate(all="ignore"):
        integers, d, s = reference.quantise(x)
    assert np.array_equal(got.q[: len(x)].reshape(integers.shape), integers)
    assert_same_bits(got.d[: len(x)], d, "scale")
    assert_same_bits(got.s[: len(x)], s, "scale times sum")
    assert np.array_equal(got.sums[: len(x)], integers.reshape(*integers.shape[:2], 2, 16).sum(axis=-1))


def test_rounding_to_int8_is_to_nearest_and_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49, -126.5]
    integers, d, _ = reference.quantise(x)
    assert d[0, 0] == 1.0
    assert integers[0, 0, :9].tolist() == [127, 0, 2, 2, 0, -2, -2, 3, -126]
    random = np.random.default_rng(9).standard_normal((50, 320)).astype(np.float32)
    integers, d, _ = reference.quantise(random)
    error = np.abs(integers * d[..., None].astype(np.float64) - random.reshape(integers.shape))
    assert (error <= 0.50001 * d[..., None]).all()
    assert np.abs(integers).max() == 127


# ---------------------------------------------------------------- fp16


@pytest.mark.parametrize("processor", RUNNABLE)
def test_every_half_becomes_the_float_it_names(processor: str) -> None:
    everything = np.arange(65536, dtype=np.uint16).view(np.float16)
    _, to_float = half_conversions(processor)
    assert_same_bits(to_float(everything), everything.astype(np.float32), processor)


@pytest.mark.parametrize("processor", RUNNABLE)
def test_floats_round_to_halves_as_numpy_rounds_them(processor: str) -> None:
    """Halves, the middles between them and their neighbours, and floats of every size, clamped as the cache clamps them."""
    to_half, _ = half_conversions(processor)
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (finite[1:] + finite[:-1]) / np.float32(2)
    exact = np.concatenate([finite, middles])
    exact = np.concatenate([exact, np.nextafter(exact, np.float32(1e9)), np.nextafter(exact, np.float32(-1e9))])
    sizes = 10.0 ** np.random.default_rng(10).uniform(-10, 5, COUNT)
    x = np.concatenate([exact, -exact, sizes.astype(np.float32), floats_of_all_kinds(COUNT, 11), special_floats()])
    x = np.clip(x[: len(x) // 16 * 16], np.float32(-65504), np.float32(65504))
    assert_same_bits(to_half(x), x.astype(np.float16), processor)


# ---------------------------------------------------------------- float64, for the rotary tables


def exact_values(function: object, x: Doubles) -> list[mpmath.mpf]:
    with mpmath.workprec(200):
        return [function(mpmath.mpf(float(value))) for value in x]  # type: ignore[operator]


def largest_error(values: Doubles, truth: list[mpmath.mpf], *, relative: bool) -> float:
    with mpmath.workprec(200):
        errors = [
            abs(mpmath.mpf(float(v)) - t) / (abs(t) if relative else 1) for v, t in zip(values, truth, strict=True)
        ]
        return float(max(errors))


def test_sine_and_cosine_are_right_to_float64() -> None:
    rng = np.random.default_rng(12)
    multiples = np.arange(1, 60) * (math.pi / 2)
    x = np.concatenate([[0.0, 1e-300, 1e-9], rng.uniform(0, 10, 300), 2.0 ** rng.uniform(0, 20, 600), multiples])
    sine, cosine = sin_cos64(x)
    assert largest_error(sine, exact_values(mpmath.sin, x), relative=False) <= 2.5e-16
    assert largest_error(cosine, exact_values(mpmath.cos, x), relative=False) <= 2.5e-16


def test_sine_and_cosine_keep_float32_accuracy_over_the_longest_context() -> None:
    """Contexts reach 2**24 positions, and the first pair turns by one radian a position."""
    x = np.floor(2.0 ** np.random.default_rng(13).uniform(20, 24, 400))
    sine, cosine = sin_cos64(x)
    assert largest_error(sine, exact_values(mpmath.sin, x), relative=False) <= 3e-8
    assert largest_error(cosine, exact_values(mpmath.cos, x), relative=False) <= 3e-8


def test_exponential_and_logarithm_are_right_to_float64() -> None:
    rng = np.random.default_rng(14)
    x = np.concatenate([rng.uniform(-30, 30, 400), [0.0, -27.631, 1.0]])
    assert largest_error(exp64(x), exact_values(mpmath.exp, x), relative=True) <= 1e-15
    y = np.concatenate([10.0 ** rng.uniform(-300, 300, 400), [1e4, 5e5, 1e6, 2.0, 0.5, 1e12]])
    logs = np.array([log64(float(value)) for value in y])
    assert largest_error(logs, exact_values(mpmath.log, y), relative=True) <= 5e-16
    assert log64(1.0) == 0.0


@pytest.mark.parametrize("base", [10_000.0, 100_000.0, 500_000.0, 1e6, 1e12])
@pytest.mark.parametrize("dimensions", [2, 8, 64, 96, 128, 256])
def test_plain_frequencies_are_the_correctly_rounded_ones(base: float, dimensions: int) -> None:
    with mpmath.workprec(200):
        truth = [float(mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / dimensions)) for i in range(dimensions // 2)]
    assert_same_bits(frequencies_of(Rotary("halves", base, dimensions)), np.array(truth).astype(np.float32))


def test_tables_hold_cosine_and_sine_of_float32_angles() -> None:
    rotary = Rotary("halves", 100_000.0, 64)
    table = RotaryTable(rotary)
    table.grow(3000)
    assert table.length >= 3000
    angles = (np.arange(table.length, dtype=np.float32)[:, None] * frequencies_of(rotary)[None]).astype(np.float64)
    assert np.abs(table.cos - np.cos(angles)).max() <= 2.0**-24
    assert np.abs(table.sin - np.sin(angles)).max() <= 2.0**-24


def test_tables_are_the_same_however_they_grew() -> None:
    rotary = Rotary("halves", 10_000.0, 32, RotaryScaling("linear", 4.0, magnitude=1.1))
    at_once, in_steps = RotaryTable(rotary), RotaryTable(rotary)
    assert at_once.grow(5000)
    for length in (1, 1, 1024, 1025, 2900, 5000):
        in_steps.grow(length)
    assert not in_steps.grow(4096)
    assert_same_bits(at_once.cos[:5000], in_steps.cos[:5000])
    assert_same_bits(at_once.sin[:5000], in_steps.sin[:5000])


def test_scaled_frequencies_follow_their_definitions() -> None:
    plain = frequencies_of(Rotary("halves", 10_000.0, 64)).astype(np.float64)
    linear = frequencies_of(Rotary("halves", 10_000.0, 64, RotaryScaling("linear", 4.0)))
    assert np.allclose(linear, plain / 4, rtol=1e-7)
    factors = tuple(float(f) for f in np.linspace(1, 9, 32))
    own = frequencies_of(Rotary("halves", 10_000.0, 64, RotaryScaling("factors", factors=factors)))
    assert np.allclose(own, plain / np.array(factors), rtol=1e-7)
    scaling = RotaryScaling("llama3", 8.0, original_context=8192)
    llama3 = frequencies_of(Rotary("halves", 500_000.0, 128, scaling))
    before = frequencies_of(Rotary("halves", 500_000.0, 128)).astype(np.float64)
    wavelengths = 2 * math.pi / before
    assert np.allclose(llama3[wavelengths < 2048], before[wavelengths < 2048], rtol=1e-7)
    assert np.allclose(llama3[wavelengths > 8192], before[wavelengths > 8192] / 8, rtol=1e-7)
    assert (np.diff(llama3) < 0).all()
