"""HTTP as a source of model files: safe addresses, few redirects, certificates, a token that stays with its host.

Makes one request at a time and sorts failures into passing and lasting ones; what becomes of the bytes is `download`'s.
"""

import contextlib
import errno
import http.client
import ipaddress
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from potluck import __version__
from potluck.core.errors import DownloadFailed

_REDIRECTS = {301, 302, 303, 307, 308}
_PASSING_STATUSES = {408, 425, 429, 500, 502, 503, 504}
_PASSING_ERRORS = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, errno.EPIPE}
_CERTIFICATE_VARIABLES = (
    "POTLUCK_CA",
    "PIP_CERT",
)  # besides SSL_CERT_FILE and SSL_CERT_DIR, which OpenSSL reads itself
_PIECE_BYTES = 1 << 18
_GOOD_PIECE_BYTES = 1 << 20
_TRY_AGAIN = "run the same command again to go on from where it stopped"
_ALWAYS = {"User-Agent": f"potluck/{__version__}", "Accept-Encoding": "identity"}

T = TypeVar("T")

Response = http.client.HTTPResponse
Headers = Mapping[str, str] | http.client.HTTPMessage


class HttpLimits(msgspec.Struct, frozen=True):
    """How patient we are. `attempts` counts failures in a row; a try that got a good piece starts the count anew."""

    timeout_s: float = 30.0
    attempts: int = 5
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    redirects: int = 5
    json_bytes: int = 16 << 20
    slowest_bytes_per_s: int = 1024  # below that over `rate_window_s`, a connection counts as stalled
    rate_window_s: float = 60.0


USUAL_LIMITS = HttpLimits()


class Token(msgspec.Struct, frozen=True):
    """A secret for one origin. Prints as nothing, so that no log and no error shows it."""

    origin: str
    secret: str

    def __repr__(self) -> str:
        return f"Token(for {self.origin})"


class PassingError(Exception):
    """A failure that may be gone at the next try. Never leaves this package."""

    def __init__(self, problem: str, retry_after_s: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class NoAccess(DownloadFailed):
    """The server wants to know who asks."""


class HttpSource:
    """Makes GET requests under one set of limits. Opens no connection until asked and keeps none."""

    def __init__(
        self,
        limits: HttpLimits = USUAL_LIMITS,
        token: Token | None = None,
        environment: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self._token = token
        self._environment = environment
        self._sleep = sleep
        self._context: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def open(self, url: str, headers: Mapping[str, str] = {}) -> Iterator[Response]:
        """The final response, whatever its status but a redirect. Raises PassingError or DownloadFailed."""
        response = self._follow(url, dict(headers))
        try:
            yield response
        finally:
            response.close()

    def pieces(self, response: Response) -> Iterator[bytes]:
        """The body as it comes. A short body just ends; stalled connections raise PassingError."""
        window_start, window_bytes = time.monotonic(), 0
        while True:
            with network_faults():
                piece = response.read1(_PIECE_BYTES)
            if not piece:
                return
            window_bytes += len(piece)
            elapsed_s = time.monotonic() - window_start
            if elapsed_s > self.limits.rate_window_s:
                if window_bytes < self.limits.slowest_bytes_per_s * elapsed_s:
                    raise PassingError(f"only {window_bytes:,} bytes came in {elapsed_s:.0f} s")
                window_start, window_bytes = time.monotonic(), 0
            yield piece

    def json(self, url: str, kind: type[T]) -> tuple[T, str | None]:
        """A decoded JSON document of type `kind`, and the address of its next page where the answer names one."""
        return self.retry(shown(url), lambda: self._json_once(url, kind))

    def retry(
        self,
        what: str,
        attempt: Callable[[], T],
        done_bytes: Callable[[], int] = lambda: 0,
        say: Callable[[str], None] = lambda message: None,
    ) -> T:
        """Runs `attempt` until it passes, with growing pauses; DownloadFailed after too many failures in a row."""
        failures = 0
        while True:
            before = done_bytes()
            try:
                return attempt()
            except PassingError as fault:
                failures = 1 if done_bytes() - before >= _GOOD_PIECE_BYTES else failures + 1
                if failures >= self.limits.attempts:
                    raise DownloadFailed(f"{what}: {fault}, {failures} times in a row; {_TRY_AGAIN}") from None
                pause_s = self._pause_s(failures, fault)
                say(f"{fault}; trying again in {pause_s:.0f} s ({failures} of {self.limits.attempts - 1})")
                self._sleep(pause_s)

    def _pause_s(self, failures: int, fault: PassingError) -> float:
        pause_s = self.limits.first_pause_s * 2.0 ** (failures - 1)
        return min(max(pause_s, fault.retry_after_s or 0.0), self.limits.longest_pause_s)

    def _json_once(self, url: str, kind: type[T]) -> tuple[T, str | None]:
        with self.open(url, {"Accept": "application/json"}) as response:
            require_success(response.status, response.headers, url)
            body = bytearray()
            for piece in self.pieces(response):
                body += piece
                if len(body) > self.limits.json_bytes:
                    raise DownloadFailed(
                        f"{shown(url)} answered with more than {self.limits.json_bytes:,} bytes of JSON"
                    )
            following = _next_page(response.headers.get("Link", ""), url)
        try:
            return msgspec.json.decode(body, type=kind), following
        except msgspec.MsgspecError as error:
            raise DownloadFailed(f"{shown(url)} did not answer as a model hub does: {error}") from None

    def _follow(self, url: str, headers: dict[str, str]) -> Response:
        token = self._token if self._token is not None and origin_of(url) == self._token.origin else None
        require_safe(url, None)
        for _ in range(self.limits.redirects + 1):
            response = self._request(url, headers, token)
            if response.status not in _REDIRECTS:
                return response
            response.close()
            target = urljoin(url, response.headers.get("Location", ""))
            require_safe(target, url)
            # Once away from its host, the token stays away, even if a later redirect leads back.
            token = token if origin_of(target) == origin_of(url) else None
            url = target
        raise DownloadFailed(
            f"{shown(url)} redirects more than {self.limits.redirects} times; the source is misconfigured"
        )

    def _request(self, url: str, headers: Mapping[str, str], token: Token | None) -> Response:
        request = urllib.request.Request(url, headers={**headers, **_ALWAYS})  # noqa: S310 (require_safe was here)
        if token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token.secret}")
        with network_faults():
            response = self._opener(url).open(request, timeout=self.limits.timeout_s)
        assert isinstance(response, http.client.HTTPResponse)
        return response

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        """An opener that returns every status as it is: redirects and errors are judged here, not in the library."""
        opener = urllib.request.OpenerDirector()
        proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url)) else None  # None: as the environment says
        opener.add_handler(urllib.request.ProxyHandler(proxies))
        opener.add_handler(urllib.request.HTTPHandler())
        if url.startswith("https:"):
            self._context = self._context or trust_context(self._environment)
            opener.add_handler(urllib.request.HTTPSHandler(context=self._context))
        return opener


def trust_context(environment: Mapping[str, str]) -> ssl.SSLContext:
    """The system's certificates, and those that the environment adds for networks with an authority of their own."""
    context = ssl.create_default_context()
    for variable in _CERTIFICATE_VARIABLES:
        path = environment.get(variable)
        if path:
            try:
                context.load_verify_locations(**{"capath" if Path(path).is_dir() else "cafile": path})
            except OSError as error:
                raise DownloadFailed(f"{variable} names {path}, which holds no usable certificates: {error}") from None
    return context


def require_safe(url: str, came_from: str | None) -> None:
    """https, or http on this machine; a redirect never leads from https to anything else."""
    parts = _split(url)
    if parts.scheme == "https" and parts.hostname:
        return
    is_downgrade = came_from is not None and came_from.startswith("https:")
    if parts.scheme == "http" and is_loopback(parts) and not is_downgrade:
        return
    raise DownloadFailed(f"{shown(url)} is not an https address; nothing is downloaded over an open line")


def is_loopback(parts: SplitResult) -> bool:
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    parts = _split(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def shown(url: str) -> str:
    """An address as people may see it: without user names, and without queries, which carry signatures."""
    parts = _split(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is not a number
    except ValueError:
        raise DownloadFailed("the source gave an address that cannot be read") from None
    return parts


def require_success(status: int, headers: Headers, url: str) -> None:
    """Raises what a status other than 200 and 206 means."""
    if status in (200, 206):
        return
    if status in _PASSING_STATUSES:
        raise PassingError(f"{shown(url)} answered {status}", _retry_after_s(headers))
    if status in (401, 403):
        raise NoAccess(
            f"{shown(url)} refuses access ({status}); for a gated or private model set HF_TOKEN and try again"
        )
    if status in (404, 410):
        raise DownloadFailed(f"{shown(url)} does not exist ({status}); check the name")
    raise DownloadFailed(f"{shown(url)} answered {status} {http.client.responses.get(status, '')}".rstrip())


def _retry_after_s(headers: Headers) -> float | None:
    value = headers.get("Retry-After") or ""
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else None


def _next_page(link: str, url: str) -> str | None:
    for part in link.split(","):
        target, _, relation = part.partition(";")
        if 'rel="next"' in relation:
            return urljoin(url, target.strip().removeprefix("<").removesuffix(">"))
    return None


@contextlib.contextmanager
def network_faults() -> Iterator[None]:
    """Maps what the standard library raises about a connection. Keep file work outside: OSError means both there."""
    try:
        yield
    except urllib.error.URLError as error:
        reason = error.reason if isinstance(error.reason, Exception) else error
        raise _fault_of(reason) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _fault_of(error) from None


def _fault_of(error: Exception) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message
        return DownloadFailed(
            f"the server's certificate is not trusted ({reason}); set POTLUCK_CA to your authority's file"
        )
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return DownloadFailed(f"the server's name is not known ({error.strerror}); are you online?")
    if isinstance(error, TimeoutError):
        return PassingError("the server did not answer in time")
    is_passing = isinstance(error, (ConnectionError, ssl.SSLError, socket.gaierror, http.client.HTTPException))
    if is_passing or (isinstance(error, OSError) and error.errno in _PASSING_ERRORS):
        return PassingError(f"the connection failed ({error or type(error).__name__})")
    return DownloadFailed(f"the connection failed: {error}")
