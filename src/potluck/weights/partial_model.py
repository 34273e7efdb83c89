"""A model of which a node has some units only: one file each, which appears whole, by rename, once every chunk of it was verified.

    smollm2-135m/
      entry.json, manifest.json   as for any model
      tokenizer-spec.json         the tokenizer that the manifest covers
      units/layer-0003.weights    complete: all its chunks had the manifest's hashes, and are on the disk
      units/layer-0004.part       under way; which of its chunks are right, the manifest's hashes tell after any crash

Only complete files are ever mapped. Removing one that is mapped takes nothing from whoever maps it. Knows no peers and no networks.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from potluck.core.errors import BadModelFile, WeightsMismatch, WeightsMissing
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.weights import host_files
from potluck.weights.checkpoint import TensorEntry
from potluck.weights.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    chunk_bytes,
    decode_manifest,
    is_right_chunk,
    tokenizer_sha256,
)
from potluck.weights.mapped_file import MappedFile
from potluck.weights.progress import Progress, Silence
from potluck.weights.tokenizer_rules import check_spec
from potluck.weights.units import Held, MissingChunk, Place, Unit, cut_into_units, held_of, shown_units, unit_of

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer-spec.json"
MAX_TOKENIZER_BYTES = 64 << 20
_UNITS = "units"
_COMPLETE, _PART = ".weights", ".part"


class WriteTimes(msgspec.Struct):
    """Seconds of work, summed over threads."""

    verify_s: float = 0.0
    write_s: float = 0.0


def is_partial(folder: Path) -> bool:
    return (folder / TOKENIZER_NAME).is_file()


def held_units(folder: Path) -> tuple[str, ...]:
    """The units of which the folder has a complete file; sizes are checked by whoever opens one."""
    units = folder / _UNITS
    if not units.is_dir():
        return ()
    return tuple(sorted(path.stem for path in units.iterdir() if path.suffix == _COMPLETE))


def sound_units(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Those of them that have their size; a file that a full disk cut short is fetched again."""
    units = cut_into_units(manifest)
    return tuple(name for name in held_units(folder) if name in units and _has_size(folder, units[name]))


def held_bytes(folder: Path) -> int:
    return sum(_complete_path(folder, name).stat().st_size for name in held_units(folder))


def read_manifest(folder: Path) -> Manifest:
    return decode_manifest(_read_bounded(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES), folder / MANIFEST_NAME)


def decode_tokenizer(data: bytes, manifest: Manifest, source: object) -> TokenizerSpec | None:
    """A tokenizer from anybody, if the manifest covers it. Raises WeightsMismatch, and BadModelFile where it is of no use."""
    try:
        spec = msgspec.json.decode(data, type=TokenizerSpec | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise WeightsMismatch(f"{source} is something else than a tokenizer") from None
    if tokenizer_sha256(spec) != manifest.tokenizer_sha256:
        raise WeightsMismatch(f"{source} is a tokenizer that the manifest does not cover")
    return None if spec is None else check_spec(spec, str(source))


def read_tokenizer(folder: Path, manifest: Manifest) -> TokenizerSpec | None:
    path = folder / TOKENIZER_NAME
    return decode_tokenizer(_read_bounded(path, MAX_TOKENIZER_BYTES), manifest, path)


def partial_tensors(folder: Path, manifest: Manifest) -> dict[str, TensorEntry]:
    """Where every tensor lies, or will lie once its unit is there."""
    return {
        place.record.name: TensorEntry(
            place.record.name,
            place.record.name,
            place.record.format,
            place.record.shape,
            _complete_path(folder, unit.name),
            place.offset,
            place.record.size_bytes,
        )
        for unit in cut_into_units(manifest).values()
        for place in unit.places
    }


class UnitFiles(Mapping[Path, MappedFile]):
    """The complete units of a folder, mapped when first asked for; also those that came after this was made."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._units = {_complete_path(folder, unit.name): unit for unit in cut_into_units(manifest).values()}
        self._layer_count = manifest.facts.layer_count
        self._mapped: dict[Path, MappedFile] = {}

    def __getitem__(self, path: Path) -> MappedFile:
        """Raises WeightsMissing where the unit is not complete, BadModelFile where somebody changed its size."""
        mapped = self._mapped.get(path)
        if mapped is None:
            mapped = self._mapped[path] = self._map(path)
        return mapped

    def _map(self, path: Path) -> MappedFile:
        unit = self._units[path]
        if not path.is_file():
            raise WeightsMissing(f"{shown_units([unit.name], self._layer_count)} is not held here")
        mapped = MappedFile(path)
        if mapped.size_bytes != unit.size_bytes:
            mapped.close()
            raise BadModelFile(path, "size", f"{mapped.size_bytes} bytes are not the {unit.size_bytes} of the manifest")
        return mapped

    def __iter__(self) -> Iterator[Path]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)


class PartialModel:
    """The side that writes. `put` may be called from several threads; everything else by one owner, who holds the store's lock."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.units: Mapping[str, Unit] = cut_into_units(manifest)
        self.times = WriteTimes()
        self._lock = threading.Lock()
        self._right: dict[str, set[tuple[str, int]]] = {}  # verified chunks of units under way

    def __repr__(self) -> str:
        return f"<PartialModel {self.folder.name}: {self.held}, {len(self._right)} units under way>"

    @property
    def held(self) -> Held:
        return held_of(sound_units(self.folder, self.manifest), self.manifest.facts.layer_count)

    def missing_units(self, wanted: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in wanted if not self._is_complete(name))

    def begin(self, wanted: Iterable[str], progress: Progress | None = None) -> list[MissingChunk]:
        """What is to be fetched for these units, after a look (by hash) at what an earlier attempt left."""
        progress = progress or Silence()
        names = self.missing_units(wanted)
        (self.folder / _UNITS).mkdir(exist_ok=True)
        missing: list[MissingChunk] = []
        for name in names:
            missing += self._begin(self.units[name], progress)
        return missing

    def put(self, tensor: str, chunk: int, data: bytes) -> None:
        """Writes one chunk; the last one of a unit makes it appear. Raises WeightsMismatch (and writes nothing), OSError."""
        unit = self.units[unit_of(tensor)]
        place = _place(unit, tensor)
        began_s = time.perf_counter()
        if not is_right_chunk(place.record, chunk, data):
            raise WeightsMismatch(f"{tensor}: chunk {chunk} differs from the manifest")
        verified_s = time.perf_counter()
        if not self._is_complete(unit.name):
            with self._part_path(unit.name).open("r+b") as file:
                file.seek(place.offset + chunk * CHUNK_BYTES)
                file.write(data)
        self._note(unit, (tensor, chunk), verified_s - began_s, time.perf_counter() - verified_s)

    def drop(self, names: Iterable[str]) -> None:
        """Gives the space of these units back, whole or under way, and that of their packed form."""
        for name in names:
            self._right.pop(name, None)
            self._complete_path(name).unlink(missing_ok=True)
            self._part_path(name).unlink(missing_ok=True)
            for packed in (self.folder / "packed").glob(f"{name}.*.packed"):
                packed.unlink(missing_ok=True)

    # ------------------------------------------------------------ one unit

    def _begin(self, unit: Unit, progress: Progress) -> list[MissingChunk]:
        path = self._part_path(unit.name)
        right: set[tuple[str, int]] = set()
        if path.is_file() and path.stat().st_size == unit.size_bytes:
            progress.start(f"checking {path.name}", unit.size_bytes)
            right = _right_chunks(path, unit, progress)
            progress.finish()
        else:
            with path.open("wb") as file:
                file.truncate(unit.size_bytes)
        if len(right) == unit.chunk_count:  # killed between the last chunk and the rename
            self._finish(unit)
        else:
            self._right[unit.name] = right
        return [chunk for chunk in _all_chunks(unit) if (chunk.tensor, chunk.chunk) not in right]

    def _note(self, unit: Unit, chunk: tuple[str, int], verify_s: float, write_s: float) -> None:
        with self._lock:
            self.times.verify_s += verify_s
            self.times.write_s += write_s
            right = self._right.get(unit.name)
            if right is None:  # complete already: this chunk came twice
                return
            right.add(chunk)
            if len(right) < unit.chunk_count:
                return
            del self._right[unit.name]
        self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Every chunk was verified: on the disk first, then under its name."""
        host_files.sync_file(self._part_path(unit.name))
        self._part_path(unit.name).replace(self._complete_path(unit.name))
        host_files.sync_folder(self.folder / _UNITS)

    def _is_complete(self, name: str) -> bool:
        return _has_size(self.folder, self.units[name])

    def _complete_path(self, name: str) -> Path:
        return _complete_path(self.folder, name)

    def _part_path(self, name: str) -> Path:
        return self.folder / _UNITS / f"{name}{_PART}"


def _complete_path(folder: Path, name: str) -> Path:
    return folder / _UNITS / f"{name}{_COMPLETE}"


def _has_size(folder: Path, unit: Unit) -> bool:
    path = _complete_path(folder, unit.name)
    return path.is_file() and path.stat().st_size == unit.size_bytes


def _place(unit: Unit, tensor: str) -> Place:
    return next(place for place in unit.places if place.record.name == tensor)


def _all_chunks(unit: Unit) -> list[MissingChunk]:
    return [
        MissingChunk(place.record.name, chunk, chunk_bytes(place.record, chunk))
        for place in unit.places
        for chunk in range(len(place.record.chunks))
    ]


def _right_chunks(path: Path, unit: Unit, progress: Progress) -> set[tuple[str, int]]:
    right = set()
    with path.open("rb") as file:
        for place in unit.places:
            for chunk in range(len(place.record.chunks)):
                file.seek(place.offset + chunk * CHUNK_BYTES)
                data = file.read(chunk_bytes(place.record, chunk))
                if is_right_chunk(place.record, chunk, data):
                    right.add((place.record.name, chunk))
                progress.advance(len(data))
    return right


def _read_bounded(path: Path, limit_bytes: int) -> bytes:
    try:
        if path.stat().st_size > limit_bytes:
            raise BadModelFile(path, "size", f"is more than {limit_bytes} bytes")
        return path.read_bytes()
    except OSError as error:
        raise BadModelFile(path, "file", f"cannot be read: {error}") from error
