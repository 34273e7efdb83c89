"""A home for a node whose weights are wrong: the manifest is the model's, and one bit of every chunk is not. For tests and benchmarks."""

import shutil
from pathlib import Path

from potluck.core.paths import Folders
from potluck.weights.manifest import CHUNK_BYTES
from potluck.weights.store import ENTRY_NAME, MANIFEST_NAME, ModelStore


def make_lying_home(home: Path, model: str, folders: Folders) -> Path:
    """Copies a stored model out of `folders` to `home` with wrong bytes; compiled kernels are used from where they are."""
    store, target = ModelStore(folders.models), home / "models" / model
    target.mkdir(parents=True)
    folders.cache.mkdir(parents=True, exist_ok=True)
    (home / "cache").symlink_to(folders.cache)
    for name in (ENTRY_NAME, MANIFEST_NAME, *(file.name for file in store.find(model).files)):
        shutil.copyfile(folders.models / model / name, target / name)
    checkpoint = store.open(model)
    try:
        for entry in checkpoint.tensors.values():
            _flip(target / entry.file.name, range(entry.offset, entry.offset + entry.size_bytes, CHUNK_BYTES))
    finally:
        checkpoint.close()
    return home


def _flip(path: Path, places: range) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
