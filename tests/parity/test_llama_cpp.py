"""SmolLM2 beside llama.cpp on the same file: greedy text, and perplexity of a fixed text beside float32 as well."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from potluck.core.layers import LayerRange
from potluck.engine.cpu_engine import CpuEngine, EngineSettings, Step
from potluck.text.tokenizer import Tokenizer
from potluck.weights.checkpoint import Checkpoint
from potluck.weights.open_model import open_checkpoint
from tests.support import english_text
from tests.support.english_text import Float32Reference, perplexity, windows_of
from tests.support.llama_cpp import Generated, LlamaCpp

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))
LENGTH = 64
NEAR_TIE = 0.5
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is a potluck dinner?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nGive me three reasons to learn how to swim.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at a lower temperature on a mountain because",
    "1, 2, 3, 5, 8, 13,",
    "SELECT name, price FROM",
]


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(smollm2_path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[CpuEngine]:
    layers = LayerRange(0, checkpoint.facts.layer_count)
    engine = CpuEngine(checkpoint, EngineSettings(layers=layers, threads=2))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def llama_cpp(smollm2_path: Path) -> LlamaCpp:
    return LlamaCpp(smollm2_path)


@pytest.fixture(scope="module")
def windows(checkpoint: Checkpoint) -> list[list[int]]:
    return windows_of(checkpoint)


# ---------------------------------------------------------------- greedy text


@pytest.fixture(scope="module")
def continuations(checkpoint: Checkpoint, llama_cpp: LlamaCpp) -> dict[str, tuple[list[int], list[Generated]]]:
    """For every prompt its token ids and how llama.cpp goes on."""
    tokenizer = Tokenizer(checkpoint.tokenizer)
    prompts = {text: tokenizer.encode(text, parse_special=True) for text in PROMPTS}
    return {text: (prompt, llama_cpp.greedy(prompt, LENGTH)) for text, prompt in prompts.items()}


def greedy(engine: CpuEngine, prompt: list[int]) -> list[tuple[int, np.ndarray]]:
    """Tokens with the logits that they were chosen from; ties go to the lowest id."""
    session, given, chosen = engine.open(len(prompt) + LENGTH), prompt, []
    for _ in range(LENGTH):
        [result] = engine.forward([Step(session, engine.length(session), tokens=given, logits=[len(given) - 1])])
        token = int(np.argmax(result.logits[0]))
        chosen.append((token, result.logits[0]))
        given = [token]
    engine.close_session(session)
    return chosen


def assert_near_tie(ours: int, logits: np.ndarray, theirs: Generated) -> None:
    """Both engines have both tokens among their three likeliest, and hardly prefer one to the other."""
    assert theirs.token in np.argsort(logits)[-3:]
    assert logits[ours] - logits[theirs.token] < NEAR_TIE
    likeliest = {candidate.token: candidate.log_probability for candidate in theirs.likeliest}
    assert ours in likeliest
    assert likeliest[theirs.token] - likeliest[ours] < NEAR_TIE


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_text_differs_only_after_a_near_tie(
    text: str, continuations: dict[str, tuple[list[int], list[Generated]]], engine: CpuEngine
) -> None:
    prompt, continuation = continuations[text]
    for (token, logits), theirs in zip(greedy(engine, prompt), continuation, strict=True):
        if token != theirs.token:
            assert_near_tie(token, logits, theirs)
            return


@pytest.mark.parametrize("text", PROMPTS)
def test_every_token_that_llama_cpp_chooses_is_ours_or_nearly(
    text: str, continuations: dict[str, tuple[list[int], list[Generated]]], engine: CpuEngine
) -> None:
    """Along its own text, not only up to the first difference."""
    prompt, theirs = continuations[text]
    tokens = prompt + [one.token for one in theirs[:-1]]
    session = engine.open(len(tokens))
    [result] = engine.forward([Step(session, 0, tokens=tokens, logits=range(len(prompt) - 1, len(tokens)))])
    engine.close_session(session)
    for logits, one in zip(result.logits, theirs, strict=True):
        ours = int(np.argmax(logits))
        if ours != one.token:
            assert_near_tie(ours, logits, one)


# ---------------------------------------------------------------- perplexity


@pytest.fixture(scope="module")
def our_log_probabilities(engine: CpuEngine, windows: list[list[int]]) -> list[np.ndarray]:
    return [english_text.by_engine(engine, window) for window in windows]


def test_perplexity_is_that_of_float32_and_of_llama_cpp(our_log_probabilities: list[np.ndarray]) -> None:
    """Over 2,555 tokens, beside what others measured once; the next two tests measure anew."""
    others, ours = english_text.measured(), np.concatenate(our_log_probabilities)
    reference, llama_cpp = perplexity(others.reference, len(ours)), perplexity(others.llama_cpp, len(ours))
    print(f"perplexity: float32 {reference:.3f}, llama.cpp {llama_cpp:.3f}, ours {perplexity(ours):.3f}")
    assert len(ours) > 2500
    assert perplexity(ours) == pytest.approx(reference, rel=0.005)
    assert perplexity(ours) == pytest.approx(llama_cpp, rel=0.003)


MEASURED_ANEW = 5 if IS_LONG else 1


def test_the_float32_reference_is_what_was_measured(
    smollm2_path: Path, windows: list[list[int]], our_log_probabilities: list[np.ndarray]
) -> None:
    reference = Float32Reference(smollm2_path)
    anew = [reference.log_probabilities(window) for window in windows[:MEASURED_ANEW]]
    for place, theirs in enumerate(anew):
        assert theirs.sum() == pytest.approx(english_text.measured().reference[place], rel=1e-4)
        assert root_mean_square(our_log_probabilities[place] - theirs) < 0.12
    if IS_LONG:
        assert_same_perplexity(our_log_probabilities, anew, 0.005)


def test_llama_cpp_is_what_was_measured(
    llama_cpp: LlamaCpp, windows: list[list[int]], our_log_probabilities: list[np.ndarray]
) -> None:
    """Its bits depend on the processor, its perplexity hardly."""
    count = len(windows[0]) if IS_LONG else 256
    anew = [np.array(llama_cpp.log_probabilities(window[:count])) for window in windows[:MEASURED_ANEW]]
    for place, theirs in enumerate(anew):
        assert root_mean_square(our_log_probabilities[place][: count - 1] - theirs) < 0.12
        if IS_LONG:
            assert theirs.sum() == pytest.approx(english_text.measured().llama_cpp[place], rel=2e-3)
    if IS_LONG:
        assert_same_perplexity(our_log_probabilities, anew, 0.003)


def assert_same_perplexity(ours: list[np.ndarray], theirs: list[np.ndarray], share: float) -> None:
    """Of the whole text, both measured now."""
    assert len(ours) == len(theirs) == MEASURED_ANEW
    assert perplexity(np.concatenate(ours)) == pytest.approx(perplexity(np.concatenate(theirs)), rel=share)


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))
