"""The file in which a node keeps its swarm: the records, its own invites, and who brought it in. Mode 0600, replaced in one step.

A node's daemon and its user's commands both write it, one at a time. A file that is damaged is an error that names it: nothing ever
takes its place by itself, because that would be another swarm.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from potluck.core.errors import BadSwarmFile
from potluck.identity.private_file import locked, privacy_complaint, replace_private
from potluck.identity.signed import Signed
from potluck.trust.invites import MAX_ADDRESSES, MAX_INVITES, IssuedInvite
from potluck.trust.records import NodeId, SwarmId

_MAX_FILE_BYTES = 64 << 20
_MAGIC = b"potluck-swarm 1 "
_LOCK_PATIENCE_S = 2.0
_HASH_CHARACTERS = 64

Address = Annotated[str, Meta(max_length=300)]


class SwarmState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What survives a restart. `introducer`: whoever issued the invite, to be asked first while little is known."""

    swarm: SwarmId
    owner: NodeId
    records: tuple[Signed, ...] = ()
    invites: Annotated[tuple[IssuedInvite, ...], Meta(max_length=2 * MAX_INVITES)] = ()
    introducer: NodeId | None = None
    introducer_addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()


class SwarmFile:
    """One swarm's file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<SwarmFile {self.path}>"

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Differs when the file was replaced; None: there is none."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def read(self) -> SwarmState | None:
        """None: there is none. Raises BadSwarmFile."""
        try:
            with self.path.open("rb") as file:
                complaint = privacy_complaint(self.path, os.fstat(file.fileno()))
                data = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadSwarmFile(f"{self.path}: cannot be read: {error.strerror}") from error
        if complaint is not None:
            raise BadSwarmFile(f"{self.path}: {complaint}")
        try:
            return _decode(data)
        except ValueError as error:
            raise BadSwarmFile(f"{self.path}: {error}; put back a copy, or move it away and join again") from error

    def create(self, state: SwarmState) -> None:
        """Raises BadSwarmFile where there is one."""

        def check(stored: SwarmState | None) -> SwarmState:
            if stored is not None:
                raise BadSwarmFile(f"{self.path}: this node belongs to a swarm already")
            return state

        self._replace(check)

    def update(self, change: Callable[[SwarmState], SwarmState]) -> SwarmState:
        """What `change` makes of the stored state is stored; nobody else writes meanwhile. Raises BadSwarmFile, and what it raises."""

        def check(stored: SwarmState | None) -> SwarmState:
            if stored is None:
                raise BadSwarmFile(f"{self.path}: is gone")
            return change(stored)

        return self._replace(check)

    def remove(self) -> None:
        """For a node that has left its swarm."""
        self.path.unlink(missing_ok=True)

    def _replace(self, change: Callable[[SwarmState | None], SwarmState]) -> SwarmState:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock"), _LOCK_PATIENCE_S):
                stored = self.read()
                state = change(stored)
                if state != stored:
                    replace_private(self.path, _encode(state))
        except TimeoutError:
            raise BadSwarmFile(f"{self.path}: another process holds it") from None
        except OSError as error:
            raise BadSwarmFile(f"{self.path}: cannot be written: {error.strerror or error}") from error
        return state


def _encode(state: SwarmState) -> bytes:
    body = msgspec.json.encode(state)
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(data: bytes) -> SwarmState:
    """Raises ValueError."""
    head, _, body = data.partition(b"\n")
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError("is of absurd size")
    if not head.startswith(_MAGIC) or len(head) != len(_MAGIC) + _HASH_CHARACTERS:
        raise ValueError("is not a swarm's file, or its beginning is lost")
    if hashlib.sha256(body).hexdigest().encode() != head.removeprefix(_MAGIC):
        raise ValueError("is damaged")
    try:
        return msgspec.json.decode(body, type=SwarmState)
    except msgspec.DecodeError as error:
        raise ValueError(f"says what it should not ({error})") from error
