"""What every request must pass before anything of it is parsed: whose host, whose page, whose key, how large, how slow.

Browsers are the danger on loopback: a page of any site can send requests there, and a name that its owner points at 127.0.0.1 makes
them same-origin (DNS rebinding). Hence Host and Origin are checked on every route and method, and nothing is ever allowed by CORS.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from potluck.core.errors import (
    BadRequest,
    ForbiddenHost,
    ForbiddenOrigin,
    InvalidApiKey,
    Overloaded,
    PotluckError,
    RequestTooLarge,
    RequestTooSlow,
)
from potluck.gateway.admission import Tier
from potluck.gateway.error_forms import error_body
from potluck.gateway.responding import send_error

# The page's files hold nothing of anybody's, and a browser must have them before it can ask its user for the key.
_OPEN_ROUTES = frozenset({"/health", "/"})
_OPEN_FOLDER = "/page/"
_LOCAL_NAMES = frozenset({"localhost"})
_NAME, _SCHEME = re.compile(r"[a-z0-9_.-]+"), re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_USUAL_PORTS = {"http": 80, "https": 443}


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`: by the key itself; none: no key is asked for. Names are host names without a port."""

    keys: Mapping[str, Tier] = {}
    allowed_hosts: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()
    max_body_bytes: int = 8 << 20
    max_buffered_bytes: int = 128 << 20  # of all bodies that are being read or answered
    body_patience_s: float = 30.0
    default_tier: Tier = Tier.GOLD


class Guard:
    """Pure ASGI middleware. Leaves `potluck.client` and `potluck.tier` in the scope's state, and the whole body in `receive`."""

    def __init__(self, app: ASGIApp, settings: GuardSettings) -> None:
        self._app, self._settings = app, settings
        self._digests = {hashlib.sha256(key.encode()).digest(): tier for key, tier in settings.keys.items()}
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await _refuse_websocket(scope, receive, send)
        reserved = 0
        try:
            headers = _single_headers(scope)
            check_host(headers, self._settings.allowed_hosts)
            check_origin(headers, self._settings.allowed_origins, scope["method"], scope["path"])
            send = self._telling_named_site(headers, send)
            if (
                scope["method"] == "OPTIONS"
                and headers.get(b"origin", b"").decode("latin-1") in self._settings.allowed_origins
            ):
                return await _answer_preflight(headers, send)  # browsers send it without a key
            self._identify(scope, headers)
            reserved = self._reserve(headers)
            body = await self._read(headers, receive)
        except PotluckError as error:
            self._buffered -= reserved
            return await send_error(send, error, error_body(error, scope["path"]), is_last=True)
        except BaseException:
            self._buffered -= reserved
            raise
        try:
            return await self._app(scope, _replayed(body, receive), send)
        finally:
            self._buffered -= reserved

    def _telling_named_site(self, headers: Mapping[bytes, bytes], send: Send) -> Send:
        origin = headers.get(b"origin")
        is_named = origin is not None and origin.decode("latin-1") in self._settings.allowed_origins
        return _telling(origin, send) if origin is not None and is_named else send

    def _identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Compares with every key, each in constant time: how long it takes tells nothing about any of them."""
        address = scope.get("client") or ("unknown", 0)
        client, tier = f"address {address[0]}", self._settings.default_tier
        if self._digests and not _is_open(scope["method"], scope["path"]):
            given = hashlib.sha256(_given_key(headers)).digest()
            found = [tier for digest, tier in self._digests.items() if hmac.compare_digest(digest, given)]
            if not found:
                raise InvalidApiKey("a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
            client, tier = f"key {given.hex()[:16]}", found[0]
        scope.setdefault("state", {})
        scope["state"] |= {"potluck_client": client, "potluck_tier": tier}

    def _reserve(self, headers: Mapping[bytes, bytes]) -> int:
        """Takes room for the body before any of it is read; without a length, for the largest that may come."""
        if b"content-encoding" in headers and headers[b"content-encoding"] != b"identity":
            raise BadRequest("compressed bodies are not taken")
        limit = self._settings.max_body_bytes
        if b"transfer-encoding" in headers:
            wanted = limit
        else:
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or len(length) > 18:
                raise BadRequest("the content length is no number")
            wanted = int(length)
        if wanted > limit:
            raise RequestTooLarge(f"the body is larger than {limit} bytes")
        if self._buffered + wanted > self._settings.max_buffered_bytes:
            raise Overloaded("too much memory is taken by other requests; try again later", 2)
        self._buffered += wanted
        return wanted

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        if b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0":
            return b""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_patience_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestTooSlow("the client went away before its body had come")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._settings.max_body_bytes:
                        raise RequestTooLarge(f"the body is larger than {self._settings.max_body_bytes} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestTooSlow(f"the body did not come within {self._settings.body_patience_s:g} s") from None


def _is_open(method: str, path: str) -> bool:
    return method in ("GET", "HEAD") and (path in _OPEN_ROUTES or path.startswith(_OPEN_FOLDER))


def _single_headers(scope: Scope) -> dict[bytes, bytes]:
    """By name; those that decide about access may come once only."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in headers and name in (b"host", b"origin", b"authorization", b"x-api-key", b"content-length"):
            raise BadRequest(f"the header {name.decode('ascii', 'replace')} comes twice")
        headers[name] = value
    return headers


def check_host(headers: Mapping[bytes, bytes], allowed: frozenset[str]) -> None:
    """An address, localhost or a name of ours. Rebinding needs a name of the attacker's, which is none of these."""
    host = _host_name(headers.get(b"host", b""))
    if host is None or not (host in _LOCAL_NAMES or host in allowed or _is_address(host)):
        raise ForbiddenHost("this server does not go by that name; use its address, or start it with --allow-host NAME")


def _host_name(value: bytes) -> str | None:
    try:
        parts = urlsplit(f"//{value.decode('ascii')}")
        _ = parts.port  # raises where it is no port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def named_host(text: str) -> str:
    """A name that somebody typed, as requests are compared with it: in small letters, without its port. Raises BadRequest."""
    host = _host_name(text.strip().encode("ascii", "replace"))  # what is not ASCII becomes "?", which no name has
    if host is None or not (_NAME.fullmatch(host) or _is_address(host)):
        raise BadRequest(f"--allow-host takes a name like kitchen.local, not {text}")
    return host


def named_origin(text: str) -> str:
    """A site that somebody typed, as browsers write it in `Origin`: no slash at the end, no usual port. Raises BadRequest."""
    scheme, _, place = text.strip().removesuffix("/").partition("://")
    host = _host_name(place.encode("ascii", "replace"))
    if not _SCHEME.fullmatch(scheme) or host is None or not (_NAME.fullmatch(host) or _is_address(host)):
        raise BadRequest(f"--allow-origin takes a site with its scheme, like https://chat.example, not {text}")
    scheme, port = scheme.lower(), urlsplit(f"//{place}").port
    shown_host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown_host}" + ("" if port in (None, _USUAL_PORTS.get(scheme)) else f":{port}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_origin(headers: Mapping[bytes, bytes], allowed: frozenset[str], method: str, path: str) -> None:
    """A browser says which page asks; only our own may, and those that were named. Programs say nothing."""
    origin = headers.get(b"origin")
    if origin is not None:
        shown = origin.decode("latin-1")
        own = {f"{scheme}://{headers.get(b'host', b'').decode('latin-1')}" for scheme in ("http", "https")}
        if shown not in own and shown not in allowed:
            raise ForbiddenOrigin("pages of other sites may not ask here; --allow-origin names those that may")
        return
    site = headers.get(b"sec-fetch-site", b"none")
    is_visit = method == "GET" and path == "/" and headers.get(b"sec-fetch-mode") == b"navigate"
    if site in (b"cross-site", b"same-site") and not is_visit:
        raise ForbiddenOrigin("pages of other sites may not ask here")


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    if b"x-api-key" in headers:
        return headers[b"x-api-key"]
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, in one piece; after it whatever the channel says, which is the client's leaving."""
    is_told = False

    async def replay() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _telling(origin: bytes, send: Send) -> Send:
    """A site that was named by the owner may read the answers; no other is ever told so."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            shown = [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"retry-after, x-should-retry"),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *shown]}
        await send(message)

    return tell


async def _answer_preflight(asked: Mapping[bytes, bytes], send: Send) -> None:
    """To a site that the owner named. SDKs send headers of their own, so whatever it asks for may come."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", _header_names(asked.get(b"access-control-request-headers", b""))),
        (b"access-control-max-age", b"600"),
    ]
    if asked.get(b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _header_names(asked: bytes) -> bytes:
    is_list = re.fullmatch(rb"[A-Za-z0-9-]{1,64}( ?, ?[A-Za-z0-9-]{1,64}){0,63}", asked) is not None
    return asked if is_list else b"authorization, content-type, x-api-key, x-potluck-diagnostics"


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
