"""Tokenizers out of metadata and folders: defaults, ends, and every lie named with file and field."""
# one lie a line

import copy
import json
from pathlib import Path

import pytest

from potluck.core.errors import BadModelFile
from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from potluck.weights.tokenizer_source import tokenizer_from_folder, tokenizer_from_gguf

FILE = Path("model.gguf")


def bpe(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": ["a", "b", "ab", "<|bos|>", "<|eot_id|>", "<|fim_prefix|>", "<tool>"],
        "token_type": [1, 1, 1, 3, 3, 4, 4],
        "merges": ["a b"],
        "bos_token_id": 3,
        "eos_token_id": 4,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items() if v is not None}


def spm(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "a"],
        "token_type": [2, 3, 3, 6, 1],
        "scores": [0.0, 0.0, 0.0, 0.0, -1.0],
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items() if v is not None}


def test_byte_level_defaults_are_llama_cpps() -> None:
    spec = tokenizer_from_gguf({**bpe(), "tokenizer.chat_template": "{{ x }}"}, FILE)
    assert spec is not None
    assert spec.algorithm == "byte_bpe"
    assert spec.ignores_merges
    assert spec.adds_bos
    assert not spec.adds_eos
    assert spec.eos_ids == (4,)
    assert spec.kinds == (NORMAL, NORMAL, NORMAL, CONTROL, CONTROL, CONTROL, USER_DEFINED)  # 5: known by its text
    assert spec.chat_template == "{{ x }}"
    qwen = tokenizer_from_gguf(bpe(pre="qwen2", add_bos_token=None), FILE)
    assert qwen is not None
    assert not qwen.adds_bos
    assert not qwen.ignores_merges


def test_sentencepiece_defaults_are_llama_cpps() -> None:
    spec = tokenizer_from_gguf(spm(), FILE)
    assert spec is not None
    assert (spec.bos_id, spec.eos_ids, spec.unknown_id) == (1, (2,), 0)
    assert spec.adds_bos
    assert spec.adds_space_prefix
    assert spec.kinds == (UNKNOWN, CONTROL, CONTROL, BYTE, NORMAL)
    bare = tokenizer_from_gguf(spm(add_bos_token=False, add_space_prefix=False), FILE)
    assert bare is not None
    assert not bare.adds_bos
    assert not bare.adds_space_prefix


def test_every_end_is_found() -> None:
    tokens = ["<|endoftext|>", "<|im_end|>", "x", "<|eom_id|>", "y", "<|repo_name|>", "<|end|>"]
    spec = tokenizer_from_gguf(
        bpe(tokens=tokens, token_type=[3] * 7, eos_token_id=1, eot_token_id=4, bos_token_id=0), FILE
    )
    assert spec is not None
    assert spec.eos_ids[0] == 1
    assert set(spec.eos_ids) == {0, 1, 3, 4, 5, 6}
    harmony = tokenizer_from_gguf(
        bpe(tokens=["<|return|>", "<|call|>", "<|end|>"], token_type=[3] * 3, bos_token_id=0, eos_token_id=0), FILE
    )
    assert harmony is not None
    assert set(harmony.eos_ids) == {0, 1}


def test_phi3_swallows_white_space_after_its_marks() -> None:
    metadata = {**spm(tokens=["<unk>", "<s>", "</s>", "<0x0A>", "<|user|>"], token_type=[2, 3, 3, 6, 3])}
    spec = tokenizer_from_gguf({**metadata, "general.name": "Phi-3 Mini"}, FILE)
    assert spec is not None
    assert spec.strips_right == (2, 4)


def test_no_tokenizer_is_none() -> None:
    assert tokenizer_from_gguf({}, FILE) is None
    assert tokenizer_from_gguf({"tokenizer.ggml.model": "no_vocab"}, FILE) is None


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        (bpe(model="bert"), "tokenizer.ggml.model"),
        (bpe(model=3), "tokenizer.ggml.model"),
        (bpe(pre="kimi-k2"), "tokenizer.ggml.pre"),
        (bpe(pre=["x"]), "tokenizer.ggml.pre"),
        (bpe(tokens=None), "tokenizer.ggml.tokens"),
        (bpe(tokens="abc"), "tokenizer.ggml.tokens"),
        (bpe(tokens=[], token_type=[]), "tokenizer.ggml.tokens"),
        (bpe(tokens=["a", 3], token_type=[1, 1]), "tokenizer.ggml.tokens"),
        (bpe(tokens=["a", "a"], token_type=[1, 1], bos_token_id=0, eos_token_id=0), "tokens"),
        (bpe(tokens=["a\ud800", "b"], token_type=[1, 1], bos_token_id=0, eos_token_id=0), "tokens"),
        (bpe(tokens=["a" * 70_000, "b"], token_type=[1, 1], bos_token_id=0, eos_token_id=0), "tokens"),
        (bpe(token_type=[1]), "tokenizer.ggml.token_type"),
        (bpe(token_type=[1] * 6 + [7]), "tokenizer.ggml.token_type"),
        (bpe(token_type=[1] * 6 + [True]), "tokenizer.ggml.token_type"),
        (bpe(token_type=[1] * 6 + ["1"]), "tokenizer.ggml.token_type"),
        (bpe(token_type=3), "tokenizer.ggml.token_type"),
        (bpe(merges=None), "tokenizer.ggml.merges"),
        (bpe(merges=["ab"]), "tokenizer.ggml.merges"),
        (bpe(merges=[" b"]), "tokenizer.ggml.merges"),
        (bpe(merges=["a b c"]), "tokenizer.ggml.merges"),
        (bpe(merges=[3]), "tokenizer.ggml.merges"),
        (bpe(bos_token_id=7), "tokenizer.ggml.bos_token_id"),
        (bpe(bos_token_id=-1), "tokenizer.ggml.bos_token_id"),
        (bpe(eos_token_id="4"), "tokenizer.ggml.eos_token_id"),
        (bpe(eot_token_id=1 << 40), "tokenizer.ggml.eot_token_id"),
        (bpe(bos_token_id=None), "bos_token_id"),
        (bpe(add_bos_token=1), "tokenizer.ggml.add_bos_token"),
        (spm(scores=[0.0]), "tokenizer.ggml.scores"),
        (spm(scores=[0.0, 0.0, 0.0, 0.0, float("nan")]), "tokenizer.ggml.scores"),
        (spm(token_type=[2, 3, 3, 6, 6]), "tokens"),
        ({**bpe(), "tokenizer.chat_template": 3}, "tokenizer.chat_template"),
        ({**bpe(), "tokenizer.chat_template": "x" * 200_000}, "chat_template"),
    ],
)
def test_lies_in_metadata_are_named(metadata: dict[str, object], field: str) -> None:
    with pytest.raises(BadModelFile) as caught:
        tokenizer_from_gguf(metadata, FILE)
    assert caught.value.field == field
    assert caught.value.file == "model.gguf"


def folder_files() -> dict[str, dict[str, object]]:
    return {
        "tokenizer.json": {
            "added_tokens": [
                {"id": 3, "content": "<|bos|>", "special": True},
                {"id": 4, "content": "<|im_end|>", "special": True, "rstrip": True},
                {"id": 5, "content": "<tool>", "special": False},
            ],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+"}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            },
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "ignore_merges": True},
        },
        "tokenizer_config.json": {
            "bos_token": "<|bos|>",
            "eos_token": {"content": "<|im_end|>"},
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        },
        "generation_config.json": {"eos_token_id": [4, 3]},
        "config.json": {"eos_token_id": 5, "vocab_size": 8},
    }


def write_folder(folder: Path, files: dict[str, dict[str, object]]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_folder_becomes_a_spec(tmp_path: Path) -> None:
    spec = tokenizer_from_folder(write_folder(tmp_path, folder_files()))
    assert spec is not None
    assert spec.tokens == ("a", "b", "ab", "<|bos|>", "<|im_end|>", "<tool>", "[PAD6]", "[PAD7]")
    assert spec.kinds == (NORMAL, NORMAL, NORMAL, CONTROL, CONTROL, USER_DEFINED, UNUSED, UNUSED)
    assert spec.eos_ids == (4, 3, 5)
    assert spec.adds_bos
    assert spec.normalization == "nfc"
    assert spec.merges == ("a b",)
    assert spec.strips_right == (4,)
    assert spec.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    again = tokenizer_from_folder(tmp_path)
    assert again is not None
    assert again.chat_template == "J"


def test_a_folder_without_tokenizer_is_none(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("path", "value", "file", "field"),
    [
        ("tokenizer.json/model/type", "Unigram", "tokenizer.json", "model.type"),
        ("tokenizer.json/model/vocab", [["a", 0]], "tokenizer.json", "model"),
        ("tokenizer.json/model/vocab", {"a": 0, "b": 0, "ab": 1}, "tokenizer.json", "model.vocab"),
        ("tokenizer.json/model/vocab", {"a": -1}, "tokenizer.json", "model.vocab"),
        ("tokenizer.json/model/vocab", {"a": 1 << 40}, "tokenizer.json", "model.vocab"),
        ("tokenizer.json/model/vocab", {"a": "x"}, "tokenizer.json", "model"),
        ("tokenizer.json/model/vocab", {"a": 0, "<tool>": 1}, "tokenizer.json", "tokens"),
        ("tokenizer.json/model/merges", [["a"]], "tokenizer.json", "model"),
        ("tokenizer.json/model/merges", [["a b", "c"]], "tokenizer.json", "model.merges"),
        ("tokenizer.json/model/merges", ["ab"], "tokenizer.json", "model.merges"),
        ("tokenizer.json/model/end_of_word_suffix", "</w>", "tokenizer.json", "model"),
        ("tokenizer.json/normalizer", {"type": "Lowercase"}, "tokenizer.json", "normalizer"),
        ("tokenizer.json/normalizer", {"type": "Prepend", "prepend": "x"}, "tokenizer.json", "normalizer"),
        ("tokenizer.json/pre_tokenizer", {"type": "Whitespace"}, "tokenizer.json", "pre_tokenizer"),
        ("tokenizer.json/pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}, "tokenizer.json", "pre_tokenizer"),
        ("tokenizer.json/pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}}, "tokenizer.json", "pre_tokenizer"),
        ("tokenizer.json/pre_tokenizer", {"type": "Split", "pattern": {"Regex": "a" * 9999}}, "tokenizer.json", "pre_tokenizer"),
        ("tokenizer.json/pre_tokenizer", {"type": "Metaspace", "prepend_scheme": "often"}, "tokenizer.json", "pre_tokenizer"),
        ("tokenizer.json/pre_tokenizer", None, "tokenizer.json", "normalizer"),
        ("tokenizer.json/added_tokens", [{"id": 3}], "tokenizer.json", "content"),
        ("tokenizer.json/added_tokens", [{"id": 3, "content": "x", "single_word": True}], "tokenizer.json", "added_tokens.single_word"),
        ("tokenizer.json/model", 3, "tokenizer.json", "model"),
        ("tokenizer_config.json/eos_token", "<nowhere>", "tokenizer_config.json", "eos_token"),
        ("tokenizer_config.json/bos_token", 3, "tokenizer_config.json", "content"),
        ("generation_config.json/eos_token_id", 99, "generation_config.json", "eos_token_id"),
        ("generation_config.json/eos_token_id", ["x"], "generation_config.json", "content"),
        ("config.json/eos_token_id", -2, "config.json", "eos_token_id"),
    ],
)  # fmt: skip
def test_lies_in_a_folder_are_named(path: str, value: object, file: str, field: str, tmp_path: Path) -> None:
    files = copy.deepcopy(folder_files())
    *parents, last = path.split("/")
    place: dict[str, object] = files
    for name in parents:
        place = place[name]  # type: ignore[assignment]
    place[last] = value
    with pytest.raises(BadModelFile) as caught:
        tokenizer_from_folder(write_folder(tmp_path, files))
    assert Path(caught.value.file).name == file
    assert caught.value.field == field


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": ' + b"[" * 100_000])
def test_rubbish_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadModelFile):
        tokenizer_from_folder(tmp_path)


def test_a_nested_sequence_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    files = folder_files()
    part = '{"type": "Sequence", "normalizers": [' * 5000 + '{"type": "NFC"}' + "]}" * 5000
    text = json.dumps(files["tokenizer.json"]).replace('{"type": "NFC"}', part)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadModelFile):
        tokenizer_from_folder(tmp_path)
