"""Token ids against llama.cpp's own, on SmolLM2 and on tiny vocabularies of the other kinds."""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import xllamacpp

from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from potluck.text.tokenizer import Tokenizer
from potluck.weights.open_model import open_checkpoint
from tests.support.varied_text import varied_strings
from tests.support.vocabularies import (
    LLAMA3_REGEX,
    byte_level,
    isolated,
    merges_of,
    sentencepiece_like,
    tokens_by_id,
    write_gguf,
)

Reference = Callable[[str, bool, bool], list[int]]


@contextmanager
def llama_cpp(path: Path) -> Iterator[Reference]:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 64
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)

    def tokenize(text: str, parse_special: bool, add_special: bool) -> list[int]:
        body = json.dumps({"content": text, "parse_special": parse_special, "add_special": add_special})
        connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        ids: list[int] = json.loads(connection.getresponse().read())["tokens"]
        return ids

    yield tokenize
    connection.close()
    del server


def assert_identical(path: Path, count: int, seed: int) -> None:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tokenizer is not None
        tokenizer = Tokenizer(checkpoint.tokenizer)
    with llama_cpp(path) as reference:
        for number, text in enumerate(varied_strings(count, seed)):
            parse_special, add_special = number % 3 != 0, number % 2 == 0
            expected = reference(text, parse_special, add_special)
            ours = tokenizer.encode(text, parse_special=parse_special, add_special=add_special)
            assert ours == expected, (text, parse_special, add_special)


def test_smollm2_ids_equal_llama_cpps(smollm2_path: Path) -> None:
    assert_identical(smollm2_path, 4000, seed=1)


@pytest.mark.long
def test_smollm2_ids_equal_llama_cpps_on_many_strings(smollm2_path: Path) -> None:
    assert_identical(smollm2_path, 60_000, seed=2)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "default", "tekken", "smollm", "glm4"])
def test_ids_of_every_pre_tokenizer_equal_llama_cpps(pre: str, tmp_path: Path) -> None:
    trained = byte_level(isolated(LLAMA3_REGEX), vocabulary_size=900)
    tokens = [*tokens_by_id(trained), "<|bos|>", "<|eot_id|>", "<|im_start|>", "<tool>", "<tool><x>", "  \n"]
    kinds = [NORMAL] * (len(tokens) - 6) + [CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED]
    bos_id = len(tokens) - 6
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tokens,
        kinds,
        model="gpt2",
        pre=pre,
        merges=merges_of(trained),
        bos_token_id=bos_id,
        eos_token_id=bos_id + 1,
    )
    assert_identical(path, 1200, seed=3)


@pytest.mark.parametrize("name", ["tiny", "Phi-3 mini"])
@pytest.mark.parametrize("adds_space_prefix", [True, False])
def test_ids_of_sentencepiece_equal_llama_cpps(name: str, adds_space_prefix: bool, tmp_path: Path) -> None:
    tokens = tokens_by_id(sentencepiece_like("llama2"))
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    # Scores as SentencePiece has them, with ties here and there, which go to the left.
    scores = [0.0] * 259 + [-float(rank // 3) for rank in range(len(tokens) - 259)]
    tokens += ["<|user|>", "<|end|>", "<|endoftext|>", "\n\n", "<tool>"]
    kinds += [CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]
    scores += [0.0] * 5
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tokens,
        kinds,
        name=name,
        model="llama",
        scores=scores,
        add_space_prefix=adds_space_prefix,
    )
    assert_identical(path, 1200, seed=4)
