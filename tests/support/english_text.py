"""Perplexity of a fixed English text (english.txt, written for this purpose) in windows, and what others measured on it."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from potluck.engine.cpu_engine import CpuEngine, Step
from potluck.text.tokenizer import Tokenizer
from potluck.weights.checkpoint import Checkpoint
from tests.support.dequantised_llama import load_dequantised
from tests.support.llama_cpp import LlamaCpp

Doubles = npt.NDArray[np.float64]

TEXT = Path(__file__).with_name("english.txt")
MEASURED = Path(__file__).with_name("english_measured.json")
WINDOW = 512


class Measured(NamedTuple):
    """Log-probabilities that others gave each window, summed over its tokens but the first."""

    reference: list[float]
    llama_cpp: list[float]


def windows_of(checkpoint: Checkpoint) -> list[list[int]]:
    assert checkpoint.tokenizer is not None
    tokens = Tokenizer(checkpoint.tokenizer).encode(TEXT.read_text(encoding="utf-8"), parse_special=False)
    return [tokens[first : first + WINDOW] for first in range(0, len(tokens) - WINDOW + 1, WINDOW)]


def measured() -> Measured:
    return Measured(**json.loads(MEASURED.read_text()))


def perplexity(log_probabilities: Doubles | list[float], count: int | None = None) -> float:
    return float(np.exp(-np.sum(log_probabilities) / (count or len(log_probabilities))))


def _of_tokens(logits: npt.NDArray[np.float32], tokens: list[int]) -> Doubles:
    """Log-probabilities of tokens[1:], from the logits of those before them."""
    rows = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    return rows[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()


def by_engine(engine: CpuEngine, tokens: list[int]) -> Doubles:
    session = engine.open(len(tokens))
    [result] = engine.forward([Step(session, 0, tokens=tokens[:-1], logits=range(len(tokens) - 1))])
    engine.close_session(session)
    assert result.logits is not None
    return _of_tokens(result.logits, tokens)


class Float32Reference:
    def __init__(self, path: Path) -> None:
        self._model = load_dequantised(path)

    def log_probabilities(self, tokens: list[int]) -> Doubles:
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
        return _of_tokens(logits.numpy(), tokens)


def measure(path: Path, checkpoint: Checkpoint) -> Measured:
    """Takes minutes; run it where the text or the model changes, and put what it gives into english_measured.json."""
    windows, reference, llama_cpp = windows_of(checkpoint), Float32Reference(path), LlamaCpp(path)
    return Measured(
        [float(reference.log_probabilities(window).sum()) for window in windows],
        [float(np.sum(llama_cpp.log_probabilities(window))) for window in windows],
    )
