"""The sampling shard's memory: what it chooses depends on the history alone, also with a grammar, after cuts and new beginnings."""

import msgspec
import numpy as np
import pytest

from potluck.core.errors import BadGrammar, BadRequest
from potluck.core.grammar import Grammar
from potluck.core.sampling_params import SamplingParams
from potluck.core.tokenizer_spec import CONTROL, NORMAL, TokenizerSpec
from potluck.text.byte_characters import bytes_to_characters
from potluck.text.grammar import GrammarCompiler
from potluck.wire.messages import Sampler
from potluck.wire.prompt_scores import TokenScore, decode_scores
from potluck.worker.sampler import TokenChooser

EOS, SIZE = 256, 260
SPEC = TokenizerSpec(
    algorithm="byte_bpe",
    tokens=(*(bytes_to_characters(bytes([byte])) for byte in range(256)), "</s>"),
    kinds=(*[NORMAL] * 256, CONTROL),
    split_patterns=(r"\w+|\W",),
    eos_ids=(EOS,),
)
GRAMMARS = GrammarCompiler(SPEC, SIZE)
PROMPT = (5, 6, 7)
SAMPLER = Sampler(
    SamplingParams(temperature=1.0, seed=3), 0, len(PROMPT), PROMPT, (EOS,), 40, Grammar("regex", "[a-z]{4}-[0-9]{3}")
)


def logits_at(position: int) -> np.ndarray:
    return np.random.default_rng(position).standard_normal(SIZE).astype(np.float32)


def generate(chooser: TokenChooser, first: int, stop: int) -> list[int]:
    chosen = [chooser.choose(logits_at(position), position) for position in range(first, stop)]
    return [each.token for each in chosen if each is not None]


def test_an_answer_follows_its_grammar_to_the_end() -> None:
    tokens = generate(TokenChooser(SAMPLER, SIZE, GRAMMARS), 3, 14)
    text = bytes(token for token in tokens if token < 256).decode()
    assert text[:4].isalpha()
    assert text[4] == "-"
    assert text[5:].isdigit()
    assert tokens[8:] == [EOS] * 3


@pytest.mark.parametrize("cut", range(3, 12))
def test_a_cut_back_chooses_the_same_again(cut: int) -> None:
    expected = generate(TokenChooser(SAMPLER, SIZE, GRAMMARS), 3, 12)
    chooser = TokenChooser(SAMPLER, SIZE, GRAMMARS)
    generate(chooser, 3, 12)
    chooser.truncate(cut)
    assert generate(chooser, cut, 12) == expected[cut - 3 :]


@pytest.mark.parametrize("known", range(3, 12))
def test_another_shard_goes_on_from_the_history(known: int) -> None:
    expected = generate(TokenChooser(SAMPLER, SIZE, GRAMMARS), 3, 12)
    sampler = msgspec.structs.replace(SAMPLER, history=(*PROMPT, *expected[: known - 3]))
    assert generate(TokenChooser(sampler, SIZE, GrammarCompiler(SPEC, SIZE)), known, 12) == expected[known - 3 :]


def test_a_grammar_that_cannot_be_followed_is_refused_at_once() -> None:
    with pytest.raises(BadGrammar, match="no tokenizer"):
        TokenChooser(SAMPLER, SIZE, None)
    with pytest.raises(BadGrammar, match="unclosed"):
        TokenChooser(msgspec.structs.replace(SAMPLER, grammar=Grammar("regex", "(")), SIZE, GRAMMARS)
    with pytest.raises(BadGrammar, match="cannot be followed"):
        TokenChooser(msgspec.structs.replace(SAMPLER, history=(*PROMPT, ord("9"))), SIZE, GRAMMARS)


@pytest.mark.parametrize(("position", "count", "tokens"), [(0, 1, [6]), (0, 3, [6, 7]), (1, 1, [7]), (2, 1, [])])
def test_a_step_scores_the_prompts_tokens_after_its_positions(position: int, count: int, tokens: list[int]) -> None:
    chooser = TokenChooser(msgspec.structs.replace(SAMPLER, prompt_logprobs=0), SIZE, GRAMMARS)

    def scored(following: object, top: int) -> list[TokenScore]:
        assert (following, top) == (tokens, 0)
        return [TokenScore(-1.0, False) for _ in tokens]

    assert len(decode_scores(chooser.score(position, count, scored), len(tokens), 0, SIZE)) == len(tokens)


def test_scores_that_were_not_asked_for_are_not_made() -> None:
    with pytest.raises(BadRequest, match="no scores"):
        TokenChooser(SAMPLER, SIZE, GRAMMARS).score(0, 1, lambda tokens, top: [])


def test_a_bias_for_a_token_that_does_not_exist_is_refused_at_the_opening() -> None:
    params = msgspec.structs.replace(SAMPLER.params, logit_bias={SIZE: 1.0})
    with pytest.raises(BadRequest, match="logit_bias"):
        TokenChooser(msgspec.structs.replace(SAMPLER, params=params), SIZE, GRAMMARS)
