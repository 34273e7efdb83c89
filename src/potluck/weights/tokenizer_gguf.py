"""A tokenizer out of GGUF metadata, with llama.cpp's defaults for what is missing. Knows no text and no HF folder."""

from collections.abc import Mapping
from pathlib import Path

from potluck.core.errors import BadModelFile
from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, TokenizerSpec
from potluck.weights.fields import Fields
from potluck.weights.source_tensor import shown
from potluck.weights.tokenizer_rules import (
    MAX_MERGES,
    MAX_TOKENS,
    PRE_TOKENIZERS,
    PreTokenizer,
    check_spec,
    end_ids,
    mark_control_tokens,
)

_MODELS = {"gpt2", "llama"}
_ENDING_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def tokenizer_from_gguf(metadata: Mapping[str, object], file: Path) -> TokenizerSpec | None:
    """The tokenizer that the metadata describe, or None where they have none. Raises BadModelFile."""
    fields = Fields(metadata, file, "tokenizer.ggml.")
    model = fields.text("model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in _MODELS:
        raise fields.bad("model", f"{shown(model)} is not known; known are {', '.join(sorted(_MODELS))}")
    is_sentencepiece = model == "llama"
    tokens = _tokens(fields)
    kinds = _kinds(fields, len(tokens))
    mark_control_tokens(tokens, kinds)
    pre = PreTokenizer((), adds_bos=True) if is_sentencepiece else _pre_tokenizer(fields)
    named = [_special_id(fields, key, len(tokens), 2 if is_sentencepiece else None) for key in _ENDING_KEYS[:1]]
    named += [_special_id(fields, key, len(tokens), None) for key in _ENDING_KEYS[1:]]
    spec = TokenizerSpec(
        algorithm="sentencepiece" if is_sentencepiece else "byte_bpe",
        tokens=tuple(tokens),
        kinds=tuple(kinds),
        scores=_scores(fields, len(tokens)) if is_sentencepiece else (),
        merges=() if is_sentencepiece else _merges(fields),
        split_patterns=pre.patterns,
        ignores_merges=pre.ignores_merges,
        # llama.cpp reads the key for byte-level BPE too, and then does nothing with it.
        adds_space_prefix=is_sentencepiece and fields.flag("add_space_prefix", True),
        adds_bos=fields.flag("add_bos_token", pre.adds_bos),
        adds_eos=fields.flag("add_eos_token", False),
        bos_id=_special_id(fields, "bos", len(tokens), 1 if is_sentencepiece else None),
        eos_ids=end_ids(tokens, kinds, named),
        unknown_id=_special_id(fields, "unknown", len(tokens), 0 if is_sentencepiece else None),
        strips_right=_strips_right(metadata, tokens, kinds),
        chat_template=_chat_template(metadata, file),
    )
    return check_spec(spec, file)


def _tokens(fields: Fields) -> list[str]:
    tokens = _strings(fields, "tokens", MAX_TOKENS)
    if not tokens:
        raise fields.bad("tokens", "has no entries")
    return [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]


def _kinds(fields: Fields, count: int) -> list[int]:
    if not fields.has("token_type"):
        return [NORMAL] * count
    kinds = fields.get("token_type")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.bad("token_type", f"is not a list of {count} integers")
    for token_id, kind in enumerate(kinds):
        if type(kind) is not int or not NORMAL <= kind <= BYTE:
            raise fields.bad("token_type", f"{shown(kind)} of token {token_id} is not between {NORMAL} and {BYTE}")
    return list(kinds)


def _scores(fields: Fields, count: int) -> tuple[float, ...]:
    if not fields.has("scores"):
        return (0.0,) * count
    return fields.numbers("scores", count, -1e30, 1e30)


def _merges(fields: Fields) -> tuple[str, ...]:
    merges = _strings(fields, "merges", MAX_MERGES)
    for index, merge in enumerate(merges):
        # From the second character on, as llama.cpp looks: the left half may not be empty.
        if not 0 < merge.find(" ", 1) < len(merge) - 1 or merge.count(" ") != 1:
            raise fields.bad("merges", f"{shown(merge)} (number {index}) is not two pieces with a space between")
    return tuple(merges)


def _strings(fields: Fields, key: str, limit: int) -> list[str]:
    values = fields.get(key)
    if not isinstance(values, list):
        raise fields.bad(key, "is missing" if values is None else "is not a list")
    if len(values) > limit:
        raise fields.bad(key, f"{len(values)} entries are more than {limit}")
    if not all(isinstance(value, str) for value in values):
        raise fields.bad(key, "has entries that are not text")
    return values


def _pre_tokenizer(fields: Fields) -> PreTokenizer:
    name = fields.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise fields.bad("pre", f"pre-tokenizer {shown(name)} is not known; known are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _special_id(fields: Fields, name: str, count: int, default: int | None) -> int | None:
    key = f"{name}_token_id"
    if not fields.has(key):
        return default if default is not None and default < count else None
    return fields.integer(key, 0, count - 1)


def _strips_right(metadata: Mapping[str, object], tokens: list[str], kinds: list[int]) -> tuple[int, ...]:
    # GGUF does not say which tokens swallow the white space after them; llama.cpp knows it by the model's name.
    name = metadata.get("general.name")
    if not isinstance(name, str) or not any(part in name.lower() for part in ("phi-3", "phi3")):
        return ()
    special = (CONTROL, USER_DEFINED, UNKNOWN)
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    return tuple(i for i, kind in enumerate(kinds) if kind in special and tokens[i] not in keeps)


def _chat_template(metadata: Mapping[str, object], file: Path) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadModelFile(file, "tokenizer.chat_template", "is not a text")
    return template or None
