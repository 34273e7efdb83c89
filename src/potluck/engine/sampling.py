"""Choosing a token: a pure function of logits, parameters, seed, choice, position, previous tokens and mask.

Nothing is remembered between calls and no clock or global generator is asked, so whoever holds the journal can choose the same
token again. Filters decide the set of candidates by weight (ties: lower id first); the choice walks that set in the order of ids.
The compiled loops are imported by whoever draws: a greedy choice needs none of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadRequest, WeightsMismatch
from potluck.core.exact_math import log64, uniform
from potluck.core.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
_NOTHING = np.float32(-np.inf)


class Chosen(NamedTuple):
    """A token, and where asked for its log probability and the likeliest alternatives under the model's own distribution."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: Floats, params: SamplingParams, *, choice: int = 0, position: int = 0, prompt: Sequence[int] = (),
    generated: Sequence[int] = (), mask: npt.NDArray[np.bool_] | None = None,
) -> Chosen:  # fmt: skip
    """`position` is that of the token to be chosen.

    Raises BadRequest where the mask leaves nothing, WeightsMismatch where logits are not numbers.
    """
    if np.isnan(logits).any():
        raise not_numbers()
    adjusted = adjust(logits, params, prompt, generated, mask)
    is_greedy = params.temperature == 0.0
    token = int(adjusted.argmax()) if is_greedy else _draw(adjusted, params, uniform(params.seed, choice, position))
    if adjusted[token] == _NOTHING:
        raise BadRequest("no token is allowed here")
    if params.logprobs is None:
        return Chosen(token)
    return Chosen(token, *logprobs_of(logits, token, params.logprobs))


def not_numbers() -> WeightsMismatch:
    """What arrived was looked at before: these are the machine's own weights, or its memory, and another one should do it."""
    return WeightsMismatch("computing gave values that are not numbers: this machine's copy of the weights is damaged")


def adjust(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], mask: npt.NDArray[np.bool_] | None
) -> Floats:  # fmt: skip
    """Penalties, bias and mask, in this order; the given logits are left alone."""
    is_penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not is_penalised and not params.logit_bias and mask is None:
        return logits
    logits = logits.copy()
    if params.repetition_penalty != 1.0:
        _penalise_repetition(logits, params, np.unique(np.asarray([*prompt, *generated], np.int64)))
    if generated and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        seen, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
        frequency = np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[seen] = (logits[seen] - np.float32(params.presence_penalty)) - frequency
    for token, bias in params.logit_bias.items():
        if token >= len(logits):
            raise BadRequest(f"logit_bias names token {token}; the vocabulary has {len(logits)}")
        logits[token] = logits[token] + np.float32(bias)
    if mask is not None:
        logits[~mask] = _NOTHING
    return logits


def _penalise_repetition(logits: Floats, params: SamplingParams, seen: npt.NDArray[np.int64]) -> None:
    penalty = max(np.float32(params.repetition_penalty), np.finfo(np.float32).tiny)  # 0 times -inf would be no number
    values = logits[seen]
    with np.errstate(
        divide="ignore", over="ignore", invalid="ignore"
    ):  # a penalty may be tiny, and only one side counts
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)


def _draw(logits: Floats, params: SamplingParams, chance: float) -> int:
    from potluck.engine.kernels.distribution import total_of, walk, weigh

    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1.0) / np.float32(params.temperature)
    largest = logits.max()
    if not np.isfinite(inverse) or not np.isfinite(
        largest
    ):  # 0 · ∞ and ∞ - ∞ are no weights; this is what both come near to
        return int(logits.argmax())
    weights = np.empty_like(logits)
    weigh(logits, largest, inverse, weights)
    weights = _filter(weights, params)
    return int(walk(weights, chance * total_of(weights)))


def _filter(weights: Floats, params: SamplingParams) -> Floats:
    """Zero for everything that top-k, then top-p, then min-p leave out."""
    if 0 < params.top_k < len(weights):
        weights = _keep(weights, _ranked(weights, params.top_k)[: params.top_k])
    if params.top_p < 1.0:
        weights = _keep(weights, _nucleus(weights, params.top_p))
    if params.min_p > 0.0:
        weights = np.where(weights >= np.float32(params.min_p) * weights.max(), weights, np.float32(0.0))
    return weights


def _keep(weights: Floats, tokens: npt.NDArray[np.int64]) -> Floats:
    kept = np.zeros_like(weights)
    kept[tokens] = weights[tokens]
    return kept


def _ranked(weights: Floats, count: int) -> npt.NDArray[np.int64]:
    """At least the `count` heaviest tokens, heaviest first, ties by id."""
    cutoff = np.partition(weights, len(weights) - count)[len(weights) - count]
    candidates = np.flatnonzero(weights >= cutoff)
    return candidates[np.argsort(-weights[candidates], kind="stable")]


def _nucleus(weights: Floats, top_p: float) -> npt.NDArray[np.int64]:
    """The fewest tokens, heaviest first, that together have `top_p` of the weight."""
    from potluck.engine.kernels.distribution import total_of

    goal = top_p * total_of(weights)
    for threshold in (1e-2, 1e-4, 1e-6, 0.0):  # sorting a whole vocabulary is slow and hardly ever needed
        candidates = np.flatnonzero(weights > np.float32(threshold) * weights.max())
        ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
        running = np.cumsum(weights[ranked], dtype=np.float64)  # a running sum goes in order
        enough = np.searchsorted(running, goal, side="left")
        if enough < len(ranked):
            return ranked[: enough + 1]
    return ranked


def logprobs_of(logits: Floats, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The token's log probability, and those of the `count` likeliest tokens."""
    from potluck.engine.kernels.distribution import log_total

    largest, total = log_total(logits)
    offset = float(largest) + log64(total)
    count = min(count, len(logits))
    ranked = _ranked(logits, count)[:count] if count else np.zeros(0, np.int64)
    return float(logits[token]) - offset, tuple((int(i), float(logits[i]) - offset) for i in ranked)
