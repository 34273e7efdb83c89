"""A real HTTP server on loopback that misbehaves on demand. It waits on events, never on the clock."""

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Route = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    server: "LoopbackServer"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.seen.append((path, dict(self.headers)))
        self.server.was_asked.set()
        route = self.server.routes.get(path, status(404))
        route(self)

    def log_message(self, *arguments: object) -> None:
        pass


class LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Route] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.was_asked = threading.Event()
        self.released = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, path: str) -> list[str | None]:
        return [headers.get("Range") for seen, headers in self.seen if seen == path]

    def __enter__(self) -> "LoopbackServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that go away are what the tests are about


def status(code: int, **headers: str) -> Route:
    def route(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return route


def redirect(location: str) -> Route:
    return status(302, Location=location)


def content(body: bytes, *, etag: str | None = None, knows_ranges: bool = True, cut_after: int | None = None) -> Route:
    """Serves `body`; with `cut_after`, hangs up after so many bytes of every answer."""

    def route(handler: Handler) -> None:
        start = _start(handler.headers, etag) if knows_ranges else 0
        if start and start >= len(body):
            return status(416)(handler)
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if etag is not None:
            handler.send_header("ETag", etag)
        handler.send_header("Content-Length", str(len(body) - start))
        handler.end_headers()
        handler.wfile.write(body[start:] if cut_after is None else body[start : start + cut_after])
        return None

    return route


def chunked(body: bytes) -> Route:
    """Serves `body` without saying how long it is."""

    def route(handler: Handler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for start in range(0, len(body), 1000):
            piece = body[start : start + 1000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    return route


def stall(body: bytes, after: int) -> Route:
    """Announces `body`, sends some of it and then nothing more until the server is released."""

    def route(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:after])
        handler.server.released.wait(10)

    return route


def sequence(*routes: Route) -> Route:
    """Answers with one route after the other, then with the last one for good."""
    waiting = list(routes)

    def route(handler: Handler) -> None:
        current = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        current(handler)

    return route


def _start(headers: object, etag: str | None) -> int:
    match = re.fullmatch(r"bytes=(\d+)-", headers.get("Range", ""))  # type: ignore[attr-defined]
    if match is None or headers.get("If-Range", etag) != etag:  # type: ignore[attr-defined]
        return 0
    return int(match[1])
