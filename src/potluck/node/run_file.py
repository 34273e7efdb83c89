"""What commands need to find the node that runs from this home: its process, its addresses, its API. Gone when it ends."""

import contextlib
import os
from pathlib import Path

import msgspec
import psutil

from potluck.identity.private_file import replace_private


class RunningNode(msgspec.Struct, frozen=True):
    pid: int
    node: str
    swarm: str
    addresses: tuple[str, ...]
    api: str  # empty: none


class RunFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, running: RunningNode) -> None:
        replace_private(self._path, msgspec.json.encode(running))

    def read(self) -> RunningNode | None:
        """The node that runs now; None where there is none, or only the file of one that was killed."""
        try:
            running = msgspec.json.decode(self._path.read_bytes()[: 1 << 20], type=RunningNode)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return running if psutil.pid_exists(running.pid) else None

    def remove(self) -> None:
        running = self.read()
        if running is None or running.pid == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
