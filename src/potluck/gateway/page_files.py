"""The page's files over HTTP: read once, given out with the right type, an ETag and a policy that lets the page talk to this node only.

A plain ASGI application, to be mounted or called by whatever serves the node; knows nothing of the API beside it.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PAGE_FOLDER = Path(__file__).with_name("page")
ASSET_PREFIX = "/page/"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Trusted types switch innerHTML and its kin off altogether: text that a model wrote cannot become markup, whatever our code does.
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_SAFETY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageResponse(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes


class _File(msgspec.Struct, frozen=True):
    content_type: str
    etag: str
    body: bytes


class PageFiles:
    """`/` is the page, `/page/NAME` are its parts; everything else is 404. Only names that were there at the start are ever looked up."""

    def __init__(self, folder: Path = PAGE_FOLDER) -> None:
        self._files = {
            f"{ASSET_PREFIX}{path.name}": _read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES
        }
        self._files["/"] = self._files[f"{ASSET_PREFIX}index.html"]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._files)

    def respond(self, method: str, path: str, if_none_match: str = "") -> PageResponse:
        if method not in ("GET", "HEAD"):
            return _plain(405, "only GET and HEAD", {"Allow": "GET, HEAD"})
        file = self._files.get(path)
        if file is None:
            return _plain(404, "there is no such file")
        headers = {**_SAFETY_HEADERS, "ETag": file.etag, "Cache-Control": "no-cache"}
        if _matches(if_none_match, file.etag):
            return PageResponse(304, headers, b"")
        headers |= {"Content-Type": file.content_type, "Content-Length": str(len(file.body))}
        return PageResponse(200, headers, b"" if method == "HEAD" else file.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request. `scope["path"]` is the whole path, as ASGI has it, wherever this application is mounted."""
        if scope["type"] != "http":
            return
        response = self.respond(scope["method"], scope["path"], _header(scope["headers"], b"if-none-match"))
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"', body)


def _matches(if_none_match: str, etag: str) -> bool:
    candidates = [candidate.strip().removeprefix("W/") for candidate in if_none_match.split(",")]
    return etag in candidates or "*" in candidates


def _plain(status: int, text: str, headers: dict[str, str] | None = None) -> PageResponse:
    body = f"{text}\n".encode()
    fixed = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
    return PageResponse(status, {**_SAFETY_HEADERS, **fixed, **(headers or {})}, body)


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    return ",".join(value.decode("latin-1") for key, value in headers if key.lower() == name)
