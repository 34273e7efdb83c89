"""The models on this machine: one folder each, which appears and disappears whole. Knows no sources and no networks.

    models/
      smollm2-135m/        the GGUF file, or the files of a Hugging Face folder
        entry.json         what `potluck models` shows, and the SHA-256 of each file
        manifest.json      every tensor with its hashes; its own hash is the model's weights_sha256
      qwen2.5-1.5b/        a partial model: some layers, in files of their own (see partial_model.py)
      .staging/
        smollm2-135m/      an unfinished pull: `files` becomes the model's folder, `downloads` holds partial files
        smollm2-135m.lock  held while somebody works on that staging folder

A model's folder is renamed into place once all its bytes are checked and on the disk, so whatever is there is complete.
Of a partial model the same holds for each unit.
"""

import collections
import contextlib
import datetime
import hashlib
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from potluck.core.errors import (
    BadModelFile,
    BadRequest,
    DownloadFailed,
    ModelNotFound,
    PotluckError,
    UnknownArchitecture,
    WeightsMismatch,
)
from potluck.weights import host_files
from potluck.weights.catalogue import CATALOGUE
from potluck.weights.checkpoint import Checkpoint
from potluck.weights.progress import Progress, Silence

if TYPE_CHECKING:
    from potluck.weights.manifest import Manifest
    from potluck.weights.partial_model import PartialModel
    from potluck.wire.messages import Stage

StoredFormat = Literal["gguf", "safetensors", "partial"]

ENTRY_NAME = "entry.json"
MANIFEST_NAME = "manifest.json"
_STAGING = ".staging"
_ENTRY_LIMIT_BYTES = 4 << 20
_ABANDONED_AFTER_S = 14 * 86400  # a partial download that nobody came back for
# The first character keeps ids apart from `.staging`, from `..` and from options on a command line.
_MODEL_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)


class StoredFile(msgspec.Struct, frozen=True):
    name: str  # directly in the model's folder
    size_bytes: int
    sha256: str


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What entry.json holds: enough to list a model without opening it."""

    id: str
    source: str  # as given to `potluck pull`, paths made absolute
    format: StoredFormat
    size_bytes: int
    files: tuple[StoredFile, ...]
    weights_sha256: str
    added_at: str  # ISO 8601, UTC
    family: str
    layer_count: int
    parameter_count: int
    context_length: int
    quantisation: str  # the format that most bytes have
    held: str | None = None  # of a partial model: its layers, `0-14`; found in the folder, not in entry.json


class Staging(msgspec.Struct, frozen=True):
    """A folder in which a model is put together. Only valid while its lock is held."""

    model_id: str
    folder: Path

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def downloads(self) -> Path:
        return self.folder / "downloads"


def require_model_id(text: str) -> str:
    if _MODEL_ID.fullmatch(text) is None:
        raise BadRequest(
            f"{text!r} cannot be a model's id: use up to 64 of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        )
    return text


class ModelStore:
    """The models under `root`. Several processes may use one store; each model is changed by one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"ModelStore({str(self.root)!r}, {len(self._folder_names())} models)"

    def find(self, name: str) -> ModelEntry:
        """The model with exactly this id. Raises ModelNotFound, or BadModelFile where its entry is damaged."""
        if name not in self._folder_names():
            raise ModelNotFound(self._not_found(name))
        return _read_entry(self.root / name)

    def path(self, name: str) -> Path:
        """What `open_checkpoint` takes: the GGUF file, or the folder."""
        entry = self.find(name)
        folder = self.root / entry.id
        return folder / entry.files[0].name if entry.format == "gguf" else folder

    def manifest(self, name: str) -> bytes:
        """The encoded manifest, whose hash is the model's weights_sha256. Raises WeightsMismatch where it is not."""
        entry = self.find(name)
        path = self.root / entry.id / MANIFEST_NAME
        data = path.read_bytes() if path.is_file() else None
        if data is None or hashlib.sha256(data).hexdigest() != entry.weights_sha256:
            found = "is missing" if data is None else "is not the one that the model had"
            raise WeightsMismatch(f"{path} {found}; {_pull_again(entry.id)}")
        return data

    def packed_folder(self, name: str) -> Path:
        """Where the engine may keep this model's packed weights: beside the model, and gone with it."""
        return self.root / self.find(name).id / "packed"

    def open(self, name: str) -> Checkpoint:
        """Opens a model after a look at its files' sizes; raises WeightsMismatch where somebody changed them."""
        from potluck.weights.open_model import open_checkpoint

        self._require_sizes(self.find(name))
        try:
            return open_checkpoint(self.path(name))
        except UnknownArchitecture:
            raise
        except BadModelFile as error:
            raise BadModelFile(error.file, error.field, f"{error.problem}; {_pull_again(name)}") from None

    def fault(self, name: str, is_opened: bool = False) -> str | None:
        """What is wrong with a model, with what to type; None where entry, manifest and sizes are right.

        `is_opened`: and its files can be understood, which takes longer.
        """
        try:
            self._require_sizes(self.find(name))
            self.manifest(name)
            if is_opened:
                self.open(name).close()
        except PotluckError as error:
            return str(error)
        return None

    def find_weights(self, weights_sha256: str) -> ModelEntry | None:
        """A model with exactly these weights, the whole one where there are several."""
        fitting = [entry for entry in self.list() if entry.weights_sha256 == weights_sha256]
        return min(fitting, key=lambda entry: entry.format == "partial", default=None)

    def partial(self, name: str) -> "PartialModel":
        """A partial model, for its writer. Raises BadRequest for a whole one, WeightsMismatch for a changed manifest."""
        from potluck.weights.manifest import weights_sha256
        from potluck.weights.partial_model import PartialModel, read_manifest

        entry = self.find(name)
        if entry.format != "partial":
            raise BadRequest(f"{name} is whole; nothing can be added to it or dropped")
        manifest = read_manifest(self.root / name)
        if weights_sha256(manifest) != entry.weights_sha256:
            raise WeightsMismatch(f"the manifest of {name} is not the one it had; `potluck remove {name}`")
        return PartialModel(self.root / name, manifest)

    def create_partial(self, model_id: str, manifest: "Manifest", tokenizer: bytes, source: str) -> "PartialModel":
        """A partial model that holds nothing yet, or the one that is there. Both parts were checked by the caller."""
        from potluck.weights.manifest import encode_manifest, weights_sha256
        from potluck.weights.open_model import open_checkpoint
        from potluck.weights.partial_model import TOKENIZER_NAME

        with self.stage(model_id) as staging:
            if model_id in self._folder_names():
                if self.find(model_id).weights_sha256 != weights_sha256(manifest):
                    raise BadRequest(
                        f"the store has another model called {model_id}; `potluck remove {model_id}` first"
                    )
                return self.partial(model_id)
            _drop_others(staging.files, set())
            (staging.files / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
            (staging.files / TOKENIZER_NAME).write_bytes(tokenizer)
            with contextlib.closing(open_checkpoint(staging.files)) as checkpoint:
                entry = _make_entry(model_id, "partial", source, (), checkpoint, weights_sha256(manifest))
            (staging.files / ENTRY_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
            self._publish(staging)
        return self.partial(model_id)

    def keep_only(self, name: str, stages: Sequence["Stage"]) -> None:
        """Drops every unit of a partial model that none of these stages needs. Processes that map one keep what they have."""
        from potluck.weights.units import stage_units

        with self.working_on(name):
            partial = self.partial(name)
            kept = {unit for stage in stages for unit in stage_units(partial.manifest.facts, stage)}
            partial.drop(unit for unit in partial.units if unit not in kept)

    def working_on(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Held by whoever changes a model; a second one is refused with BadRequest."""
        return self._lock(require_model_id(name))

    def remove(self, name: str) -> None:
        """Makes the model disappear at once, then frees its space; its unfinished pulls go too."""
        is_stored = name in self._folder_names()
        if not is_stored and not (is_model_id(name) and self._staging_folder(name).exists()):
            raise ModelNotFound(self._not_found(name))
        with self._lock(name):
            with self._out_of_the_way(name):
                pass
            shutil.rmtree(self._staging_folder(name), ignore_errors=True)

    @contextlib.contextmanager
    def stage(self, model_id: str) -> Iterator[Staging]:
        """A locked staging folder, with what an earlier attempt left there; partial downloads outlive a failure."""
        require_model_id(model_id)
        with self._lock(model_id):
            self._sweep()
            staging = Staging(model_id, self._staging_folder(model_id))
            staging.files.mkdir(parents=True, exist_ok=True)
            staging.downloads.mkdir(exist_ok=True)
            try:
                yield staging
            except PotluckError as error:
                # What cannot become a model is of no use to the next attempt; half a download is.
                if not isinstance(error, DownloadFailed):
                    shutil.rmtree(staging.folder, ignore_errors=True)
                raise
            if not _holds_files(staging.folder):
                shutil.rmtree(staging.folder, ignore_errors=True)

    def reuse(self, entry: ModelEntry, staging: Staging) -> None:
        """Stages those files of a damaged model whose size is right; whoever fills the rest checks their hashes."""
        for file in entry.files:
            path = self.root / entry.id / file.name
            if is_whole(path, file) and not (staging.files / file.name).exists():
                with contextlib.suppress(OSError):  # a file system without links: it is brought again as well
                    os.link(path, staging.files / file.name)

    def admit(
        self,
        staging: Staging,
        files: Sequence[StoredFile],
        *,
        format: StoredFormat,  # noqa: A002 (the entry's own word)
        source: str,
        progress: Progress | None = None,
    ) -> ModelEntry:
        """Opens what was staged, writes its manifest and entry, and renames it into the store.

        `files` were verified by the caller. Whatever else lies among the staged files is thrown away first.
        """
        from potluck.weights.manifest import build_manifest, encode_manifest, weights_sha256
        from potluck.weights.open_model import open_checkpoint

        _drop_others(staging.files, {file.name for file in files})
        target = staging.files / files[0].name if format == "gguf" else staging.files
        with contextlib.closing(open_checkpoint(target)) as checkpoint:
            manifest = build_manifest(checkpoint, progress or Silence())
            (staging.files / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
            entry = _make_entry(staging.model_id, format, source, files, checkpoint, weights_sha256(manifest))
        (staging.files / ENTRY_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
        self._publish(staging)
        return entry

    def damaged(self, are_opened: bool = False) -> dict[str, str]:
        """Folders that are not ours, or were harmed after they were stored, each with its `fault`."""
        faults = {name: self.fault(name, are_opened) for name in self._folder_names()}
        return {name: fault for name, fault in faults.items() if fault is not None}

    def list(self) -> tuple[ModelEntry, ...]:
        """Every readable model, by id. (Last, because its name hides the built-in one from annotations below it.)"""
        entries = (_try_entry(self.root / name) for name in self._folder_names())
        return tuple(entry for entry in entries if entry is not None)

    def _publish(self, staging: Staging) -> None:
        for path in staging.files.iterdir():
            # A hard link to somebody's read-only file is theirs and on the disk already.
            with contextlib.suppress(PermissionError):
                host_files.sync_file(path)
        host_files.sync_folder(staging.files)
        with self._out_of_the_way(staging.model_id):  # a damaged one is there until this one can take its place
            staging.files.rename(self.root / staging.model_id)
        host_files.sync_folder(self.root)
        shutil.rmtree(staging.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _out_of_the_way(self, name: str) -> Iterator[None]:
        """What is stored under that name disappears at once, and its space is freed afterwards."""
        doomed = self.root / _STAGING / f"{name}.removed-{secrets.token_hex(4)}"
        if (self.root / name).exists():
            (self.root / name).rename(doomed)
        yield
        shutil.rmtree(doomed, ignore_errors=True)  # what resists is swept by a later pull

    def _lock(self, model_id: str) -> contextlib.AbstractContextManager[None]:
        refusal = f"another potluck process is working on {model_id}; wait for it, or stop it"
        return host_files.exclusive_lock(self.root / _STAGING / f"{model_id}.lock", refusal)

    def _staging_folder(self, model_id: str) -> Path:
        return self.root / _STAGING / model_id

    def _sweep(self) -> None:
        """Frees what crashes left: half-removed models, and partial downloads that are weeks old."""
        oldest = time.time() - _ABANDONED_AFTER_S
        for path in (self.root / _STAGING).iterdir():
            if ".removed-" in path.name:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir() and is_model_id(path.name) and _last_change(path) < oldest:
                with contextlib.suppress(BadRequest), self._lock(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _folder_names(self) -> Sequence[str]:
        if not self.root.is_dir():
            return ()
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and is_model_id(path.name))

    def _require_sizes(self, entry: ModelEntry) -> None:
        for file in entry.files:
            path = self.root / entry.id / file.name
            size_bytes = path.stat().st_size if path.is_file() else None
            if size_bytes != file.size_bytes:
                found = (
                    "is missing" if size_bytes is None else f"has {size_bytes:,} bytes instead of {file.size_bytes:,}"
                )
                raise WeightsMismatch(f"{path} {found}; {_pull_again(entry.id)}")

    def _not_found(self, name: str) -> str:
        import difflib

        names = self._folder_names()
        if name in CATALOGUE:
            return f"{name} is not in the store yet; `potluck pull {name}` gets it"
        near = difflib.get_close_matches(name, [*names, *CATALOGUE], n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"there is no model {name!r} in the store; {hint}`potluck models` lists them, `potluck pull` gets one"


def is_whole(path: Path, file: StoredFile) -> bool:
    """As far as its size tells."""
    return path.is_file() and path.stat().st_size == file.size_bytes


def is_model_id(text: str) -> bool:
    return _MODEL_ID.fullmatch(text) is not None


def _read_entry(folder: Path) -> ModelEntry:
    path = folder / ENTRY_NAME
    try:
        if path.stat().st_size > _ENTRY_LIMIT_BYTES:
            raise BadModelFile(path, "size", "too large to be an entry")
        entry = msgspec.json.decode(path.read_bytes(), type=ModelEntry)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadModelFile(path, "entry", f"{error}; {_pull_again(folder.name)}") from None
    is_partial = entry.format == "partial"
    are_files_odd = is_partial == bool(entry.files) or any(Path(file.name).name != file.name for file in entry.files)
    if entry.id != folder.name or are_files_odd:
        raise BadModelFile(path, "id or files", f"do not belong here; {_pull_again(folder.name)}")
    return _with_holdings(entry, folder) if is_partial else entry


def _pull_again(name: str) -> str:
    return f"`potluck remove {name}` and pull it again"


def _with_holdings(entry: ModelEntry, folder: Path) -> ModelEntry:
    from potluck.weights.partial_model import held_bytes, held_units
    from potluck.weights.units import held_of

    held = str(held_of(held_units(folder), entry.layer_count))
    return msgspec.structs.replace(entry, held=held, size_bytes=held_bytes(folder))


def _try_entry(folder: Path) -> ModelEntry | None:
    try:
        return _read_entry(folder)
    except BadModelFile:
        return None


def _make_entry(
    model_id: str,
    stored_format: StoredFormat,
    source: str,
    files: Sequence[StoredFile],
    checkpoint: Checkpoint,
    weights_sha256: str,
) -> ModelEntry:
    tensors = checkpoint.tensors.values()
    bytes_by_format: collections.Counter[str] = collections.Counter()
    for tensor in tensors:
        bytes_by_format[tensor.format] += tensor.size_bytes
    return ModelEntry(
        id=model_id,
        source=source,
        format=stored_format,
        size_bytes=sum(file.size_bytes for file in files),
        files=tuple(files),
        weights_sha256=weights_sha256,
        added_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        family=checkpoint.facts.architecture,
        layer_count=checkpoint.facts.layer_count,
        parameter_count=sum(math.prod(tensor.shape) for tensor in tensors),
        context_length=checkpoint.facts.context_length,
        quantisation=bytes_by_format.most_common(1)[0][0],
    )


def _drop_others(folder: Path, wanted: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in wanted:
            path.unlink()


def _holds_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def _last_change(folder: Path) -> float:
    """Of anything in it, or of itself; what another process renames or removes meanwhile does not count."""
    latest = folder.stat().st_mtime
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, path.stat().st_mtime)
    return latest
