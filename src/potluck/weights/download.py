"""One file over HTTP, in as many goes as it takes. A partial file is continued only where it provably still fits.

Beside `NAME.part` lies `NAME.part.json` with what the server said about the file when it was begun. `judge` decides
what an answer means without touching anything; `Downloader` does it. Nothing gets its final name before it is checked.
"""

import re
from pathlib import Path

import msgspec

from potluck.core.errors import DownloadFailed, WeightsMismatch
from potluck.weights.file_copy import git_blob_sha1_of, require_space, sha256_of
from potluck.weights.http_source import Headers, HttpSource, PassingError, Response, require_success, shown
from potluck.weights.progress import Progress

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_UNANNOUNCED_LIMIT_BYTES = 1 << 30  # for files whose length nobody states


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be fetched, and everything that is known about it beforehand."""

    url: str
    name: str
    size_bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def is_hashed(self) -> bool:
        return self.sha256 is not None or self.git_sha1 is not None


class PartState(msgspec.Struct, frozen=True):
    """What the server said when a partial file was begun."""

    source: str  # the address, without its query
    etag: str | None
    total_bytes: int | None


class StaleError(Exception):
    """The partial file does not fit what the server has now. Never leaves this module."""


class Part:
    """A partial file and its sidecar."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sidecar = path.with_name(path.name + ".json")

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def state(self) -> PartState | None:
        try:
            return msgspec.json.decode(self._sidecar.read_bytes(), type=PartState)
        except (OSError, msgspec.MsgspecError):
            return None

    def begin(self, state: PartState) -> None:
        """Starts an empty file under a new state. The old bytes go first, so that they never meet the new state."""
        self.drop()
        self._sidecar.write_bytes(msgspec.json.encode(state))
        self.path.touch()

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)


def resume_offset(wanted: RemoteFile, state: PartState | None, part_bytes: int) -> int:
    """From which byte a partial file may be continued: its end, or 0 where nothing would notice a changed source."""
    if state is None or state.source != shown(wanted.url) or part_bytes == 0:
        return 0
    if state.total_bytes is not None and part_bytes > state.total_bytes:
        return 0
    if wanted.size_bytes is not None and state.total_bytes not in (None, wanted.size_bytes):
        return 0
    return part_bytes if _is_strong(state.etag) or wanted.is_hashed else 0


def range_headers(offset: int, state: PartState | None) -> dict[str, str]:
    if offset == 0:
        return {}
    headers = {"Range": f"bytes={offset}-"}
    if state is not None and state.etag is not None and _is_strong(state.etag):
        headers["If-Range"] = state.etag
    return headers


def judge(wanted: RemoteFile, offset: int, state: PartState | None, status: int, headers: Headers) -> PartState:
    """What the answer says about the whole file; on 206 it continues at `offset`, on 200 it starts anew.

    Raises StaleError where the partial file must go, DownloadFailed or PassingError where the answer is of no use.
    """
    if status == 416 and offset:
        raise StaleError
    require_success(status, headers, wanted.url)
    if headers.get("Content-Encoding", "identity") != "identity":
        raise DownloadFailed(f"{shown(wanted.url)} sends the file compressed, although it was asked not to")
    etag = headers.get("ETag")
    total = _total_of_range(headers, offset) if status == 206 else _content_length(headers)
    if status == 206 and state is not None and (etag or state.etag) != (state.etag or etag):
        raise StaleError
    if wanted.size_bytes is not None and total not in (None, wanted.size_bytes):
        raise DownloadFailed(f"{shown(wanted.url)} has {total:,} bytes where {wanted.size_bytes:,} were announced")
    total = wanted.size_bytes if total is None else total
    if total is None and not wanted.is_hashed:
        raise DownloadFailed(f"{shown(wanted.url)} does not say how long it is, so a cut would go unnoticed")
    return PartState(shown(wanted.url), etag, total)


def _total_of_range(headers: Headers, offset: int) -> int:
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    if match is None or int(match[1]) != offset or int(match[2]) + 1 != int(match[3]):
        raise StaleError
    return int(match[3])


def _content_length(headers: Headers) -> int | None:
    text = headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _is_strong(etag: str | None) -> bool:
    return etag is not None and not etag.startswith("W/")


class Downloader:
    """Fetches files into `folder`, partial ones first. Keeps partial files when it fails; the next call goes on."""

    def __init__(self, http: HttpSource, folder: Path, progress: Progress) -> None:
        self._http = http
        self._folder = folder
        self._progress = progress

    def fetch(self, wanted: RemoteFile, target: Path, also_needed_bytes: int = 0) -> str:
        """Puts the file at `target` and returns its SHA-256. Raises DownloadFailed; `target` is then untouched."""
        part = Part(self._folder / f"{target.name}.part")
        for is_last in (False, True):
            was_begun_earlier = part.size_bytes > 0
            self._complete(wanted, part, also_needed_bytes)
            try:
                sha256 = self._verify(wanted, part.path)
            except WeightsMismatch as error:
                part.drop()
                # Bytes of an earlier run may be to blame (a power cut, a source without ETags): one more chance.
                if is_last or not was_begun_earlier:
                    raise DownloadFailed(f"{error}; the source has changed or is damaged, nothing was kept") from None
                self._progress.say(f"{error}; the partial file was bad, starting over")
            else:
                part.path.replace(target)
                part.drop()
                return sha256
        raise AssertionError("unreachable")

    def _complete(self, wanted: RemoteFile, part: Part, also_needed_bytes: int) -> None:
        self._http.retry(
            wanted.name,
            lambda: self._attempt(wanted, part, also_needed_bytes),
            done_bytes=lambda: part.size_bytes,
            say=self._progress.say,
        )

    def _attempt(self, wanted: RemoteFile, part: Part, also_needed_bytes: int) -> None:
        state = part.state()
        offset = resume_offset(wanted, state, part.size_bytes)
        if state is not None and offset and offset == state.total_bytes:
            return
        with self._http.open(wanted.url, range_headers(offset, state)) as response:
            try:
                new_state = judge(wanted, offset, state, response.status, response.headers)
            except StaleError:
                part.drop()
                raise PassingError("the source has changed since the download began") from None
            if response.status == 200 or offset == 0:
                offset = 0
                part.begin(new_state)
            if new_state.total_bytes is not None:
                require_space(self._folder, new_state.total_bytes - offset + also_needed_bytes)
            self._append(response, part, offset, new_state.total_bytes)

    def _append(self, response: Response, part: Part, offset: int, total: int | None) -> None:
        self._progress.start(f"downloading {part.path.stem}", total or 0)
        self._progress.advance(offset)
        size = offset
        limit = _UNANNOUNCED_LIMIT_BYTES if total is None else total
        with open(part.path, "r+b") as file:
            file.seek(offset)
            for piece in self._http.pieces(response):
                size += len(piece)
                if size > limit:
                    part.drop()
                    raise DownloadFailed(
                        f"the server sends more than {limit:,} bytes of {part.path.stem}; nothing was kept"
                    )
                file.write(piece)
                self._progress.advance(len(piece))
        if total is not None and size < total:
            raise PassingError(f"the connection ended after {size:,} of {total:,} bytes")
        self._progress.finish()

    def _verify(self, wanted: RemoteFile, path: Path) -> str:
        """Hashes what is on the disk, not what went through memory: that also covers bytes from earlier runs."""
        if wanted.size_bytes is not None and path.stat().st_size != wanted.size_bytes:
            raise WeightsMismatch(f"{wanted.name} has {path.stat().st_size:,} bytes instead of {wanted.size_bytes:,}")
        sha256 = sha256_of(path, self._progress, f"checking {wanted.name}")
        if wanted.sha256 is not None and sha256 != wanted.sha256:
            raise WeightsMismatch(f"{wanted.name} has SHA-256 {sha256} instead of {wanted.sha256}")
        if wanted.git_sha1 is not None and git_blob_sha1_of(path) != wanted.git_sha1:
            raise WeightsMismatch(f"{wanted.name} is not the content that the source lists")
        return sha256
