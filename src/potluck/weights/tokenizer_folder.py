"""A tokenizer out of a Hugging Face folder: tokenizer.json and the small files beside it. Knows no text and no GGUF.

Only what the supported families use is understood; anything else in tokenizer.json is refused by name, not ignored.
"""

from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import msgspec

from potluck.core.errors import BadModelFile
from potluck.core.tokenizer_spec import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, TokenizerSpec
from potluck.weights.source_tensor import shown
from potluck.weights.tokenizer_rules import (
    GPT2_PATTERN,
    MAX_MERGES,
    MAX_TEMPLATE_LENGTH,
    MAX_TOKENS,
    check_spec,
    compiled_pattern,
    end_ids,
    is_byte_token,
)

_MAX_TOKENIZER_BYTES = 1 << 27
_MAX_CONFIG_BYTES = 1 << 24
_MAX_UNNAMED = 1 << 16  # ids without a token; authors round up by some hundred
_SPACE = "\u2581"
_SPLIT_AT_SPACES = f"{_SPACE}[^{_SPACE}]*|[^{_SPACE}]+"

_Decoded = TypeVar("_Decoded")


class _Part(msgspec.Struct):
    """A normalizer, pre-tokenizer or post-processor: one struct for all, since they share their few fields."""

    type: str
    normalizers: list["_Part"] = []
    pretokenizers: list["_Part"] = []
    processors: list["_Part"] = []
    pattern: dict[str, str] | None = None
    content: str | None = None
    prepend: str | None = None
    behavior: str = "Isolated"
    invert: bool = False
    add_prefix_space: bool = False
    use_regex: bool = True
    individual_digits: bool = False
    replacement: str = _SPACE
    prepend_scheme: str = "always"
    split: bool = True
    single: list[dict[str, dict[str, str | int]]] = []


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]
    unk_token: str | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _ModelType(msgspec.Struct):
    type: str = "BPE"


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw
    added_tokens: list[_AddedToken] = []
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    post_processor: _Part | None = None


class _TokenText(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    bos_token: str | _TokenText | None = None
    eos_token: str | _TokenText | None = None
    unk_token: str | _TokenText | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _Ids(msgspec.Struct):
    """What config.json and generation_config.json have to say about tokens."""

    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    vocab_size: int = 0
    text_config: "_Ids | None" = None


def tokenizer_from_folder(folder: Path) -> TokenizerSpec | None:
    """The tokenizer of a model folder, or None where it has no tokenizer.json. Raises BadModelFile."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = _decoded(path, _TokenizerFile, _MAX_TOKENIZER_BYTES)
    return _Reader(path, tokenizer, _model(path, tokenizer.model), folder).spec()


class _Reader:
    """Turns one folder's files into a spec. Everything read is checked before it is used."""

    def __init__(self, path: Path, tokenizer: _TokenizerFile, model: _Model, folder: Path) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._model = model
        self._folder = folder
        self._config = _optional(folder / "tokenizer_config.json", _TokenizerConfig)
        self._ids = [_optional(folder / name, _Ids) for name in ("generation_config.json", "config.json")]
        self._added = {token.id: token for token in tokenizer.added_tokens}

    def spec(self) -> TokenizerSpec:
        cutting = _Cutting(self._path, self._tokenizer)
        if not cutting.is_byte_level and not self._model.byte_fallback:
            self._refuse("model.byte_fallback", "is off, and no part of the tokenizer is ByteLevel")
        tokens = self._tokens()
        kinds = self._kinds(tokens, has_byte_tokens=not cutting.is_byte_level)
        by_text = {token: i for i, token in enumerate(tokens)}
        bos_id, eos_id = self._named_id("bos_token", by_text), self._named_id("eos_token", by_text)
        spec = TokenizerSpec(
            algorithm="byte_bpe" if cutting.is_byte_level else "sentencepiece",
            tokens=tuple(tokens),
            kinds=tuple(kinds),
            merges=self._merges(),
            split_patterns=tuple(cutting.patterns),
            normalization=cutting.normalization,
            ignores_merges=self._model.ignore_merges,
            adds_space_prefix=cutting.adds_space_prefix,
            prefixes_first_only=cutting.prefixes_first_only,
            prefixes_unless_spaced=cutting.prefixes_unless_spaced,
            adds_bos=self._adds(self._config.add_bos_token, bos_id, tokens, is_before=True),
            adds_eos=self._adds(self._config.add_eos_token, eos_id, tokens, is_before=False),
            bos_id=bos_id,
            eos_ids=end_ids(tokens, kinds, [eos_id, *self._configured_ends(len(tokens))]),
            unknown_id=by_text.get(self._model.unk_token or ""),
            strips_left=tuple(i for i, token in self._added.items() if token.lstrip),
            strips_right=tuple(i for i, token in self._added.items() if token.rstrip),
            chat_template=self._chat_template(),
        )
        return check_spec(spec, self._path)

    def _tokens(self) -> list[str]:
        by_id = {token_id: token for token, token_id in self._model.vocab.items()}
        if len(by_id) != len(self._model.vocab):
            self._refuse("model.vocab", "two tokens have the same id")
        for token in self._added.values():
            if token.single_word:
                self._refuse("added_tokens.single_word", f"of {shown(token.content)} is not supported")
            by_id[token.id] = token.content
        lowest, highest = min(by_id, default=0), max(by_id, default=-1)
        if lowest < 0 or highest >= MAX_TOKENS:
            self._refuse(
                "model.vocab", f"ids {shown(lowest)} to {shown(highest)} are not between 0 and {MAX_TOKENS - 1}"
            )
        # Models have more rows than tokens where their authors rounded up; such an id must still be one we can decode.
        count = max(highest + 1, min(MAX_TOKENS, self._configured_size()))
        if count - len(by_id) > _MAX_UNNAMED:
            self._refuse("model.vocab", f"has {len(by_id)} tokens for {count} ids")
        return [by_id.get(token_id) or f"[PAD{token_id}]" for token_id in range(count)]

    def _configured_size(self) -> int:
        config = self._ids[1]
        return config.text_config.vocab_size if config.text_config is not None else config.vocab_size

    def _kinds(self, tokens: list[str], has_byte_tokens: bool) -> list[int]:
        kinds = [UNUSED] * len(tokens)
        for token, token_id in self._model.vocab.items():
            kinds[token_id] = BYTE if has_byte_tokens and is_byte_token(token) else NORMAL
        unknown_id = self._model.vocab.get(self._model.unk_token or "")
        if unknown_id is not None:
            kinds[unknown_id] = UNKNOWN
        for added in self._added.values():
            kinds[added.id] = CONTROL if added.special else USER_DEFINED
        return kinds

    def _merges(self) -> tuple[str, ...]:
        if len(self._model.merges) > MAX_MERGES:
            self._refuse("model.merges", f"{len(self._model.merges)} are more than {MAX_MERGES}")
        merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in self._model.merges)
        for index, merge in enumerate(merges):
            if merge.count(" ") != 1 or merge[0] == " " or merge[-1] == " ":
                self._refuse("model.merges", f"{shown(merge)} (number {index}) is not two pieces")
        return merges

    def _named_id(self, name: Literal["bos_token", "eos_token"], by_text: dict[str, int]) -> int | None:
        token: str | _TokenText | None = getattr(self._config, name)
        if token is None:
            return None
        text = token if isinstance(token, str) else token.content
        if text not in by_text:
            raise BadModelFile(self._folder / "tokenizer_config.json", name, f"{shown(text)} is not in the vocabulary")
        return by_text[text]

    def _adds(self, configured: bool | None, token_id: int | None, tokens: list[str], is_before: bool) -> bool:
        if token_id is None:
            return False
        if configured is not None:
            return configured
        steps = [step for part in _flat(self._tokenizer.post_processor) for step in part.single]
        specials = [step.get("SpecialToken", {}).get("id") for step in steps]
        text = next((index for index, step in enumerate(steps) if "Sequence" in step), 0)
        return tokens[token_id] in (specials[:text] if is_before else specials[text:])

    def _configured_ends(self, count: int) -> list[int]:
        ends: list[int] = []
        for name, ids in zip(("generation_config.json", "config.json"), self._ids, strict=True):
            for part in (ids, ids.text_config or _Ids()):
                found = part.eos_token_id if isinstance(part.eos_token_id, list) else [part.eos_token_id]
                ends.extend(
                    _checked_id(token_id, count, self._folder / name) for token_id in found if token_id is not None
                )
        return ends

    def _chat_template(self) -> str | None:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            try:
                return _bounded(path, 4 * MAX_TEMPLATE_LENGTH).decode("utf-8")
            except UnicodeDecodeError:
                raise BadModelFile(path, "content", "is not UTF-8") from None
        template = self._config.chat_template
        if isinstance(template, list):
            named = {entry.name: entry.template for entry in template}
            return named.get("default")
        return template or None

    def _refuse(self, field: str, problem: str) -> NoReturn:
        raise BadModelFile(self._path, field, problem)


class _Cutting:
    """How the text is prepared and cut before merging, out of normalizer and pre_tokenizer."""

    def __init__(self, path: Path, tokenizer: _TokenizerFile) -> None:
        self._path = path
        self.is_byte_level = False
        self.patterns: list[str] = []
        self.normalization: Literal["none", "nfc"] = "none"
        self.adds_space_prefix = False
        self.prefixes_first_only = False
        self.prefixes_unless_spaced = False
        self._replaces_spaces = False
        for part in _flat(tokenizer.normalizer):
            self._normalizer(part)
        for part in _flat(tokenizer.pre_tokenizer):
            self._pre_tokenizer(part)
        if self.is_byte_level and self._replaces_spaces:
            self._refuse("pre_tokenizer", "is byte-level and yet the spaces are replaced")
        if not self.is_byte_level and not self._replaces_spaces:
            self._refuse("normalizer", "does not write spaces as U+2581, and pre_tokenizer is not byte-level")

    def _normalizer(self, part: _Part) -> None:
        if part.type == "NFC":
            self.normalization = "nfc"
        elif part.type == "Prepend" and part.prepend == _SPACE:
            self.adds_space_prefix = True
        elif part.type == "Replace" and part.pattern == {"String": " "} and part.content == _SPACE:
            self._replaces_spaces = True
        else:
            self._refuse("normalizer", f"{shown(part.type)} is not supported as it stands there")

    def _pre_tokenizer(self, part: _Part) -> None:
        if part.type == "ByteLevel" and not part.add_prefix_space:
            self.is_byte_level = True
            if part.use_regex:
                self.patterns.append(GPT2_PATTERN)
        elif part.type == "Digits":
            self.patterns.append(r"\p{N}" if part.individual_digits else r"\p{N}+")
        elif part.type == "Split":
            self._split(part)
        elif part.type == "Metaspace" and part.replacement == _SPACE:
            self._metaspace(part)
        else:
            self._refuse("pre_tokenizer", f"{shown(part.type)} is not supported as it stands there")

    def _split(self, part: _Part) -> None:
        pattern = part.pattern or {}
        if pattern == {"String": " "} and self._replaces_spaces:
            return  # Gemma: no space is left to split at
        keeps_matches = part.behavior == "Isolated" or (part.behavior == "Removed" and part.invert)
        text = pattern.get("Regex", "")
        # && means an intersection to Hugging Face's engine and something else to ours.
        if not keeps_matches or not text or "&&" in text:
            self._refuse("pre_tokenizer", f"Split by {shown(text)} ({shown(part.behavior)}) is not supported")
        compiled_pattern(text, self._path, "pre_tokenizer")
        self.patterns.append(text)

    def _metaspace(self, part: _Part) -> None:
        self._replaces_spaces = True
        if part.prepend_scheme not in ("always", "first", "never"):
            self._refuse("pre_tokenizer", f"prepend_scheme {shown(part.prepend_scheme)} is not known")
        self.adds_space_prefix = part.prepend_scheme != "never"
        self.prefixes_first_only = part.prepend_scheme == "first"
        self.prefixes_unless_spaced = True
        if part.split:
            self.patterns.append(_SPLIT_AT_SPACES)

    def _refuse(self, field: str, problem: str) -> NoReturn:
        raise BadModelFile(self._path, field, problem)


def _flat(part: _Part | None) -> list[_Part]:
    """The parts of a possibly nested sequence, in order."""
    if part is None:
        return []
    if part.type != "Sequence":
        return [part]
    inner = [*part.normalizers, *part.pretokenizers, *part.processors]
    return [leaf for child in inner for leaf in _flat(child)]


def _model(path: Path, raw: msgspec.Raw) -> _Model:
    kind = _parsed(path, "model", bytes(raw), _ModelType).type
    if kind != "BPE":
        raise BadModelFile(path, "model.type", f"{shown(kind)} is not supported; BPE is")
    model = _parsed(path, "model", bytes(raw), _Model)
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        raise BadModelFile(path, "model", "marks of word parts are not supported")
    return model


def _checked_id(token_id: int, count: int, file: Path) -> int:
    if not 0 <= token_id < count:
        raise BadModelFile(file, "eos_token_id", f"{shown(token_id)} is not between 0 and {count - 1}")
    return token_id


def _optional(path: Path, kind: type[_Decoded]) -> _Decoded:
    return _decoded(path, kind, _MAX_CONFIG_BYTES) if path.is_file() else kind()


def _decoded(path: Path, kind: type[_Decoded], limit_bytes: int) -> _Decoded:
    return _parsed(path, "content", _bounded(path, limit_bytes), kind)


def _parsed(path: Path, field: str, data: bytes, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadModelFile(path, field, f"is not what it should be: {shown(str(error), 200)}") from None


def _bounded(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(min(path.stat().st_size, limit_bytes) + 1)  # takes memory for all that it may read
    except OSError as error:
        raise BadModelFile(path, "file", f"cannot be read: {error}") from error
    if len(data) > limit_bytes:
        raise BadModelFile(path, "file", f"is longer than {limit_bytes} bytes")
    return data
