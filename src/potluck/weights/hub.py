"""What a model hub says about a repository: its files with sizes, hashes and addresses. Knows no model formats."""

from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from potluck.core.errors import DownloadFailed
from potluck.weights.download import RemoteFile
from potluck.weights.http_source import HttpSource, Token, origin_of, require_safe
from potluck.weights.pull_plan import ListedFile

_DEFAULT_ENDPOINT = "https://huggingface.co"
_REVISION = "main"
_LARGEST_LISTING_PAGES = 10


class _LargeFile(msgspec.Struct):
    oid: str  # SHA-256
    size: int


class _TreeItem(msgspec.Struct):
    """One line of the hub's listing. A plain file's `oid` is the SHA-1 that git gives to its content."""

    type: str
    path: str
    size: int = 0
    oid: str = ""
    lfs: _LargeFile | None = None


class HubAddress(msgspec.Struct, frozen=True):
    endpoint: str
    token: Token | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "HubAddress":
        """HF_ENDPOINT and HF_TOKEN, as the hub's own tools read them."""
        endpoint = (environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
        require_safe(endpoint, None)
        secret = (environment.get("HF_TOKEN") or "").strip()
        if secret and not (secret.isascii() and secret.isprintable()):
            raise DownloadFailed("HF_TOKEN has characters that no token has; set it anew")
        return cls(endpoint, Token(origin_of(endpoint), secret) if secret else None)


class Hub:
    def __init__(self, address: HubAddress, http: HttpSource) -> None:
        self._endpoint = address.endpoint
        self._http = http

    def list_files(self, repository: str) -> list[ListedFile]:
        """All files of a repository, in every folder. Raises DownloadFailed."""
        url: str | None = f"{self._endpoint}/api/models/{quote(repository)}/tree/{_REVISION}?recursive=true"
        files: list[ListedFile] = []
        for _ in range(_LARGEST_LISTING_PAGES):
            if url is None:
                return files
            items, url = self._http.json(url, list[_TreeItem])
            files += [_listed(item) for item in items if item.type == "file" and item.path.isprintable()]
        raise DownloadFailed(
            f"hf:{repository} has too many files to look through; name one as hf:{repository}/FILE.gguf"
        )

    def remote_file(self, repository: str, file: ListedFile) -> RemoteFile:
        return RemoteFile(
            url=f"{self._endpoint}/{quote(repository)}/resolve/{_REVISION}/{quote(file.path)}",
            name=file.name,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
            git_sha1=file.git_sha1,
        )


def _listed(item: _TreeItem) -> ListedFile:
    if item.lfs is not None:
        return ListedFile(item.path, item.lfs.size, sha256=item.lfs.oid.lower())
    return ListedFile(item.path, item.size, git_sha1=item.oid or None)
