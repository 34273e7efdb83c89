"""Choosing with a mask, and log probabilities: exact, in a stated order, of the model's own distribution."""

import math

import numpy as np
import pytest

from potluck.core.errors import BadRequest
from potluck.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from potluck.engine.sampling import choose, logprobs_of

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 3.0], np.float32)


def mask_of(*tokens: int) -> np.ndarray:
    mask = np.zeros(len(LOGITS), np.bool_)
    mask[list(tokens)] = True
    return mask


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_leaves_only_what_it_allows(temperature: float) -> None:
    for seed in range(50):
        params = SamplingParams(temperature=temperature, seed=seed)
        assert choose(LOGITS, params, mask=mask_of(0, 4)).token in (0, 4)
    assert choose(LOGITS, SamplingParams(), mask=mask_of(4)).token == 4
    with pytest.raises(BadRequest, match="no token is allowed"):
        choose(LOGITS, SamplingParams(), mask=mask_of())


def test_log_probabilities_are_the_models_own_whatever_was_allowed() -> None:
    free = choose(LOGITS, SamplingParams(logprobs=2))
    held = choose(LOGITS, SamplingParams(logprobs=2), mask=mask_of(4))
    assert held.top == free.top
    total = sum(math.exp(value) for value in LOGITS.tolist())
    assert held.logprob == pytest.approx(math.log(math.exp(-1.0) / total), abs=1e-6)


@pytest.mark.parametrize("count", range(7))
def test_alternatives_come_likeliest_first_and_ties_by_id(count: int) -> None:
    logprob, top = logprobs_of(LOGITS, 3, min(count, len(LOGITS)))
    assert [token for token, _ in top] == [1, 3, 5, 2, 0, 4][:count]
    assert all(value == logprob for token, value in top if token in (1, 3, 5))


def test_as_many_alternatives_as_clients_may_ask_for() -> None:
    logits = np.random.default_rng(1).integers(-3, 3, 5000).astype(np.float32)  # ties everywhere
    chosen = choose(logits, SamplingParams(logprobs=MAX_TOP_LOGPROBS))
    order = sorted(range(5000), key=lambda token: (-logits[token], token))[:MAX_TOP_LOGPROBS]
    assert [token for token, _ in chosen.top] == order
    assert chosen.token == order[0]


TINY = (1e-6, 1e-38, 2.9e-39, 1e-40, 1e-45, 5e-324)


@pytest.mark.parametrize("temperature", [*TINY, 1.0, 100.0])
@pytest.mark.parametrize("repetition_penalty", [*TINY, 1.0, 100.0])
def test_whatever_a_request_may_ask_for_a_token_is_chosen(temperature: float, repetition_penalty: float) -> None:
    for logits in (LOGITS, LOGITS * np.float32(1e38), np.zeros(6, np.float32), -np.abs(LOGITS)):
        for seen in ((), (2,), range(6)):
            params = SamplingParams(temperature=temperature, repetition_penalty=repetition_penalty, logprobs=2).check()
            chosen = choose(logits, params, prompt=seen, generated=seen)
            assert 0 <= chosen.token < len(logits)
            assert chosen.logprob is not None
            assert not math.isnan(chosen.logprob)


@pytest.mark.parametrize("temperature", TINY)
def test_a_temperature_next_to_nothing_is_as_good_as_none(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    assert {choose(logits, SamplingParams(temperature=temperature, seed=seed)).token for seed in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e-40, 1.0])
def test_where_a_mask_leaves_nothing_nothing_is_drawn(temperature: float) -> None:
    with pytest.raises(BadRequest, match="no token is allowed"):
        choose(LOGITS, SamplingParams(temperature=temperature), mask=mask_of())
