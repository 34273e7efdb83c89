"""Tiny random models of every family: logits against transformers in float32, whole and cut at every layer boundary."""

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from potluck.weights.open_model import open_checkpoint
from tests.support.family_configs import CASES
from tests.support.gguf_models import write_gguf
from tests.support.pipelines import Pipeline, Trace, pipeline_of, shard_of
from tests.support.same_bits import assert_same_bits
from tests.support.transformers_models import Floats, logits_of, random_model, relative_difference, save

LIMIT = 1e-4
TOKENS = np.random.default_rng(1).integers(3, 300, 140).tolist()  # well beyond every window of these models

GGUF_CASES = [case for case in CASES if case not in ("phi3 long", "qwen2 windows", "gemma3 stretched", "glm")]


@cache
def wanted_logits(case: str) -> Floats:
    return logits_of(random_model(case), TOKENS)


@cache
def saved_folder(case: str, root: Path) -> Path:
    return save(random_model(case), root / case.replace(" ", "-"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


def whole_trace(path: Path) -> Trace:
    with open_checkpoint(path) as checkpoint:
        pipeline = pipeline_of(checkpoint)
        trace = pipeline.run(TOKENS)
        pipeline.close()
    return trace


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, root: Path) -> None:
    wanted = wanted_logits(case)
    assert wanted.std() > 0.1  # a flat distribution would prove nothing
    assert relative_difference(whole_trace(saved_folder(case, root)).logits, wanted) <= LIMIT


@pytest.mark.parametrize("case", CASES)
def test_every_cut_gives_the_bits_of_the_whole(case: str, root: Path) -> None:
    whole = whole_trace(saved_folder(case, root))
    with open_checkpoint(saved_folder(case, root)) as checkpoint:
        for cuts in _cuts(checkpoint.facts.layer_count):
            pipeline = pipeline_of(checkpoint, cuts)
            trace = pipeline.run(TOKENS, [50, 1, 89])
            assert_same_bits(trace.hidden, whole.hidden, f"cut before {cuts}")
            assert_same_bits(trace.logits, whole.logits, f"cut before {cuts}")
            pipeline.close()


def _cuts(layer_count: int) -> list[tuple[int, ...]]:
    """Every single boundary, one cut in three, and every layer by itself."""
    boundaries = range(1, layer_count)
    pairs = list(combinations(boundaries, 2))
    return [*((boundary,) for boundary in boundaries), pairs[0], tuple(boundaries)]


@pytest.mark.parametrize("case", GGUF_CASES)
def test_the_same_model_as_gguf_gives_the_same_logits(case: str, root: Path) -> None:
    # GGUF files do not hold the query's scale; readers take it from the size of a head.
    changes = {"query_pre_attn_scalar": 16} if case.startswith(("gemma2", "gemma3")) else {}
    model = random_model(case, **changes)
    path = write_gguf(model, root / f"{case.replace(' ', '-')}.gguf")
    assert relative_difference(whole_trace(path).logits, logits_of(model, TOKENS)) <= LIMIT


def test_a_long_rope_goes_by_the_context_and_not_by_the_prompt(root: Path) -> None:
    """Known difference: below the original context transformers would rotate by the short factors, and we do not."""
    model = random_model("phi3 long")
    with open_checkpoint(saved_folder("phi3 long", root)) as checkpoint:
        engine = shard_of(checkpoint)
        short = Pipeline([engine]).run(TOKENS[:30]).logits
        assert_same_bits(short, Pipeline([engine]).run(TOKENS).logits[:30])
        engine.close()
    assert relative_difference(short, logits_of(model, TOKENS)[:30]) <= LIMIT
    assert relative_difference(short, logits_of(model, TOKENS[:30])) > LIMIT
