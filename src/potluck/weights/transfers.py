"""The three ways for a model's files into a staging folder: from this machine, out of a wheel, from a hub.

Local files are cloned where the file system shares blocks between copies, and copied otherwise. They are linked only
when asked for: a hard link's bytes change when somebody writes to the original, under a model that was verified.
"""

from pathlib import Path
from typing import Protocol

from potluck.core.errors import BadRequest, ModelNotFound
from potluck.weights.catalogue import PackagedModel
from potluck.weights.download import Downloader
from potluck.weights.file_copy import copy_file, git_blob_sha1_of, link_file, require_space, sha256_of
from potluck.weights.http_source import HttpSource
from potluck.weights.hub import Hub
from potluck.weights.package_source import Pip, fetch_packaged
from potluck.weights.progress import Progress
from potluck.weights.pull_plan import Choice, HubSource, ListedFile, choose_files, suggest_id
from potluck.weights.store import StoredFile, is_whole


class Transfer(Protocol):
    """One model on its way. Making one may ask the source for a listing; `fetch` moves the bytes."""

    @property
    def source(self) -> str:
        """For the entry: what to pull in order to get this model again."""
        ...

    @property
    def suggested_id(self) -> str: ...

    @property
    def choice(self) -> Choice: ...

    def fetch(self, file: ListedFile, target: Path, downloads: Path) -> str:
        """Puts one verified file at `target` and returns its SHA-256; partial files go to `downloads`."""
        ...

    def is_same(self, file: ListedFile, stored: StoredFile, path: Path) -> bool:
        """Whether the stored file at `path` is what `fetch` would bring."""
        ...


class LocalTransfer:
    def __init__(self, path: Path, is_linked: bool, progress: Progress) -> None:
        self._path = path
        self._is_linked = is_linked
        self._progress = progress
        self.source = str(path)
        self.choice = choose_files(_list_local(path), str(path), file=path.name if path.is_file() else None)
        is_gguf = self.choice.format == "gguf"
        self.suggested_id = suggest_id(self.choice.files[0].name if is_gguf else path.resolve().name)
        self._require_model()

    def fetch(self, file: ListedFile, target: Path, downloads: Path) -> str:
        origin = self._origin(file)
        try:
            if self._is_linked:
                return link_file(origin, target, self._progress)
            require_space(target.parent, file.size_bytes)
            return copy_file(origin, target, self._progress)
        except BaseException:
            target.unlink(missing_ok=True)  # copies are cheap to start again, and take as much room as downloads
            raise

    def is_same(self, file: ListedFile, stored: StoredFile, path: Path) -> bool:
        if stored.size_bytes != file.size_bytes:
            return False
        return stored.sha256 == sha256_of(self._origin(file), self._progress, f"comparing {file.name}")

    def _require_model(self) -> None:
        """Refuses what is no model before anything is copied, under the name that the user gave."""
        from potluck.weights.open_model import open_checkpoint

        is_gguf = self.choice.format == "gguf"
        open_checkpoint(self._origin(self.choice.files[0]) if is_gguf else self._path).close()

    def _origin(self, file: ListedFile) -> Path:
        return self._path / file.path if self._path.is_dir() else self._path


class PackagedTransfer:
    def __init__(self, model: PackagedModel, pip: Pip, http: HttpSource, progress: Progress) -> None:
        self._model = model
        self._pip = pip
        self._http = http
        self._progress = progress
        self.source = model.id
        self.suggested_id = model.id
        self.choice = Choice("gguf", (ListedFile(model.file_name, model.size_bytes, sha256=model.sha256),))

    def fetch(self, file: ListedFile, target: Path, downloads: Path) -> str:
        downloader = Downloader(self._http, downloads, self._progress)
        fetch_packaged(self._model, target, downloader, downloads, self._progress, self._pip)
        return self._model.sha256

    def is_same(self, file: ListedFile, stored: StoredFile, path: Path) -> bool:
        return stored.sha256 == file.sha256


class HubTransfer:
    def __init__(self, wanted: HubSource, hub: Hub, http: HttpSource, progress: Progress) -> None:
        self._wanted = wanted
        self._hub = hub
        self._http = http
        self._progress = progress
        self.source = str(wanted)
        listing = hub.list_files(wanted.repository)
        self.choice = choose_files(listing, self.source, wanted.file, wanted.quantisation)
        is_gguf = self.choice.format == "gguf"
        self.suggested_id = suggest_id(self.choice.files[0].name if is_gguf else wanted.repository)

    def fetch(self, file: ListedFile, target: Path, downloads: Path) -> str:
        # Checked against all that is still to come, so that a disk fills up before the first file and not at the last.
        missing = sum(other.size_bytes for other in self.choice.files if not (target.parent / other.name).exists())
        require_space(downloads, missing - _size(downloads / f"{file.name}.part"))
        downloader = Downloader(self._http, downloads, self._progress)
        sha256 = downloader.fetch(self._hub.remote_file(self._wanted.repository, file), target)
        if file.name == "config.json":
            _require_known_family(target)
        return sha256

    def is_same(self, file: ListedFile, stored: StoredFile, path: Path) -> bool:
        if stored.size_bytes != file.size_bytes:
            return False
        if file.sha256 is not None:
            return stored.sha256 == file.sha256
        # Of a damaged file only the name and the size can be compared; what comes in its place is checked.
        return not is_whole(path, stored) or git_blob_sha1_of(path) == file.git_sha1


def _require_known_family(config: Path) -> None:
    """Refuses an unknown architecture before its gigabytes are downloaded."""
    from potluck.weights.hf_facts import facts_from_config
    from potluck.weights.json_objects import read_json_object
    from potluck.weights.open_model import MAX_CONFIG_BYTES

    facts_from_config(read_json_object(config, MAX_CONFIG_BYTES), config)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _list_local(path: Path) -> list[ListedFile]:
    """The regular files of a folder (links followed: caches are full of them), or the one file itself."""
    if path.is_file():
        return [ListedFile(path.name, path.stat().st_size)]
    if not path.is_dir():
        raise BadRequest(f"{path} is neither a file nor a folder")
    files = [ListedFile(child.name, child.stat().st_size) for child in sorted(path.iterdir()) if child.is_file()]
    if not files:
        raise ModelNotFound(f"{path} holds no files")
    return files
