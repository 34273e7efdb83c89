"""What commands need to find the node that runs from this home: its process, its addresses, its API. Gone when it ends."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from potluck.core.errors import BadRequest
from potluck.identity.private_file import locked, replace_private

_HOLD_PATIENCE_S = 1.0  # commands that look whether a node runs hold the lock for a moment


class RunningNode(msgspec.Struct, frozen=True):
    pid: int
    node: str
    swarm: str
    addresses: tuple[str, ...]
    api: str  # empty: none
    key: str = ""  # that its API takes, whatever has been written into the keys' file since; empty: it asks for none


class RunFile:
    """Whoever holds the lock beside it is the node of this home. The kernel drops it when that dies, whoever has its number then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_name(path.name + ".lock")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For as long as the node runs. Raises BadRequest where another one does."""
        with contextlib.ExitStack() as stack:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(locked(self._lock, _HOLD_PATIENCE_S))
            except TimeoutError:
                raise BadRequest(
                    "a node of this home is running already; `potluck status` shows it, `potluck leave` ends it"
                ) from None
            self._path.unlink(missing_ok=True)  # of one that was killed: nobody is to take it for this one
            stack.callback(self._path.unlink, missing_ok=True)
            yield

    def write(self, running: RunningNode) -> None:
        replace_private(self._path, msgspec.json.encode(running))

    def read(self) -> RunningNode | None:
        """The node that runs now; None where there is none, or only the file of one that was killed."""
        try:
            running = msgspec.json.decode(self._path.read_bytes()[: 1 << 20], type=RunningNode)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return running if self._is_held() else None

    def _is_held(self) -> bool:
        try:
            with locked(self._lock, 0.0):
                return False
        except TimeoutError:
            return True
