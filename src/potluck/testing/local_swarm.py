"""Real nodes on loopback, each a daemon with its worker process: for trying things out, demonstrations, benchmarks and fault tests.

Every process that is started here is ended here, by its own id.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from potluck.core.errors import NodeFailed, PotluckError
from potluck.core.processors import LOOP_CORE

_START_TIMEOUT_S = 180.0
_LAST_WORDS = 8  # lines of a log that an error quotes


class NodePlan(msgspec.Struct, frozen=True):
    """What one node serves. `layers` as people write them; None: all."""

    layers: str | None
    is_spare: bool = False
    threads: int = 1
    device: str = "cpu"


class Announcement(msgspec.Struct, frozen=True):
    """What `potluck up --json` prints when it serves."""

    shard: str
    address: str
    node: str
    daemon_pid: int
    worker_pid: int
    api: str = ""


def split_plan(layer_count: int, shards: int, spares: int = 1, threads: int = 1, device: str = "cpu") -> list[NodePlan]:
    """`shards` nodes with ranges as equal as they can be, then `spares` nodes that hold everything."""
    edges = [layer_count * i // shards for i in range(shards + 1)]
    ranges = [f"{lo}-{hi - 1}" for lo, hi in itertools.pairwise(edges)]
    whole = NodePlan(None, True, threads, device)
    return [NodePlan(layers, False, threads, device) for layers in ranges] + [whole] * spares


class LocalProcess:
    """One `potluck up` process. The same name in the same folder is the same node: it has the same key."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, name: str, home: Path | None, cache: Path | None = None
    ) -> None:
        self._log = (folder / f"{name}.log").open("ab")
        with LOOP_CORE.suspended():  # a head may be starting it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "potluck.cli.main", "up", *arguments, "--json"],
                stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL,
                env={
                    **os.environ, "POTLUCK_KEY": str(folder / f"{name}.key"),
                    **({"POTLUCK_HOME": str(home)} if home is not None else {}),
                    **({"POTLUCK_CACHE": str(cache)} if cache is not None else {}),
                },
            )  # fmt: skip
        self.announcement: Announcement | None = None

    @property
    def address(self) -> str:
        assert self.announcement is not None
        return self.announcement.address

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_serving(self, timeout_s: float = _START_TIMEOUT_S) -> Announcement:
        """Reads the one line that says so. Raises PotluckError with the node's last words where it ends instead."""
        watchdog = threading.Timer(timeout_s, self._process.kill)
        try:
            watchdog.start()  # Ctrl-C may come here too, and Python would wait for a timer that nobody cancels
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self._log.flush()
            last = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:]
            raise PotluckError(f"a node did not start: {' | '.join(last) or 'no reason given'}")
        said = msgspec.json.decode(line)
        if "error" in said:
            raise NodeFailed(said["error"]["code"], said["error"]["message"])
        self.announcement = msgspec.convert(said, Announcement)
        return self.announcement

    def signal(self, number: int) -> None:
        if self.is_alive:
            self._process.send_signal(number)

    def ask_to_end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def end(self) -> None:
        """In good order where it listens, by force where it does not."""
        self.ask_to_end()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


class LocalNode(LocalProcess):
    """A node that holds layers."""

    def __init__(
        self, plan: NodePlan, model: str, folder: Path, number: int, listen: str = "127.0.0.1:0", home: Path | None = None,
        cache: Path | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.number = plan, number
        arguments = [
            "--model",
            model,
            "--listen",
            listen,
            "--threads",
            str(plan.threads),
            "--device",
            plan.device,
            "--api",
            "off",
        ]
        arguments += ["--layers", plan.layers if plan.layers is not None else "0-output"]
        arguments += ["--spare"] if plan.is_spare else []
        super().__init__(arguments, folder, f"node-{number}", home, cache)


class LocalHead(LocalProcess):
    """A node without layers that serves the API over the others."""

    def __init__(self, via: Sequence[str], api: str, folder: Path, home: Path | None, name: str = "head") -> None:
        super().__init__(["--no-serve", "--via", ",".join(via), "--api", api], folder, name, home)

    @property
    def url(self) -> str:
        assert self.announcement is not None
        return f"http://{self.announcement.api}"


class LocalSwarm:
    """Several nodes; a context manager that leaves none behind.

    `home`: another place than the user's for the models; `cache`: and for what is made of them, if not there.
    """

    def __init__(
        self, model: str, plans: Sequence[NodePlan], home: Path | None = None, cache: Path | None = None
    ) -> None:
        self._home, self._cache = home, cache
        self._folder = tempfile.TemporaryDirectory(prefix="potluck-local-")
        self._model = model
        self.nodes: list[LocalNode] = []
        self.head: LocalHead | None = None
        self.further_heads: list[LocalHead] = []
        self._plans = list(plans)

    def __enter__(self) -> "LocalSwarm":
        try:
            for plan in self._plans:
                self.add(plan)
            for node in self.nodes:
                node.wait_until_serving()
        except BaseException:
            self.end()
            raise
        return self

    def add(self, plan: NodePlan) -> LocalNode:
        """A further node; wait until it serves before using it."""
        node = LocalNode(
            plan, self._model, Path(self._folder.name), len(self.nodes), home=self._home, cache=self._cache
        )
        self.nodes.append(node)
        return node

    def restart(self, node: LocalNode) -> LocalNode:
        """A node that has died comes back: same key, same address, nothing else. Wait until it serves before using it."""
        node.end()
        again = LocalNode(
            node.plan,
            self._model,
            Path(self._folder.name),
            node.number,
            listen=node.address,
            home=self._home,
            cache=self._cache,
        )
        self.nodes[node.number] = again
        return again

    def start_api(self, address: str = "127.0.0.1:0") -> LocalHead:
        """A head over all nodes, which serves the API; ended with the swarm."""
        self.head = LocalHead(self.addresses, address, Path(self._folder.name), self._home)
        self.head.wait_until_serving()
        return self.head

    def add_head(self, name: str) -> LocalHead:
        """One more, beside the first; wait until it serves before using it."""
        head = LocalHead(self.addresses, "127.0.0.1:0", Path(self._folder.name), self._home, name)
        self.further_heads.append(head)
        return head

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes if node.announcement is not None]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        processes = [*([self.head] if self.head is not None else []), *self.further_heads, *self.nodes]
        for process in processes:  # all at once, so that a slow machine waits for the slowest and not for each
            process.ask_to_end()
        for process in processes:
            process.end()
        self._folder.cleanup()
