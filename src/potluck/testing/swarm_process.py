"""Nodes of a real swarm as processes, each with a home of its own, here or on a host of `namespaces.py`: for tests and demonstrations.

Speaks to them as a user does: by commands and over their API. Every process that is started here is ended here, by its own id.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from potluck.core.errors import NodeFailed, PotluckError
from potluck.testing.host_client import HostClient

_COMMAND_TIMEOUT_S = 60.0
_POLL_S = 0.1
# Streams one answer and prints each piece of text as a JSON line with the time that it came at.
_STREAM = """
import json, sys, time, urllib.request
request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode(), method="POST", headers={"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=300) as answer:
    for line in answer:
        if line.startswith(b"data: "):
            print(json.dumps({"at_s": time.monotonic(), "data": line[6:].decode().strip()}), flush=True)
"""


class SwarmProcess:
    """One `potluck up` or `potluck join`. `on_host` puts a command line onto the host that the node lives on."""

    def __init__(
        self, home: Path, arguments: Sequence[str], *, cache: Path, api: str = "127.0.0.1:0",
        on_host: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:  # fmt: skip
        home.mkdir(parents=True, exist_ok=True)
        self.home, self._on_host, self._client = home, on_host, HostClient(on_host)
        self._environment = {**os.environ, "POTLUCK_HOME": str(home), "POTLUCK_CACHE": str(cache)}
        self._log = (home / "log").open("ab")
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            on_host([sys.executable, "-m", "potluck.cli.main", *arguments, "--api", api, "--json"]),
            stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL, env=self._environment,
        )  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<SwarmProcess {self.process.pid} {self.home.name}>"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(msgspec.DecodeError):
                self.events.append(msgspec.json.decode(line))

    # ------------------------------------------------------------ asking it

    def wait_until_up(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """What it announces. Raises PotluckError with its last words."""
        self.wait(lambda: any("node" in event or "error" in event for event in list(self.events)), timeout_s)
        announced = next(event for event in self.events if "node" in event or "error" in event)
        if "error" in announced:
            raise NodeFailed(announced["error"]["code"], announced["error"]["message"])
        return announced

    @property
    def node(self) -> str:
        return str(self.wait_until_up()["node"])

    def serving_s(self) -> float | None:
        """Seconds from its start to the first shard that it served."""
        found = [event["seconds"] for event in list(self.events) if event.get("event", "").startswith("serving")]
        return found[0] if found else None

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if self.process.poll() is not None and not self.events:
                raise PotluckError(f"the node ended: {self.last_words()}")
            if time.monotonic() > deadline_s:
                raise PotluckError(f"waited for {timeout_s} s in vain; {self.events[-3:]}; {self.last_words()}")
            time.sleep(_POLL_S)

    def last_words(self) -> str:
        return (self.home / "log").read_text(errors="replace")[-1500:]

    def command(self, *arguments: str) -> Any:
        """A command of this node's user; its JSON. Raises PotluckError with what it says."""
        done = subprocess.run(
            self._on_host([sys.executable, "-m", "potluck.cli.main", *arguments, "--json"]), env=self._environment,
            capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        answer = msgspec.json.decode(done.stdout or b'{"error": {"message": "no answer"}}')
        if done.returncode != 0:
            raise PotluckError(f"{arguments[0]}: {answer['error']['message']} {done.stderr.decode()[-500:]}")
        return answer

    def request(self, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> Any:
        data = "" if body is None else msgspec.json.encode(body).decode()
        url = f"http://{self.wait_until_up()['api']}{path}"
        return msgspec.json.decode(self._client.request(method, url, data, timeout_s))

    def state(self) -> Any:
        return self.request("GET", "/potluck/state")

    def can_answer(self) -> bool:
        with contextlib.suppress(PotluckError):
            return any(model["can_answer"] for model in self.state()["models"])
        return False

    def ask(self, text: str, max_tokens: int = 32, **options: object) -> str:
        answer = self.request("POST", "/v1/chat/completions", _chat(text, max_tokens, options))
        return str(answer["choices"][0]["message"]["content"])

    def stream(self, text: str, max_tokens: int = 64, **options: object) -> "StreamedAnswer":
        url = f"http://{self.wait_until_up()['api']}/v1/chat/completions"
        data = msgspec.json.encode({**_chat(text, max_tokens, options), "stream": True}).decode()
        return StreamedAnswer(self._on_host([sys.executable, "-c", _STREAM, url, data]))

    # ------------------------------------------------------------ ending it

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        self._client.close()
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=8.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=5.0)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


def _chat(text: str, max_tokens: int, options: dict[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, **options}


class StreamedAnswer:
    """An answer on its way: pieces of text with the moments at which they came."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.pieces: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = msgspec.json.decode(line)
            if event["data"] == "[DONE]":
                continue
            chunk = msgspec.json.decode(event["data"])
            if "error" in chunk:
                self.pieces.append((event["at_s"], f"<error {chunk['error']}>"))
            for choice in chunk.get("choices", ()):
                if choice["delta"].get("content"):
                    self.pieces.append((event["at_s"], choice["delta"]["content"]))

    def wait_for_pieces(self, count: int, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while len(self.pieces) < count:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise PotluckError(f"only {len(self.pieces)} pieces came: {self.text}")
            time.sleep(0.005)

    def finish(self, timeout_s: float = 120.0) -> str:
        """The whole text."""
        assert self._process.stderr is not None
        assert self._process.stdout is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=10.0)
        problem = self._process.stderr.read().decode()[-300:]
        self._process.stderr.close()
        self._process.stdout.close()
        if self._process.returncode != 0:
            raise PotluckError(f"the answer broke off: {problem}")
        return self.text

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def longest_pause_s(self) -> float:
        times = [at_s for at_s, _ in self.pieces]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)
