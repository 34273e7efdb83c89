"""Everything needed to turn text into tokens and back, as data: what a manifest covers and a head may get from a shard."""

from typing import Literal

import msgspec

# Token kinds, numbered as GGUF does.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class TokenizerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tokenizer, whichever file it came from.

    `byte_bpe`: byte-level BPE; text is cut by `split_patterns` (applied one after the other), bytes are written as GPT-2's
    printable characters, and pairs are merged by the order of `merges`. `sentencepiece`: spaces become U+2581, pairs are
    merged by `scores` (or by `merges` where the file has those), and what is left falls back to byte tokens.
    """

    algorithm: Literal["byte_bpe", "sentencepiece"]
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]  # one of the constants above for each token
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()  # "left right"
    split_patterns: tuple[str, ...] = ()
    normalization: Literal["none", "nfc"] = "none"
    ignores_merges: bool = False  # a piece that is a token as it stands is taken whole (Llama 3)
    adds_space_prefix: bool = False  # before each stretch of text between special tokens
    prefixes_first_only: bool = False  # only where the text begins, not after special tokens
    prefixes_unless_spaced: bool = False  # not before text that already begins with a space
    adds_bos: bool = False
    adds_eos: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # every id that ends an answer: EOS, EOT, EOM; the first is the file's own EOS
    unknown_id: int | None = None
    strips_left: tuple[int, ...] = ()  # special tokens that swallow the white space before them
    strips_right: tuple[int, ...] = ()  # and after them (Phi-3)
    chat_template: str | None = None
