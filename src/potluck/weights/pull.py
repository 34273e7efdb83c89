"""`potluck pull`: from a name, a path or a hub's repository to a verified model in the store.

Decides what to bring under which id and when it may appear; how bytes travel is `transfers`'s, drawing bars the CLI's.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from potluck.core.errors import BadRequest
from potluck.weights.catalogue import CATALOGUE, PackagedModel
from potluck.weights.file_copy import file_faults, git_blob_sha1_of, sha256_of
from potluck.weights.http_source import USUAL_LIMITS, HttpLimits, HttpSource
from potluck.weights.hub import Hub, HubAddress
from potluck.weights.package_source import Pip
from potluck.weights.progress import Progress, Silence
from potluck.weights.pull_plan import ListedFile, LocalSource, NamedSource, Source, parse_source
from potluck.weights.store import ModelEntry, ModelStore, Staging, StoredFile, require_model_id
from potluck.weights.transfers import HubTransfer, LocalTransfer, PackagedTransfer, Transfer


class Pulled(msgspec.Struct, frozen=True):
    entry: ModelEntry
    is_new: bool  # False: it was in the store already


class Puller:
    """Pulls into one store. Everything that reaches outside is handed in, so that tests can put a stand-in there."""

    def __init__(
        self,
        store: ModelStore,
        progress: Progress | None = None,
        *,
        environment: Mapping[str, str] = os.environ,
        catalogue: Mapping[str, PackagedModel] = CATALOGUE,
        limits: HttpLimits = USUAL_LIMITS,
        pip: Pip | None = None,
    ) -> None:
        self._store = store
        self._progress = progress or Silence()
        self._environment = environment
        self._catalogue = catalogue
        self._limits = limits
        self._pip = pip or Pip()

    def pull(self, text: str, name: str | None = None, is_linked: bool = False) -> Pulled:
        """Brings one model into the store, or finds that it is there; one that is there with files missing or cut short is mended.

        Raises ModelNotFound, BadRequest, BadModelFile or DownloadFailed; the store then holds what it held before.
        """
        source = parse_source(text, self._catalogue, Path(text).expanduser().exists())
        if is_linked and not isinstance(source, LocalSource):
            raise BadRequest("only a file on this machine can be linked; leave --link away")
        if name is not None:
            require_model_id(name)
        with file_faults():
            transfer = self._transfer(source, is_linked)
            return self._bring(transfer, name or transfer.suggested_id)

    def _transfer(self, source: Source, is_linked: bool) -> Transfer:
        if isinstance(source, NamedSource):
            http = HttpSource(self._limits, environment=self._environment)
            return PackagedTransfer(self._catalogue[source.name], self._pip, http, self._progress)
        if isinstance(source, LocalSource):
            return LocalTransfer(Path(source.path).expanduser().absolute(), is_linked, self._progress)
        address = HubAddress.from_environment(self._environment)
        http = HttpSource(self._limits, address.token, self._environment)
        return HubTransfer(source, Hub(address, http), http, self._progress)

    def _bring(self, transfer: Transfer, model_id: str) -> Pulled:
        with self._store.stage(model_id) as staging:
            existing = self._existing(transfer, model_id)
            if existing is not None and self._store.fault(model_id) is None:
                return Pulled(existing, is_new=False)
            if existing is not None:
                self._progress.say(f"{model_id} is damaged; bringing again what is missing")
                self._store.reuse(existing, staging)
            files = [_staged(file, staging, transfer, self._progress) for file in transfer.choice.files]
            entry = self._store.admit(
                staging, files, format=transfer.choice.format, source=transfer.source, progress=self._progress
            )
            return Pulled(entry, is_new=True)

    def _existing(self, transfer: Transfer, model_id: str) -> ModelEntry | None:
        if not (self._store.root / model_id).exists():
            return None
        entry = self._store.find(model_id)
        stored = {file.name: file for file in entry.files}
        folder = self._store.root / model_id
        wanted = transfer.choice.files
        if set(stored) == {file.name for file in wanted} and all(
            transfer.is_same(file, stored[file.name], folder / file.name) for file in wanted
        ):
            return entry
        raise BadRequest(
            f"the store has another model called {model_id} (from {entry.source}); "
            f"pull this one with --name, or `potluck remove {model_id}` first"
        )


def _staged(file: ListedFile, staging: Staging, transfer: Transfer, progress: Progress) -> StoredFile:
    """One file among the staged ones: what an earlier attempt finished is taken over if its hash says so."""
    target = staging.files / file.name
    sha256 = _finished_earlier(file, target, progress) or transfer.fetch(file, target, staging.downloads)
    return StoredFile(file.name, target.stat().st_size, sha256)


def _finished_earlier(file: ListedFile, target: Path, progress: Progress) -> str | None:
    if not target.is_file():
        return None
    if target.stat().st_size == file.size_bytes and (file.sha256 or file.git_sha1):
        sha256 = sha256_of(target, progress, f"checking {file.name}")
        if sha256 == file.sha256 or (file.git_sha1 and git_blob_sha1_of(target) == file.git_sha1):
            return sha256
    target.unlink()
    return None
