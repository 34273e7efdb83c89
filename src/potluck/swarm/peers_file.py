"""Where other nodes were found before: a restart then needs neither invite nor discovery. A hint; a bad file is ignored."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from potluck.swarm.adverts import MAX_ADDRESSES
from potluck.swarm.atomic_file import read_bounded, replace_file
from potluck.wire.messages import Address

_LOG = logging.getLogger(__name__)
MAX_PEERS = 256
_MAX_FILE_BYTES = 1 << 20


class KnownPeer(msgspec.Struct, frozen=True):
    """`node` in hexadecimal."""

    node: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_ADDRESSES)]

    @property
    def id(self) -> bytes:
        return bytes.fromhex(self.node)


class PeersFile:
    """Most recent first; the oldest make room."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<PeersFile {self._path}>"

    def load(self) -> list[KnownPeer]:
        data = read_bounded(self._path, _MAX_FILE_BYTES)
        if data is None:
            return []
        try:
            return msgspec.json.decode(data, type=list[KnownPeer])[:MAX_PEERS]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _LOG.warning("%s cannot be read; known addresses are learnt again", self._path)
            return []

    def save(self, recent: Iterable[tuple[bytes, tuple[str, ...]]]) -> None:
        """`recent` before what the file has. Raises OSError."""
        peers = {
            node.hex(): KnownPeer(node.hex(), addresses[:MAX_ADDRESSES]) for node, addresses in recent if addresses
        }
        for peer in self.load():
            peers.setdefault(peer.node, peer)
        replace_file(self._path, msgspec.json.encode(list(peers.values())[:MAX_PEERS]))
