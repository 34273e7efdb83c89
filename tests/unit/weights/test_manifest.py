"""Manifests: the same hash for the same model, whatever the file; every changed byte, shape or claim is noticed."""

import json
from pathlib import Path

import msgspec
import pytest

from potluck.core.errors import BadModelFile, WeightsMismatch
from potluck.core.model_facts import ModelFacts
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.weights.checkpoint import TensorEntry, TensorFormat
from potluck.weights.expected_tensors import expected_tensors
from potluck.weights.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    build_manifest,
    decode_manifest,
    encode_manifest,
    tokenizer_sha256,
    verify_tensors,
    weights_sha256,
)
from tests.support.tiny_models import LLAMA_FACTS

TOKENIZER = TokenizerSpec(algorithm="byte_bpe", tokens=("a", "b"), kinds=(1, 1), chat_template="{{ messages }}")
# An embedding of more than two chunks.
FACTS = msgspec.structs.replace(LLAMA_FACTS, vocabulary_size=(2 * CHUNK_BYTES + 4096) // (4 * 32), layer_count=1)


class MemoryCheckpoint:
    """A Checkpoint whose tensors are bytes in memory, all F32, counting upwards."""

    def __init__(self, facts: ModelFacts = FACTS, tokenizer: TokenizerSpec | None = TOKENIZER) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.data: dict[str, bytearray] = {}
        self.tensors: dict[str, TensorEntry] = {}
        form: TensorFormat = "F32"
        for name, shape in expected_tensors(facts).items():
            size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            self.data[name] = bytearray((bytes(range(256)) * (size // 256 + 1))[:size])
            self.tensors[name] = TensorEntry(name, name, form, shape, Path("memory"), 0, size)

    def read(self, name: str) -> memoryview:
        return memoryview(self.data[name])

    def close(self) -> None:
        pass


class Recorder:
    def __init__(self) -> None:
        self.total = self.done = 0
        self.is_finished = False

    def start(self, what: str, total_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, size_bytes: int) -> None:
        self.done += size_bytes

    def finish(self) -> None:
        self.is_finished = True

    def say(self, message: str) -> None:
        raise AssertionError(message)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return build_manifest(MemoryCheckpoint())


def test_what_it_lists(manifest: Manifest) -> None:
    assert [record.name for record in manifest.tensors] == list(expected_tensors(FACTS))
    assert len(manifest.tensors[0].chunks) == 3
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_hash_is_a_constant_of_the_model(manifest: Manifest) -> None:
    again = build_manifest(MemoryCheckpoint())
    assert weights_sha256(again) == weights_sha256(manifest)
    # Pinned: a change here makes every stored model a different one, so it needs a new manifest version.
    assert weights_sha256(manifest) == "07b5e90341a7e25408e15e4f00f803a19bc030e33b47574a25ea3ab7c0d66013"


def test_it_covers_facts_tokenizer_and_template(manifest: Manifest) -> None:
    other_facts = MemoryCheckpoint(msgspec.structs.replace(FACTS, norm_epsilon=1e-6))
    other_template = MemoryCheckpoint(tokenizer=msgspec.structs.replace(TOKENIZER, chat_template=None))
    without = MemoryCheckpoint(tokenizer=None)
    hashes = {weights_sha256(build_manifest(checkpoint)) for checkpoint in (other_facts, other_template, without)}
    assert len(hashes | {weights_sha256(manifest)}) == 4
    assert tokenizer_sha256(None) is None


def test_progress_counts_every_byte() -> None:
    recorder = Recorder()
    checkpoint = MemoryCheckpoint()
    build_manifest(checkpoint, recorder)
    assert recorder.done == recorder.total == sum(entry.size_bytes for entry in checkpoint.tensors.values())
    assert recorder.is_finished


def test_a_part_can_be_verified_alone(manifest: Manifest) -> None:
    checkpoint = MemoryCheckpoint()
    names = [name for name in checkpoint.tensors if name.startswith("layers.0.")]
    del checkpoint.data["embedding"]
    verify_tensors(checkpoint, manifest, names)


@pytest.mark.parametrize(("position", "chunk"), [(0, 0), (CHUNK_BYTES - 1, 0), (CHUNK_BYTES, 1), (-1, 2)])
def test_a_flipped_bit_is_located(manifest: Manifest, position: int, chunk: int) -> None:
    checkpoint = MemoryCheckpoint()
    checkpoint.data["embedding"][position] ^= 1
    with pytest.raises(WeightsMismatch, match=f"embedding: chunk {chunk} of 3"):
        verify_tensors(checkpoint, manifest, ["output_norm", "embedding"])


def test_shapes_and_names_are_compared(manifest: Manifest) -> None:
    checkpoint = MemoryCheckpoint()
    entry = checkpoint.tensors["layers.0.key"]
    checkpoint.tensors["layers.0.key"] = msgspec.structs.replace(entry, shape=(32, 16))
    with pytest.raises(WeightsMismatch, match=r"layers\.0\.key"):
        verify_tensors(checkpoint, manifest, ["layers.0.key"])
    with pytest.raises(WeightsMismatch, match=r"layers\.7\.key"):
        verify_tensors(checkpoint, manifest, ["layers.7.key"])
    wider = MemoryCheckpoint(msgspec.structs.replace(FACTS, layer_count=2))
    with pytest.raises(WeightsMismatch, match="manifest"):
        verify_tensors(wider, manifest, ["layers.1.key"])


def changed(manifest: Manifest, *path: object, value: object) -> bytes:
    content = json.loads(encode_manifest(manifest))
    part = content
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("version",), None),
        (("extra",), 1),
        (("facts", "layer_count"), 2),
        (("facts", "layer_count"), 10**9),
        (("facts", "head_size"), 7),
        (("facts", "activation"), "relu"),
        (("facts", "norm_epsilon"), 0.0),
        (("facts", "name"), "x" * 1000),
        (("facts", "sliding_layers"), [True, True]),
        (("facts", "sliding_layers"), [True]),
        (("facts", "has_feed_forward_bias"), True),
        (("facts", "rotary", "base"), -1),
        (("facts", "rotary", "dimensions"), 64),
        (("facts", "rotary", "scaling"), {"kind": "factors", "factors": [1.0]}),
        (("facts", "rotary", "scaling"), {"kind": "yarn", "factor": 2.0}),
        (("facts", "rotary", "scaling"), {"kind": "linear", "factors": [1.0] * 4}),
        (("facts", "rotary_local"), {"form": "halves", "base": 1e99, "dimensions": 8}),
        (("facts", "attention_scale"), 0.0),
        (("facts", "output_soft_cap"), -1.0),
        (("facts", "embedding_scale"), 1e30),
        (("tokenizer_sha256",), "abc"),
        (("tensors",), []),
        (("tensors", 0, "name"), "output"),
        (("tensors", 0, "format"), "IQ2_XXS"),
        (("tensors", 0, "shape"), [1, 32]),
        (("tensors", 0, "size_bytes"), -4),
        (("tensors", 0, "chunks"), []),
        (("tensors", 0, "chunks", 1), "0" * 63),
        (("tensors", 0, "chunks", 1), "Z" * 64),
        (("tensors", 0, "chunks", 1), "0" * 10_000),
        (("tensors", -1, "format"), "Q8_0"),
    ],
)
def test_claims_that_do_not_hold_together(manifest: Manifest, path: tuple[object, ...], value: object) -> None:
    with pytest.raises(BadModelFile):
        decode_manifest(changed(manifest, *path, value=value))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"facts":' * 100_000])
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(BadModelFile):
        decode_manifest(data)


def test_its_length_is_bounded() -> None:
    with pytest.raises(BadModelFile, match="limit"):
        decode_manifest(bytes(MAX_MANIFEST_BYTES + 1))
