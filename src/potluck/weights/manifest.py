"""What a model consists of, as hashes: its facts, its tokenizer, and every tensor in chunks of 1 MiB.

The hash of the encoded manifest is the model's `weights_sha256`; a node that holds a few layers can prove that they are
the right ones. Where the bytes come from, and where a manifest is kept, is somebody else's business.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec

from potluck.core.errors import BadModelFile, WeightsMismatch
from potluck.core.model_facts import ModelFacts
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.weights.checkpoint import BLOCKS, Checkpoint, TensorEntry, TensorFormat
from potluck.weights.expected_tensors import expected_tensors, known_formats
from potluck.weights.fact_checks import check_facts
from potluck.weights.progress import Progress, Silence
from potluck.weights.source_tensor import shown, shown_name

VERSION = 1
CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20  # hashes of about a terabyte of weights
MAX_THREADS = 4

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

Sha256 = Annotated[str, msgspec.Meta(max_length=64)]  # in hexadecimal; the digits are checked apart, which is faster


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # canonical
    format: TensorFormat
    shape: tuple[int, ...]
    size_bytes: int
    chunks: tuple[Sha256, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tensors stand in the order in which a token meets them; nothing in here depends on where the files lie."""

    version: int = VERSION
    facts: ModelFacts
    tokenizer_sha256: Sha256 | None  # covers the chat template; None where the files have no tokenizer
    tensors: tuple[TensorRecord, ...]

    def __repr__(self) -> str:
        return f"<Manifest {self.facts.name}: {len(self.tensors)} tensors, {weights_sha256(self)[:12]}>"


def build_manifest(checkpoint: Checkpoint, progress: Progress | None = None) -> Manifest:
    """Reads and hashes every tensor once."""
    progress = progress or Silence()
    names = list(expected_tensors(checkpoint.facts))
    progress.start("hashing", sum(checkpoint.tensors[name].size_bytes for name in names))
    records = []
    # hashlib lets other threads run while it works on a chunk.
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for record in pool.map(lambda name: _record(checkpoint, name), names):
            progress.advance(record.size_bytes)
            records.append(record)
    progress.finish()
    return Manifest(
        facts=checkpoint.facts, tokenizer_sha256=tokenizer_sha256(checkpoint.tokenizer), tensors=tuple(records)
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Always the same bytes for the same manifest."""
    return msgspec.json.encode(manifest, order="deterministic")


def weights_sha256(manifest: Manifest) -> str:
    return hashlib.sha256(encode_manifest(manifest)).hexdigest()


def tokenizer_sha256(tokenizer: TokenizerSpec | None) -> str | None:
    if tokenizer is None:
        return None
    return hashlib.sha256(msgspec.json.encode(tokenizer, order="deterministic")).hexdigest()


def decode_manifest(data: bytes, source: object = "manifest") -> Manifest:
    """Reads a manifest from anybody and checks that it is whole and consistent. Raises BadModelFile."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise BadModelFile(source, "size", f"{len(data)} bytes are more than the limit of {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadModelFile(source, "content", shown(str(error), 200)) from None
    if manifest.version != VERSION:
        raise BadModelFile(source, "version", f"{manifest.version} is not supported; known: {VERSION}")
    check_facts(manifest.facts, source)
    if manifest.tokenizer_sha256 is not None:
        _check_hash(source, "tokenizer_sha256", manifest.tokenizer_sha256)
    _check_records(source, manifest)
    return manifest


def verify_tensors(checkpoint: Checkpoint, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares the named tensors, format, shape and bytes. Raises WeightsMismatch at the first difference."""
    records = {record.name: record for record in manifest.tensors}
    for name in names:
        entry = checkpoint.tensors.get(name)
        record = records.get(name)
        if entry is None or record is None:
            raise WeightsMismatch(f"{shown_name(name)}: is not in the {'files' if entry is None else 'manifest'}")
        _verify_shape(entry, record)
        _verify_chunks(checkpoint.read(name), record)


def chunk_bytes(record: TensorRecord, chunk: int) -> int:
    """The size of one of a tensor's chunks; only the last may be small."""
    return min(CHUNK_BYTES, record.size_bytes - chunk * CHUNK_BYTES)


def is_right_chunk(record: TensorRecord, chunk: int, data: bytes | memoryview) -> bool:
    return len(data) == chunk_bytes(record, chunk) and hashlib.sha256(data).hexdigest() == record.chunks[chunk]


def _record(checkpoint: Checkpoint, name: str) -> TensorRecord:
    entry = checkpoint.tensors[name]
    data = checkpoint.read(name)
    chunks = tuple(_chunk_hash(data, chunk) for chunk in range(_chunk_count(entry.size_bytes)))
    return TensorRecord(name, entry.format, entry.shape, entry.size_bytes, chunks)


def _chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def _chunk_hash(data: memoryview, chunk: int) -> str:
    return hashlib.sha256(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]).hexdigest()


def _verify_shape(entry: TensorEntry, record: TensorRecord) -> None:
    if (entry.format, entry.shape, entry.size_bytes) != (record.format, record.shape, record.size_bytes):
        raise WeightsMismatch(
            f"{entry.name}: the file has {entry.format} {entry.shape}, the manifest {record.format} {record.shape}"
        )


def _verify_chunks(data: memoryview, record: TensorRecord) -> None:
    for chunk, expected in enumerate(record.chunks):
        if _chunk_hash(data, chunk) != expected:
            raise WeightsMismatch(f"{record.name}: chunk {chunk} of {len(record.chunks)} differs from the manifest")


def _check_records(source: object, manifest: Manifest) -> None:
    expected = expected_tensors(manifest.facts)
    names = [record.name for record in manifest.tensors]
    if names != list(expected):
        raise BadModelFile(source, "tensors", f"{len(names)} names are not the {len(expected)} that the facts call for")
    for record in manifest.tensors:
        _check_record(source, record, expected[record.name])


def _check_record(source: object, record: TensorRecord, shape: tuple[int, ...]) -> None:
    block_elements, block_bytes = BLOCKS[record.format]
    if record.shape != shape or shape[-1] % block_elements or record.format not in known_formats(shape):
        raise BadModelFile(source, f"{record.name}.shape", f"{record.format} {shown(record.shape)} is not {shape}")
    if record.size_bytes != math.prod(shape) // block_elements * block_bytes:
        raise BadModelFile(source, f"{record.name}.size_bytes", f"{record.size_bytes} does not fit the shape")
    if len(record.chunks) != _chunk_count(record.size_bytes):
        raise BadModelFile(source, f"{record.name}.chunks", f"{len(record.chunks)} hashes are too few or too many")
    for chunk in record.chunks:
        _check_hash(source, f"{record.name}.chunks", chunk)


def _check_hash(source: object, field: str, text: str) -> None:
    if _SHA256.fullmatch(text) is None:
        raise BadModelFile(source, field, f"{shown(text)} is not a SHA-256 in hexadecimal")
