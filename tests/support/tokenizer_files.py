"""The tokenizer files of a model folder, small enough that damage to them nearly always hits something that matters."""

import json
from collections.abc import Mapping
from pathlib import Path

SPACE = "\u2581"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORD_PATTERN = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"

_MERGES = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"]]
_MERGED = ["he", "ll", "hell", "hello"]

Files = dict[str, dict[str, object]]


def byte_level_files() -> Files:
    """Like Llama 3 and Qwen: a Split by a pattern, then bytes."""
    pieces = [*"helowrd!", "\u0120", "\u010a", *_MERGED]
    added: list[dict[str, object]] = [
        {"id": 14, "content": "<|bos|>", "special": True, "lstrip": False, "rstrip": False, "single_word": False},
        {"id": 15, "content": "<|im_start|>", "special": True, "lstrip": True},
        {"id": 16, "content": "<|im_end|>", "special": True, "rstrip": True},
        {"id": 17, "content": "<tool>", "special": False},
    ]
    split = {"type": "Split", "pattern": {"Regex": WORD_PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": _adding("<|bos|>"),
        "model": {
            "type": "BPE", "vocab": _numbered(pieces), "merges": _MERGES, "ignore_merges": True, "byte_fallback": False,
        },
    }  # fmt: skip
    return {"tokenizer.json": tokenizer} | _beside("<|bos|>", "<|im_end|>", [16, 14])


def sentencepiece_files() -> Files:
    """Like Mistral: spaces as U+2581, byte tokens for what is missing, merges as text."""
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", SPACE, *"helowrd!", *_MERGED]
    tokenizer: dict[str, object] = {
        "added_tokens": [{"id": number, "content": pieces[number], "special": True} for number in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": True},
        "post_processor": _adding("<s>"),
        "model": {
            "type": "BPE", "vocab": _numbered(pieces), "merges": [" ".join(merge) for merge in _MERGES],
            "unk_token": "<unk>", "byte_fallback": True,
        },
    }  # fmt: skip
    return {"tokenizer.json": tokenizer} | _beside("<s>", "</s>", 2)


def write_files(folder: Path, files: Mapping[str, Mapping[str, object]]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


def _adding(bos: str) -> dict[str, object]:
    steps = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": steps}


def _beside(bos: str, eos: str, ends: object) -> Files:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    config = {"bos_token": bos, "eos_token": {"content": eos}, "add_bos_token": True, "chat_template": templates}
    return {"tokenizer_config.json": config, "generation_config.json": {"eos_token_id": ends}}
