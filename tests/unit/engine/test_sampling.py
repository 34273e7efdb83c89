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
