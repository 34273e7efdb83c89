"""Strings that tokenizers get wrong: code, emoji, many scripts, control characters, white space, special tokens."""
# ruff: noqa: E501  # a list of samples, read by nobody in order

import random
import unicodedata
from collections.abc import Iterator
from functools import cache

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


@cache
def assigned_characters() -> list[str]:
    return [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]


def varied_strings(count: int, seed: int) -> Iterator[str]:
    chosen = random.Random(seed)
    characters, ascii_characters = assigned_characters(), [chr(c) for c in range(128)]
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
                parts.append("".join(chosen.choices(ascii_characters, k=chosen.randint(1, 6))))
            parts.append(chosen.choice(["", "", " ", "  ", "\n"]))
        yield "".join(parts)
