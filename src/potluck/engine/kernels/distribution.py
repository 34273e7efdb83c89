"""Loops over a vocabulary's logits: weights and their sums, in the order of token ids."""

from typing import Any

import numpy as np
from numba import njit

from potluck.engine.kernels.functions import exp

_COMPILED: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}


@njit(**_COMPILED)
def weigh(logits, maximum, inverse_temperature, weights):
    """weights = exp((logit - maximum) · inverse temperature), all float32; 0 where the logit is -inf."""
    for i in range(len(logits)):
        x = (logits[i] - maximum) * inverse_temperature
        weights[i] = exp(x) if x > np.float32(-80.0) else np.float32(0.0)


@njit(**_COMPILED)
def total_of(weights):
    """Float64 sum, in order."""
    total = 0.0
    for i in range(len(weights)):
        total += np.float64(weights[i])
    return total


@njit(**_COMPILED)
def walk(weights, goal):
    """The first index at which the running float64 sum exceeds `goal`; the last one with weight if none does."""
    total = 0.0
    last = -1
    for i in range(len(weights)):
        if weights[i] > np.float32(0.0):
            last = i
            total += np.float64(weights[i])
            if total > goal:
                return i
    return last


@njit(**_COMPILED)
def log_total(logits):
    """The largest logit and the float64 sum of exp(logit - largest), in order."""
    largest = logits[0]
    for i in range(len(logits)):
        largest = logits[i] if logits[i] > largest else largest
    total = 0.0
    for i in range(len(logits)):
        total += np.float64(exp(logits[i] - largest))
    return largest, total
