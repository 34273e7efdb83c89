"""A stored model and a partial one beside it: chunks of the first, for tests of what fills the second."""

from pathlib import Path

import msgspec

from potluck.weights.manifest import CHUNK_BYTES, decode_manifest
from potluck.weights.partial_model import PartialModel
from potluck.weights.pull import Puller
from potluck.weights.store import ModelEntry, ModelStore
from tests.support.tiny_models import tiny_gguf


class WholeModel:
    """A model in a store of its own; `chunk` cuts bytes out of it."""

    def __init__(self, root: Path, source: Path, name: str = "tiny") -> None:
        self.store = ModelStore(root)
        self.entry: ModelEntry = Puller(self.store).pull(str(source), name, is_linked=True).entry
        self.checkpoint = self.store.open(name)
        self.manifest = decode_manifest(self.store.manifest(name))
        self.tokenizer = msgspec.json.encode(self.checkpoint.tokenizer)

    def chunk(self, tensor: str, number: int) -> bytes:
        return bytes(self.checkpoint.read(tensor)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])

    def empty_copy(self, root: Path) -> PartialModel:
        return ModelStore(root).create_partial(self.entry.id, self.manifest, self.tokenizer, "a test")

    def fill(self, partial: PartialModel, units: tuple[str, ...]) -> None:
        for missing in partial.begin(units):
            partial.put(missing.tensor, missing.chunk, self.chunk(missing.tensor, missing.chunk))


def whole_tiny(folder: Path) -> WholeModel:
    """Two layers, tied output, no tokenizer; every tensor is a single small chunk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.gguf").write_bytes(tiny_gguf())
    return WholeModel(folder / "models", folder / "tiny.gguf")
