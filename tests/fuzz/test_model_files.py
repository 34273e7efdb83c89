"""Damaged and hostile model files: each is opened or refused with one of our errors, quickly and in little memory.

The damage is drawn from a seed, so that a failure can be repeated: the message names base, seed and number.
"""

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from potluck.core.errors import BadModelFile, PotluckError, UnknownArchitecture, UnknownFormat
from potluck.weights.manifest import build_manifest, decode_manifest, encode_manifest
from potluck.weights.open_model import open_checkpoint
from tests.support.gguf_files import KINDS, Tensor, Typed, gguf_bytes, metadata_of, string, tensors_of
from tests.support.tiny_models import (
    LLAMA_CONFIG,
    LLAMA_FACTS,
    folder_tensors,
    safetensors_bytes,
    tiny_gguf,
    write_folder,
)

COUNT = 10_000 if os.environ.get("POTLUCK_LONG") else 1_000
MAX_SECONDS = 2.0  # generous, because the machine is shared; an honest file takes two milliseconds
MAX_BYTES = 16 << 20  # the largest base has 200 KiB

INTERESTING = (0, 1, 2, 3, 7, 8, 9, 31, 32, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**20, 2**22, 2**31 - 1, 2**31)
INTERESTING += (2**32 - 1, 2**32, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def flip_bits(data: bytearray, header: int, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(header)] ^= 1 << chance.randrange(8)


def set_bytes(data: bytearray, header: int, chance: random.Random) -> None:
    data[chance.randrange(header)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def plant_number(data: bytearray, header: int, chance: random.Random) -> None:
    number, width = chance.choice(INTERESTING), chance.choice((2, 4, 8))
    start = chance.randrange(header)
    data[start : start + width] = (number % (1 << 8 * width)).to_bytes(width, "little")


def plant_digits(data: bytearray, header: int, chance: random.Random) -> None:
    """Another number in place of one that is written in decimal."""
    places = [place for place in range(8, header) if 0x30 <= data[place] <= 0x39]
    if places:
        place = chance.choice(places)
        data[place : place + 1] = str(chance.choice((*INTERESTING, -1, 1e308, 10**60))).encode()


def cut(data: bytearray, header: int, chance: random.Random) -> None:
    del data[chance.randrange(chance.choice((header, len(data)))) :]


def cut_out(data: bytearray, header: int, chance: random.Random) -> None:
    start = chance.randrange(header)
    del data[start : start + chance.choice((1, 4, 8, 64))]


def splice(data: bytearray, header: int, chance: random.Random) -> None:
    source, target = chance.randrange(header), chance.randrange(header)
    data[target:target] = data[source : source + chance.choice((1, 8, 32, 200))]


def repeat(data: bytearray, header: int, chance: random.Random) -> None:
    source, target, length = chance.randrange(header), chance.randrange(header), chance.choice((4, 8, 40))
    data[target : target + length] = data[source : source + length]


Structured = Callable[[bytes, random.Random], bytes]

MUTATIONS: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    flip_bits, flip_bits, set_bytes, plant_number, plant_number, plant_digits, cut, cut_out, splice, repeat,
)  # fmt: skip


def mutated(data: bytes, header: int, chance: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        chance.choice(MUTATIONS)(result, max(1, min(header, len(result))), chance)
        result = result or bytearray(b"\0")
    return bytes(result)


HOSTILE_VALUES: tuple[object, ...] = (
    None, True, 0, -1, 0.5, 2**64, 10**60, 1e308, float("nan"), float("inf"), "", "../x", "x\0y", "F8_E4M3", "x" * 3000,
    [], [0], [[[]]], [2**64] * 3, {}, {"a": {}},
)  # fmt: skip


def mutated_json(text: bytes, chance: random.Random) -> bytes:
    """Still JSON, with one value replaced, taken out, or standing in two places."""
    root = json.loads(text)
    node = root
    while True:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.1:
            break
        node = node[key]
    action = chance.randrange(4)
    if action == 0:
        del node[key]
    elif action == 1:
        node[key] = chance.choice(list(node.values()) if isinstance(node, dict) else node)
    else:
        node[key] = chance.choice(HOSTILE_VALUES)
    return json.dumps(root).encode()


def mutated_header(data: bytes, chance: random.Random) -> bytes:
    """The same for a safetensors file's header, with its length put right."""
    length = int.from_bytes(data[:8], "little")
    header = mutated_json(data[8 : 8 + length], chance)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def use(path: Path) -> str:
    """Opens a model and touches all that it offers; the outcome, for the statistics."""
    try:
        with open_checkpoint(path) as checkpoint:
            manifest = build_manifest(checkpoint)
            assert decode_manifest(encode_manifest(manifest)) == manifest
        return "opened"
    except PotluckError as error:
        refusal = error
    if isinstance(refusal, BadModelFile):
        assert refusal.file
        assert refusal.field
        assert refusal.field.isprintable()
        assert len(str(refusal)) < 2000
    return refusal.code


def use_bounded(path: Path, what: str) -> str:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    start = time.perf_counter()
    try:
        outcome = use(path)
    except Exception as error:
        error.add_note(what)
        raise
    assert time.perf_counter() - start < MAX_SECONDS, what
    assert tracemalloc.get_traced_memory()[1] - before < MAX_BYTES, what
    return outcome


def run(
    base: str, data: bytes, header: int, target: Path, opened: Path, structured: Structured | None = None
) -> dict[str, int]:
    """Mutates `data` into `target`, again and again, and opens `opened`; every other time by `structured`, if given."""
    outcomes: dict[str, int] = {}
    tracemalloc.start()
    try:
        for number in range(COUNT // 5):
            chance = random.Random(f"{base} {number}")
            is_structured = structured is not None and number % 2
            target.write_bytes(structured(data, chance) if is_structured else mutated(data, header, chance))
            outcome = use_bounded(opened, f"{base} {number}")
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    finally:
        tracemalloc.stop()
    return outcomes


def rich_metadata() -> dict[str | bytes, object]:
    """All value types, and a tokenizer."""
    kinds = {f"test.{kind}": Typed(kind, 1) for kind in KINDS if kind not in ("str", "array", "bool")}
    tokens = ["<s>", "</s>", *(f"token{number}" for number in range(14))]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed("array", [3, 3] + [1] * 14, "i32"),
        "tokenizer.ggml.merges": ["t o", "to k"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    return metadata_of() | kinds | tokenizer | {"test.nested": [[1, 2], [3]], "test.bool": True}


def test_mutated_gguf_files(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA_FACTS, "Q4_0") | {
        "rope_freqs.weight": Tensor("F32", (4,), struct.pack("<4f", 1, 1, 2, 4))
    }
    data = gguf_bytes(rich_metadata(), tensors)
    header = len(data) - len(gguf_bytes({}, tensors)) + len(gguf_bytes({}, {})) + 64 * len(tensors)
    outcomes = run("gguf", data, header, tmp_path / "model.gguf", tmp_path / "model.gguf")
    # Were nearly all refused at the first byte, or none at all, the mutations would be worth nothing.
    assert outcomes["opened"] > COUNT // 500
    assert outcomes["bad_model_file"] > COUNT // 20


def test_mutated_gguf_counts_and_tensor_lists(tmp_path: Path) -> None:
    """Little metadata, so that most of the damage lands on counts, dimensions and offsets."""
    data = tiny_gguf()
    run("tensors", data, 2000, tmp_path / "model.gguf", tmp_path / "model.gguf")


def test_mutated_safetensors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    target = folder / "model.safetensors"
    data = target.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    outcomes = run("safetensors", data, header, target, folder, mutated_header)
    assert outcomes["bad_model_file"] > COUNT // 20


def test_mutated_indexes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", files=3)
    target = folder / "model.safetensors.index.json"
    data = target.read_bytes()
    run("index", data, len(data), target, folder, mutated_json)


def test_mutated_configs(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = write_folder(tmp_path / "model", LLAMA_CONFIG | {"rope_parameters": rope | {"rope_theta": 5e5}})
    target = folder / "config.json"
    data = target.read_bytes()
    outcomes = run("config", data, len(data), target, folder, mutated_json)
    assert outcomes["opened"] > COUNT // 500


def _array(element: str, count: int, payload: bytes = b"") -> Typed:
    return Typed("array", raw=struct.pack("<IQ", KINDS[element], count) + payload)


def _nested(depth: int) -> Typed:
    """Arrays in arrays, each holding the next."""
    return Typed("array", raw=struct.pack("<IQ", KINDS["array"], 1) * depth + struct.pack("<IQ", KINDS["u8"], 0))


def _gguf_with(**metadata: object) -> bytes:
    return tiny_gguf(metadata=metadata_of() | {key.replace("__", "."): value for key, value in metadata.items()})


def _gguf_without(name: str) -> bytes:
    return gguf_bytes(metadata_of(), {key: value for key, value in tensors_of(LLAMA_FACTS).items() if key != name})


def _chain(count: int) -> bytes:
    """Tensors of which each one covers the start of the next, and the last the first: a cycle of overlaps."""
    tensors = {f"t{number}": Tensor("F32", (16,), offset=32 * (number % (count - 1))) for number in range(count)}
    return gguf_bytes(metadata_of(), tensors)


HOSTILE_GGUF: Mapping[str, tuple[Callable[[], bytes], type[PotluckError]]] = {
    "empty": (lambda: b"", BadModelFile),
    "magic only": (lambda: b"GGUF", BadModelFile),
    "a pickle": (lambda: b"\x80\x04\x95" + bytes(200), BadModelFile),
    "counts at their maximum": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 2**64 - 1), BadModelFile),
    "tensor count at the limit": (lambda: gguf_bytes({}, {}, tensor_count=65_536), BadModelFile),
    "cut in the data": (lambda: tiny_gguf()[:-1], BadModelFile),
    "cut in the metadata": (lambda: tiny_gguf()[:100], BadModelFile),
    "an array of 2^60 strings": (lambda: _gguf_with(tokenizer__ggml__tokens=_array("str", 2**60)), BadModelFile),
    "an array of 4 million strings": (lambda: _gguf_with(x=_array("str", 2**22)), BadModelFile),
    "an array of 2^61 doubles": (lambda: _gguf_with(x=_array("f64", 2**61)), BadModelFile),
    "a string of 2^63 bytes": (lambda: _gguf_with(x=Typed("str", raw=struct.pack("<Q", 2**63))), BadModelFile),
    "arrays nested 10,000 deep": (lambda: _gguf_with(x=_nested(10_000)), BadModelFile),
    "a wide array of arrays": (lambda: _gguf_with(x=_array("array", 2**22, bytes(64))), BadModelFile),
    "bad UTF-8 in a key": (lambda: gguf_bytes({b"\xff\xfe": 1}, {}), BadModelFile),
    "bad UTF-8 in a value": (lambda: _gguf_with(general__name=b"\xc3\x28"), BadModelFile),
    "architecture of the wrong type": (lambda: _gguf_with(general__architecture=7), BadModelFile),
    "an unknown architecture": (lambda: _gguf_with(general__architecture="rwkv"), UnknownArchitecture),
    "layer count of the wrong type": (lambda: _gguf_with(llama__block_count="2"), BadModelFile),
    "a billion layers": (lambda: _gguf_with(llama__block_count=10**9), BadModelFile),
    "all overlapping in a cycle": (lambda: _chain(50), BadModelFile),
    "offset past the end": (lambda: tiny_gguf(extra=Tensor("F32", (8,), offset=2**63)), BadModelFile),
    "offset that wraps around": (lambda: tiny_gguf(extra=Tensor("F32", (8,), offset=2**64 - 32)), BadModelFile),
    "dimensions that overflow": (lambda: tiny_gguf(extra=Tensor("F32", (2**32,) * 4, data=b"")), BadModelFile),
    "an unknown quantisation": (
        lambda: tiny_gguf(token_embd__weight=Tensor("F32", (16, 32), type_id=23)), UnknownFormat,
    ),
    "a type from the future": (
        lambda: tiny_gguf(token_embd__weight=Tensor("F32", (16, 32), type_id=2**32 - 1)), UnknownFormat,
    ),
    "no embedding": (lambda: _gguf_without("token_embd.weight"), BadModelFile),
    "no second down projection": (lambda: _gguf_without("blk.1.ffn_down.weight"), BadModelFile),
    "an endless alignment": (lambda: _gguf_with(general__alignment=2**31), BadModelFile),
    "alignment zero": (lambda: _gguf_with(general__alignment=0), BadModelFile),
    "the same key twice": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("a") + struct.pack("<IB", 0, 1)) * 2, BadModelFile,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf_files(tmp_path: Path, name: str) -> None:
    make, expected = HOSTILE_GGUF[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(expected, match=r"model\.gguf"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def _entries(**entries: object) -> bytes:
    return _header(json.dumps(entries).encode(), bytes(64))


def _without(name: str) -> bytes:
    return safetensors_bytes({key: value for key, value in folder_tensors(LLAMA_CONFIG).items() if key != name})


HOSTILE_SAFETENSORS: Mapping[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "shorter than its length field": lambda: b"\1\0\0",
    "a header of 2^63 bytes": lambda: (2**63).to_bytes(8, "little") + b"{}",
    "a header longer than the file": lambda: (10**6).to_bytes(8, "little") + b"{}",
    "no JSON": lambda: _header(b"\x80\x04 pickle"),
    "bad UTF-8": lambda: _header(b'{"\xff": 1}'),
    "nested 100,000 deep": lambda: _header(b'{"a":' + b"[" * 100_000),
    "the same tensor twice": lambda: _header(b'{"a":1,"a":1}'),
    "offsets that overlap": lambda: _entries(
        a={"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        b={"dtype": "F32", "shape": [9], "data_offsets": [28, 64]},
    ),
    "offsets past the end": lambda: _entries(a={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}),
    "offsets backwards": lambda: _entries(a={"dtype": "F32", "shape": [8], "data_offsets": [32, 0]}),
    "a shape that overflows": lambda: _entries(a={"dtype": "F32", "shape": [2**48] * 8, "data_offsets": [0, 64]}),
    "a dtype from the future": lambda: _entries(a={"dtype": "F3", "shape": [64], "data_offsets": [0, 64]}),
    "wrong types": lambda: _entries(a={"dtype": 5, "shape": "x", "data_offsets": None}),
    "no embedding": lambda: _without("model.embed_tokens.weight"),
    "no output": lambda: _without("lm_head.weight"),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(HOSTILE_SAFETENSORS[name]())
    tracemalloc.start()
    try:
        with pytest.raises(BadModelFile, match="model"):
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
