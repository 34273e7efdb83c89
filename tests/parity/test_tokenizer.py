"""Token ids against llama.cpp's own, on SmolLM2 and on tiny vocabularies of the other kinds."""

import http.client
import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import xllamacpp

from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from potluck.text.tokenizer import Tokenizer
from potluck.weights.open_model import open_checkpoint
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

PIECES = [
    "Hello, world!", "the quick brown fox", "don't", "I'LL", "we've", "'s", "'", "''", "def f(x):\n    return x**2\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }", "<div class=\"x\">&amp;</div>", "SELECT * FROM t WHERE id=1;",
    "\t\tif x:\r\n", "\r", "\r\n\r\n", "\n", "\n\n\n", "  ", "    ", " ", "\t", " \n ", "\v\f", "\x00", "\x01\x1f\x7f", "\x1c\x1d",
    "\x85", "\xa0", "\u2028", "\u2003", "\u3000", "\u200b", "\ufeff", "\u00ad",
    "1", "12", "123456", "3.14159", "1e-9", "0x1F", "½", "²³", "Ⅻ", "٣٤", "१२", "१", "㊿",
    "😀", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "✈️", "👍🏽", "❤", "漢字かな交じり文", "你好，世界！", "안녕하세요", "สวัสดี", "नमस्ते दुनिया", "مرحبا بالعالم", "שלום",
    "Привет, мир", "Ελλάδα", "straße", "ÀÉÎÕÜ", "e\u0301", "a\u0308\u0327", "ﬁ", "ǅ", "İ", "ſ", "'ſ", "K", "𝒜𝓑", "𐍈", "\U0010ffff", "\ue000", "\ufffd",
    "\ufdd0", "…", "—", "“quoted”", "©®™", "∑∫√", "$€£", "a_b-c.d/e\\f", "`x`", "~!@#$%^&*()_+{}|:<>?", "[]", "---", "....",
    "https://example.org/?q=a%20b&c=d#e", "user@example.com", "C:\\Users\\x", "▁", "▁▁the", "Ġthe", "Ċ",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "start|>", "<|im_start|", "<repo_name>", "<reponame>", "<empty_output>",
    "<file_sep>", "<gh_stars>", "<|", "|>", "<s>", "</s>", "<unk>", "<0x0A>", "[INST]", "user\n", "assistant",
]  # fmt: skip


def assigned_characters() -> list[str]:
    return [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]


def varied_strings(count: int, seed: int) -> Iterator[str]:
    chosen = random.Random(seed)
    characters = assigned_characters()
    yield from PIECES
    yield from ["", " ", "a" * 5000, " " * 3000, "ab" * 2500, "\n" * 500, "1" * 1000, "é" * 1000, "<|im_start|>" * 50]
    for _ in range(count):
        parts = []
        for _ in range(chosen.randint(1, 12)):
            kind = chosen.random()
            if kind < 0.7:
                parts.append(chosen.choice(PIECES))
            elif kind < 0.85:
                parts.append("".join(chosen.choices(characters, k=chosen.randint(1, 4))))
            else:
                parts.append("".join(chosen.choices([chr(c) for c in range(128)], k=chosen.randint(1, 6))))
            parts.append(chosen.choice(["", "", " ", "  ", "\n"]))
        yield "".join(parts)


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


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "default", "tekken", "smollm"])
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
