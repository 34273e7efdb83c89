"""What each sampling parameter means: hand-computed cases, and a float64 reference written from the definitions alone.

Nothing here looks inside: a parameter's effect is read off the tokens that `choose` gives, over many positions where it draws.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from potluck.core.errors import BadRequest
from potluck.core.exact_math import philox, uniform
from potluck.core.sampling_params import SamplingParams
from potluck.engine.sampling import choose

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Ranks differ from ids, and the last two are tied: 1, 3, 4, 0, 2, 5 with running sums 0.40, 0.65, 0.80, 0.90, 0.95, 1.
PROBABILITIES = np.array([0.10, 0.40, 0.05, 0.25, 0.15, 0.05])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
ALL = {0, 1, 2, 3, 4, 5}
EQUAL = np.zeros(4, np.float32)
DRAWS = 3000
# Chi-square by degrees of freedom: a fair draw stays below in 999 of 1000 cases. Seeds are fixed, so no test is ever unlucky.
BOUNDS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def draw(
    logits: Floats, params: SamplingParams, *, count: int = DRAWS, generated: Sequence[int] = (), mask: Mask | None = None
) -> list[int]:  # fmt: skip
    return [choose(logits, params, position=i, generated=generated, mask=mask).token for i in range(count)]


def assert_frequencies(tokens: Sequence[int], weights: npt.ArrayLike) -> None:
    """Drawn about as often as their weights say; what weighs nothing is never drawn."""
    probabilities = np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.bincount(tokens, minlength=len(probabilities))
    is_possible = probabilities > 0
    assert not counts[~is_possible].any()
    expected = probabilities[is_possible] * len(tokens)
    distance = float(np.sum((counts[is_possible] - expected) ** 2 / expected))
    assert distance < BOUNDS[len(expected) - 1], counts


def assert_counts_as(
    value: float, logit: float, params: SamplingParams, *, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> None:
    """Token 0 with this logit stands where `value` does: it beats a rival just below that, and yields to one just above."""
    for rival, winner in ((value - 0.01, 0), (value + 0.01, 1)):
        logits = np.array([logit, rival], np.float32)
        assert choose(logits, params, prompt=prompt, generated=generated).token == winner, (rival, winner)


# ---------------------------------------------------------------- temperature


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_is_what_logits_are_divided_by(temperature: float) -> None:
    assert_frequencies(draw(LOGITS, SamplingParams(temperature=temperature)), PROBABILITIES ** (1 / temperature))


def test_without_temperature_the_likeliest_is_taken_whatever_the_seed() -> None:
    tokens = {choose(LOGITS, SamplingParams(seed=seed), position=seed, choice=seed).token for seed in range(50)}
    assert tokens == {1}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert choose(np.array([1, 3, 2, 3, 3], np.float32), SamplingParams()).token == 1
    assert choose(EQUAL, SamplingParams()).token == 0
    assert choose(EQUAL, SamplingParams(), mask=np.array([False, False, True, True])).token == 2
    tied_by_penalty = np.array([2, 4], np.float32)
    assert choose(tied_by_penalty, SamplingParams(repetition_penalty=2.0), prompt=(1,)).token == 0


def test_filters_change_nothing_about_a_greedy_choice() -> None:
    assert choose(LOGITS, SamplingParams(top_k=3, top_p=0.1, min_p=1.0)).token == 1


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("top_k", "allowed"),
    [
        (1, {1}), (2, {1, 3}), (3, {1, 3, 4}), (4, {0, 1, 3, 4}),
        (5, {0, 1, 2, 3, 4}),  # 2 and 5 are tied: the lower id stays
        (6, ALL), (1000, ALL), (0, ALL),
    ],
)  # fmt: skip
def test_top_k_leaves_the_k_likeliest_and_zero_leaves_all(top_k: int, allowed: set[int]) -> None:
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=top_k))) == allowed


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [
        (1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.64, {1, 3}), (0.66, {1, 3, 4}), (0.79, {1, 3, 4}),
        (0.81, {0, 1, 3, 4}), (0.91, {0, 1, 2, 3, 4}), (0.96, ALL), (1.0, ALL),
    ],
)  # fmt: skip
def test_top_p_leaves_the_smallest_set_that_has_p_and_at_least_one(top_p: float, allowed: set[int]) -> None:
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_p=top_p))) == allowed


@pytest.mark.parametrize(("top_p", "allowed"), [(0.25, {0}), (0.26, {0, 1}), (0.5, {0, 1}), (0.75, {0, 1, 2})])
def test_a_set_that_has_exactly_p_is_enough_and_ties_stay_by_id(top_p: float, allowed: set[int]) -> None:
    assert set(draw(EQUAL, SamplingParams(temperature=1.0, top_p=top_p))) == allowed


@pytest.mark.parametrize("others", [200, 20_000])
def test_top_p_reaches_as_far_down_as_it_must(others: int) -> None:
    # One token has half of it, the others share the rest: 0.75 takes half of them, unlikely as each one is.
    logits = np.log(np.array([0.5] + [0.5 / others] * others)).astype(np.float32)
    tokens = draw(logits, SamplingParams(temperature=1.0, top_p=0.75), count=600)
    assert 0.97 < max(tokens) / (others / 2) <= 1.01  # some 200 draws from that half come near its end, and not past it
    assert tokens.count(0) / len(tokens) == pytest.approx(2 / 3, abs=0.06)


@pytest.mark.parametrize(
    ("min_p", "allowed"),
    [  # as shares of the likeliest one's 0.40: 0.25, 1, 0.125, 0.625, 0.375, 0.125
        (0.0, ALL), (0.12, ALL), (0.13, {0, 1, 3, 4}), (0.24, {0, 1, 3, 4}), (0.26, {1, 3, 4}), (0.38, {1, 3}),
        (0.62, {1, 3}), (0.63, {1}), (1.0, {1}),
    ],
)  # fmt: skip
def test_min_p_is_a_share_of_the_likeliest_ones_probability(min_p: float, allowed: set[int]) -> None:
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, min_p=min_p))) == allowed


def test_min_p_keeps_all_that_are_as_likely_as_the_likeliest() -> None:
    assert set(draw(EQUAL, SamplingParams(temperature=1.0, min_p=1.0))) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.3),
    ],
)
def test_what_is_left_keeps_its_proportions(params: SamplingParams) -> None:
    assert_frequencies(draw(LOGITS, params), [0, 0.40, 0, 0.25, 0.15, 0])


# ---------------------------------------------------------------- penalties


@pytest.mark.parametrize(
    ("logit", "penalty", "value"),
    [(3.0, 2.0, 1.5), (-3.0, 2.0, -6.0), (3.0, 0.5, 6.0), (-3.0, 0.5, -1.5), (0.0, 2.0, 0.0), (3.0, 1.0, 3.0)],
)
@pytest.mark.parametrize(
    ("prompt", "generated"),
    [((0,), ()), ((), (0,)), ((0, 0), (0, 0, 0))],  # in either, and however often: only that it was seen counts
)
def test_repetition_divides_what_is_positive_and_multiplies_what_is_negative(
    logit: float, penalty: float, value: float, prompt: tuple[int, ...], generated: tuple[int, ...]
) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    assert_counts_as(value, logit, params, prompt=prompt, generated=generated)


@pytest.mark.parametrize(
    ("penalty", "generated", "value"),
    [(1.5, (0,), -0.5), (1.5, (0, 0, 0), -0.5), (-1.5, (0,), 2.5), (-1.5, (0, 0), 2.5), (1.5, (), 1.0)],
)
@pytest.mark.parametrize("prompt", [(), (0, 0)])  # as with OpenAI: what was sampled counts, the prompt does not
def test_presence_is_taken_off_once_of_what_was_generated(
    penalty: float, generated: tuple[int, ...], value: float, prompt: tuple[int, ...]
) -> None:
    assert_counts_as(value, 1.0, SamplingParams(presence_penalty=penalty), prompt=prompt, generated=generated)


@pytest.mark.parametrize(
    ("penalty", "generated", "value"),
    [(0.5, (0,), 0.5), (0.5, (0, 0, 0), -0.5), (-0.5, (0, 0, 0), 2.5), (0.5, (), 1.0)],
)
@pytest.mark.parametrize("prompt", [(), (0, 0)])
def test_frequency_is_taken_off_for_each_time_that_it_was_generated(
    penalty: float, generated: tuple[int, ...], value: float, prompt: tuple[int, ...]
) -> None:
    assert_counts_as(value, 1.0, SamplingParams(frequency_penalty=penalty), prompt=prompt, generated=generated)


def test_presence_and_frequency_add_up() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)
    assert_counts_as(3.0 - 1.0 - 2 * 0.25, 3.0, params, generated=(0, 0))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(presence_penalty=2.0),
        SamplingParams(frequency_penalty=2.0),
    ],
)
def test_a_token_that_was_not_seen_is_not_penalised(params: SamplingParams) -> None:
    logits = np.array([1.0, 0.9, 0.8], np.float32)
    assert choose(logits, params, prompt=(2,), generated=(2, 2)).token == 0
    assert choose(logits, params, prompt=(2,), generated=(0, 2)).token == 1


def test_penalties_come_before_the_temperature() -> None:
    params = SamplingParams(temperature=0.5, presence_penalty=1.0)
    assert_frequencies(draw(np.zeros(2, np.float32), params, generated=(0,)), [np.exp(-1.0 / 0.5), 1.0])


def test_neutral_penalties_leave_the_models_distribution_alone() -> None:
    tokens = draw(LOGITS, SamplingParams(temperature=1.0), generated=(1, 1, 3))
    assert_frequencies(tokens, PROBABILITIES)


# ---------------------------------------------------------------- bias and mask


@pytest.mark.parametrize(("bias", "value"), [(2.0, 3.0), (-2.0, -1.0), (0.25, 1.25), (100.0, 101.0), (-100.0, -99.0)])
def test_a_bias_is_added_to_the_logit(bias: float, value: float) -> None:
    assert_counts_as(value, 1.0, SamplingParams(logit_bias={0: bias}))


def test_a_bias_multiplies_the_probability() -> None:
    params = SamplingParams(temperature=1.0, logit_bias={1: float(np.log(0.5)), 2: float(np.log(4.0))})
    assert_frequencies(draw(LOGITS, params), [0.10, 0.20, 0.20, 0.25, 0.15, 0.05])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_bias_of_a_hundred_bans_a_token_or_leaves_nothing_else(temperature: float) -> None:
    banned = SamplingParams(temperature=temperature, logit_bias={1: -100.0})
    forced = SamplingParams(temperature=temperature, logit_bias={2: 100.0})
    assert set(draw(LOGITS, banned)) == ({3} if temperature == 0.0 else ALL - {1})
    assert set(draw(LOGITS, forced)) == {2}


def test_the_same_bias_for_all_is_none() -> None:
    params = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(ALL, -100.0))
    assert_frequencies(draw(LOGITS, params), PROBABILITIES)


def test_a_bias_for_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadRequest, match="token 6"):
        choose(LOGITS, SamplingParams(logit_bias={6: 1.0}))


def test_what_a_mask_leaves_keeps_its_proportions() -> None:
    mask = np.array([True, False, True, True, False, False])
    assert_frequencies(draw(LOGITS, SamplingParams(temperature=1.0), mask=mask), [0.10, 0, 0.05, 0.25, 0, 0])


# ---------------------------------------------------------------- the order of all these


def test_repetition_comes_first_then_presence_then_bias() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 3.0})
    assert_counts_as(4.0 / 2.0 - 1.0 + 3.0, 4.0, params, generated=(0,))
    # The sign that decides is the model's, not that of what the bias makes of it.
    assert_counts_as(-1.0 * 2.0 - 1.0 + 3.0, -1.0, params, generated=(0,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_bias_or_penalty_brings_back_what_the_mask_forbids(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, presence_penalty=-2.0, logit_bias={1: 100.0})
    assert 1 not in draw(LOGITS, params, generated=(1,), mask=np.arange(6) != 1)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [  # 2 makes square roots of probabilities, 0.5 squares
        (SamplingParams(temperature=2.0, top_p=0.39), {1, 3}),  # the likeliest has 0.28 of the roots, 0.40 without
        (SamplingParams(temperature=0.5, top_p=0.60), {1}),  # the likeliest has 0.62 of the squares
        (SamplingParams(temperature=2.0, min_p=0.30), ALL),  # the least likely have 0.35 of the likeliest one's root
        (SamplingParams(temperature=0.5, min_p=0.30), {1, 3}),  # 4 has 0.14 of its square; 0.375 without
    ],
)
def test_filters_come_after_the_temperature(params: SamplingParams, allowed: set[int]) -> None:
    assert set(draw(LOGITS, params)) == allowed


def test_filters_come_after_penalties_bias_and_mask() -> None:
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=1, presence_penalty=2.0), generated=(1,))) == {3}
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=1, logit_bias={2: 9.0}))) == {2}
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=1), mask=np.arange(6) != 1)) == {3}
    # Of the 0.60 that a mask leaves, 3 alone has 0.42: it takes 4 as well to have half.
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_p=0.5), mask=np.arange(6) != 1)) == {3, 4}


def test_top_k_comes_before_top_p() -> None:
    # Of the two likeliest, the first has 0.40 / 0.65 = 0.62. The other way round both would stay.
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=2, top_p=0.6))) == {1}


def test_top_p_comes_before_min_p() -> None:
    # 0.40 is less than 0.45. The other way round it would be 0.40 of the 0.80 that min-p leaves, and enough.
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_p=0.45, min_p=0.3))) == {1, 3}


def test_min_p_goes_on_where_top_k_and_top_p_left_off() -> None:
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.3))) == {1, 3, 4}
    assert set(draw(LOGITS, SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01))) == {0, 1, 3, 4}


# ---------------------------------------------------------------- all of it against a reference


def wanted_weights(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], mask: Mask
) -> Doubles:
    """What the definitions say, in float64: one token after the other, nothing clever."""
    values = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
    for token in set(generated):
        values[token] -= params.presence_penalty + params.frequency_penalty * list(generated).count(token)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    values = np.where(mask, values / params.temperature, -np.inf)
    weights = np.exp(values - values.max())
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))[: params.top_k or None]
    mass = sum(weights[token] for token in ranked)
    kept: list[int] = []
    for token in ranked:
        if params.top_p == 1.0 or sum(weights[kept]) < params.top_p * mass:
            kept.append(token)
    likely = [token for token in kept if weights[token] >= params.min_p * weights.max()]
    return np.where(np.isin(np.arange(len(weights)), likely), weights, 0.0)


def random_params(random: np.random.Generator) -> SamplingParams:
    """Each parameter is at work in about half of them."""

    def perhaps(value: float, neutral: float) -> float:
        return value if random.random() < 0.5 else neutral

    return SamplingParams(
        temperature=random.uniform(0.3, 2.0),
        top_k=int(perhaps(int(random.integers(1, 30)), 0)),
        top_p=perhaps(random.uniform(0.05, 0.99), 1.0),
        min_p=perhaps(random.uniform(0.0, 0.5), 0.0),
        repetition_penalty=perhaps(random.uniform(0.5, 2.0), 1.0),
        presence_penalty=perhaps(random.uniform(-2.0, 2.0), 0.0),
        frequency_penalty=perhaps(random.uniform(-2.0, 2.0), 0.0),
        logit_bias={int(token): random.uniform(-5.0, 5.0) for token in random.choice(40, random.integers(0, 4), False)},
        seed=int(random.integers(0, 1 << 63)),
    ).check()


@pytest.mark.parametrize("case", range(100))
def test_a_draw_walks_the_weights_of_the_definitions_in_the_order_of_ids(case: int) -> None:
    random = np.random.default_rng(case)
    logits = random.normal(0, 2, 40).astype(np.float32)
    params = random_params(random)
    prompt, generated = random.integers(0, 40, 8).tolist(), random.integers(0, 40, 12).tolist()
    mask = random.random(40) < 0.8
    running = np.cumsum(wanted_weights(logits, params, prompt, generated, mask))
    for position in range(20):
        chosen = choose(logits, params, choice=2, position=position, prompt=prompt, generated=generated, mask=mask)
        wanted = np.searchsorted(running, uniform(params.seed, 2, position) * running[-1], side="right")
        assert chosen.token == wanted


# ---------------------------------------------------------------- seed, choice and position


def test_the_same_seed_draws_the_same_whatever_was_drawn_before() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    forwards = [choose(LOGITS, params, position=position).token for position in range(200)]
    backwards = [choose(LOGITS, params, position=position).token for position in reversed(range(200))]
    assert forwards == backwards[::-1]


def test_every_seed_choice_and_position_draws_for_itself() -> None:
    def tokens(seed: int, choice: int, start: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return tuple(choose(LOGITS, params, choice=choice, position=start + i).token for i in range(100))

    seeds = [0, 1, 1 << 32, 1 << 63, (1 << 64) - 1]  # all 64 bits count
    assert len({tokens(seed, 0, 0) for seed in seeds}) == len(seeds)
    assert len({tokens(0, choice, 0) for choice in range(5)}) == 5
    assert len({tokens(0, 0, start) for start in range(5)}) == 5
    assert tokens(0, 1, 0) != tokens(0, 0, 1)  # a choice is not a position
    assert len(set(tokens(0, 0, 0))) > 1


def test_frequencies_follow_the_probabilities_over_positions_seeds_and_choices() -> None:
    assert_frequencies(draw(LOGITS, SamplingParams(temperature=1.0, seed=3), count=10_000), PROBABILITIES)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(5000)]
    assert_frequencies([choose(LOGITS, one).token for one in params], PROBABILITIES)
    assert_frequencies([choose(LOGITS, params[0], choice=i).token for i in range(5000)], PROBABILITIES)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_a_draw_tells_nothing_about_the_next_ones(distance: int) -> None:
    tokens = draw(np.zeros(2, np.float32), SamplingParams(temperature=1.0, seed=5))
    pairs = [2 * left + right for left, right in zip(tokens, tokens[distance:], strict=False)]
    assert_frequencies(pairs, np.ones(4))


# From the known answers that come with Random123 (kat_vectors, philox4x32 10): key, counter, answer; low words first.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def from_words(words: Sequence[int]) -> int:
    return sum(word << (32 * i) for i, word in enumerate(words))


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN_ANSWERS)
def test_the_generator_gives_the_published_answers(
    key: tuple[int, ...], counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert philox(from_words(key), from_words(counter)) == answer


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN_ANSWERS)
def test_the_seed_is_the_key_and_position_and_choice_are_the_counter(
    key: tuple[int, ...], counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    position, choice = from_words(counter[:2]), from_words(counter[2:])
    chance = uniform(from_words(key), choice, position)
    assert chance == (((answer[0] << 32) | answer[1]) >> 11) / 2**53  # the first 53 bits, the first word's the highest


# ---------------------------------------------------------------- log probabilities


def test_log_probabilities_are_the_models_own_whatever_was_asked_for() -> None:
    logits = np.random.default_rng(4).normal(0, 3, 200).astype(np.float32)
    truth = logits - np.log(np.sum(np.exp(logits.astype(np.float64))))
    likeliest = sorted(range(200), key=lambda token: -logits[token])[:5]
    bent = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.01, repetition_penalty=1.5, presence_penalty=1.0,
        frequency_penalty=0.5, logit_bias={likeliest[0]: -20.0, likeliest[2]: 3.0}, logprobs=5,
    )  # fmt: skip
    for params in (bent, SamplingParams(logprobs=5), SamplingParams(temperature=2.0, logprobs=5)):
        chosen = choose(logits, params, prompt=likeliest, generated=likeliest[:3], mask=np.arange(200) % 7 != 0)
        assert chosen.logprob == pytest.approx(truth[chosen.token], abs=1e-5)
        assert [token for token, _ in chosen.top] == likeliest
        assert [value for _, value in chosen.top] == pytest.approx(truth[likeliest], abs=1e-5)


def test_a_token_that_bias_forced_says_how_unlikely_it_was() -> None:
    chosen = choose(LOGITS, SamplingParams(logit_bias={2: 100.0}, logprobs=1))
    assert chosen.token == 2
    assert chosen.logprob == pytest.approx(np.log(0.05), abs=1e-6)
    assert chosen.top[0] == pytest.approx((1, np.log(0.40)), abs=1e-6)
    assert len(chosen.top) == 1


def test_log_probabilities_are_there_where_asked_for() -> None:
    nothing, own, all_of_them = (choose(LOGITS, SamplingParams(logprobs=count)) for count in (None, 0, 6))
    assert (nothing.logprob, nothing.top) == (None, ())
    assert own.logprob == pytest.approx(np.log(0.40), abs=1e-6)
    assert own.top == ()
    assert sum(np.exp(value) for _, value in all_of_them.top) == pytest.approx(1.0, abs=1e-6)


def test_the_given_logits_are_left_alone() -> None:
    logits = LOGITS.copy()
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 1.0})
    choose(logits, params, prompt=(1,), generated=(2,), mask=np.arange(6) != 3)
    assert (logits == LOGITS).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_float32_has_not_leaves_what_cannot_be_chosen(temperature: float) -> None:
    logits = np.array([1.0, 2.0, -np.inf], np.float32)
    params = SamplingParams(temperature=temperature, repetition_penalty=1e-50).check()
    assert choose(logits, params, position=1, prompt=(2,), generated=()).token != 2
