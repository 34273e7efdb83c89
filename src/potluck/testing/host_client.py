"""HTTP to a node's API from the host that the node lives on, by one process there that stays: starting Python costs more than asking.

Knows nothing of what is asked. The process is ended by its own id.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from potluck.core.errors import PotluckError

_GRACE_S = 10.0  # beyond a request's own time-out, before the process is taken for stuck
_PROGRAM = """
import http.client, json, sys, urllib.request
for line in sys.stdin:
    method, url, body, timeout_s = json.loads(line)
    request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            told = {"body": answer.read().decode()}
    except (OSError, http.client.HTTPException) as error:
        told = {"problem": f"{type(error).__name__}: {error}"}
    print(json.dumps(told), flush=True)
"""


class _Told(msgspec.Struct):
    body: str = ""
    problem: str = ""


class HostClient:
    """One request at a time; whoever asks meanwhile waits. `on_host` puts a command line onto the host."""

    def __init__(self, on_host: Callable[[Sequence[str]], list[str]]) -> None:
        self._on_host = on_host
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<HostClient {self._process.pid if self._process else 'not started'}>"

    def request(self, method: str, url: str, body: str, timeout_s: float) -> str:
        """The answer's body. Raises PotluckError with the reason where there is none."""
        with self._lock:
            told = self._ask(msgspec.json.encode((method, url, body, timeout_s)), timeout_s + _GRACE_S)
        if told.problem:
            raise PotluckError(f"{method} {url}: {told.problem}")
        return told.body

    def _ask(self, line: bytes, timeout_s: float) -> _Told:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(timeout_s, process.kill)
        watchdog.start()
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            watchdog.cancel()
        return msgspec.json.decode(answer, type=_Told) if answer else _Told(problem="the client's process ended")

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(
                self._on_host([sys.executable, "-c", _PROGRAM]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self._process

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()
