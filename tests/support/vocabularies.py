"""Small vocabularies of every kind, trained on the spot, as Hugging Face folders and as GGUF files for llama.cpp."""

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
SPACE = "\u2581"

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock; they've said they'll come at 10:45, don't they?",
    "def merge(left, right):\n    if not left:\n        return right\n    return left + right\n\n\n",
    "Die Straße ist naß und schön; l'été à la plage, où ça? El niño comió piñas. Привет, мир! Добрый день.",
    "你好，世界。今日は良い天気です。안녕하세요 여러분. नमस्ते दुनिया. مرحبا بالعالم",
    "aaaa aaa aa a bbbb bb ababab     spaces   and\ttabs\t\tand\r\nlines\n\n    indented <b>bold</b> <|not special|>",
    "for (int i = 0; i < 100; ++i) { total += values[i] * 3.14159; } // 2023-10-05 😀👍🏽 ✈️",
] * 4


def byte_level(
    parts: Sequence[pre_tokenizers.PreTokenizer], vocabulary_size: int = 700, nfc: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def isolated(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def llama3_like() -> Tokenizer:
    tokenizer = byte_level(isolated(LLAMA3_REGEX))
    tokenizer.add_special_tokens([_mark(text) for text in ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>")])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return tokenizer


def qwen2_like() -> Tokenizer:
    tokenizer = byte_level(isolated(QWEN2_REGEX), nfc=True)
    tokenizer.add_special_tokens([_mark("<|endoftext|>"), _mark("<|im_start|>"), _mark("<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return tokenizer


def smollm_like() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = byte_level([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.add_special_tokens([_mark("<|endoftext|>"), _mark("<|im_start|>"), _mark("<|im_end|>")])
    return tokenizer


def sentencepiece_like(style: str) -> Tokenizer:
    """Styles: llama2, phi3 (Prepend and Replace), mistral (Metaspace, first only, unsplit), gemma (Replace), split."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = [line for text in CORPUS for line in text.split("\n")]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False, max_token_length=12)
    trained.train_from_iterator([word for line in lines for word in _words(line)], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    _prepare(tokenizer, style)
    tokenizer.add_special_tokens([_mark("<unk>"), _mark("<s>"), _mark("</s>")])
    if style == "gemma":
        tokenizer.add_special_tokens([_mark("<start_of_turn>"), _mark("<end_of_turn>")])
        tokenizer.add_tokens([AddedToken("\n" * n, normalized=False, special=False) for n in range(1, 6)])
    if style == "phi3":
        tokenizer.add_special_tokens(
            [AddedToken(text, rstrip=True, normalized=False) for text in ("<|user|>", "<|end|>", "<|assistant|>")]
        )
    return tokenizer


def _words(line: str) -> list[str]:
    # Trained on words with their spaces before them, and on runs of spaces: what SentencePiece vocabularies hold.
    return line.replace(" ", "  ").split(" ") + [" " * n for n in range(2, 9)] + line.split("  ")


def _prepare(tokenizer: Tokenizer, style: str) -> None:
    replace = normalizers.Replace(" ", SPACE)
    if style in ("llama2", "phi3"):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    elif style == "gemma":
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        scheme, split = ("first", False) if style == "mistral" else ("always", True)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=split)
    if style in ("llama2", "mistral", "gemma"):
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])


def _mark(text: str) -> AddedToken:
    return AddedToken(text, normalized=False, special=True)


def save_folder(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tokens_by_id(tokenizer: Tokenizer) -> list[str]:
    return [str(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]


def merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def write_gguf(path: Path, tokens: Sequence[str], kinds: Sequence[int], **tokenizer: object) -> Path:
    """A one-layer Llama with zero weights and this vocabulary. `tokenizer` holds keys below `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(str(tokenizer.pop("name", "tiny")))
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    for key, value in tokenizer.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for name, shape in _tiny_tensors(len(tokens)).items():
        writer.add_tensor(name, numpy.zeros(shape, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)


def _tiny_tensors(token_count: int) -> dict[str, tuple[int, ...]]:
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    layer: dict[str, tuple[int, ...]] = {f"blk.0.{name}.weight": (32, 32) for name in square}
    layer |= {f"blk.0.{name}.weight": (32,) for name in ("attn_norm", "ffn_norm")}
    return {"token_embd.weight": (token_count, 32), "output_norm.weight": (32,), **layer}
