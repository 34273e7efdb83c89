"""What a shard sent on for its sessions, kept in memory so that a replacement of the next shard can be fed again.

Bounded over all sessions: when it is full, the session that wrote least recently loses its copy (and can be rebuilt from the journal).
Wiped when a session closes. Knows rows of bytes, not what they mean.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import cast

import msgspec


class Kept(msgspec.Struct, frozen=True):
    position: int
    count: int
    body: bytes


class Outbox:
    """Pieces by session, in the order of their positions, without gaps; a session that was dropped keeps nothing any more."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._pieces: OrderedDict[bytes, list[Kept]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Outbox {len(self._pieces)} sessions, {self._used_bytes} of {self._budget_bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def open(self, session: bytes) -> None:
        self._pieces[session] = []

    def adopt(self, session: bytes, parent: bytes, length: int, row_bytes: int) -> None:
        """`session` begins with what `parent` sent below `length`; with nothing, and without keeping more, where that is gone."""
        pieces = self._pieces.get(parent)
        if pieces is None:
            return
        self._pieces[session] = list(pieces)
        self._used_bytes += sum(len(piece.body) for piece in pieces)
        self.truncate(session, length, row_bytes)
        self._make_room()

    def keep(self, session: bytes, position: int, count: int, body: bytes) -> None:
        pieces = self._pieces.get(session)
        if pieces is None:
            return
        pieces.append(Kept(position, count, body))
        self._used_bytes += len(body)
        self._pieces.move_to_end(session)
        self._make_room()

    def _make_room(self) -> None:
        while self._used_bytes > self._budget_bytes and self._pieces:
            self.close(next(iter(self._pieces)))

    def truncate(self, session: bytes, length: int, row_bytes: int) -> None:
        """Forgets positions from `length` on; a piece that straddles it is cut, rows being `row_bytes` each."""
        pieces = self._pieces.get(session)
        while pieces and pieces[-1].position + pieces[-1].count > length:
            last = pieces.pop()
            self._used_bytes -= len(last.body)
            if last.position < length:
                count = length - last.position
                pieces.append(Kept(last.position, count, last.body[: count * row_bytes]))
                self._used_bytes += len(pieces[-1].body)

    def holds(self, session: bytes, length: int) -> bool:
        """Whether every position below `length` is here."""
        pieces = self._pieces.get(session)
        if pieces is None:
            return False
        return length == 0 or (bool(pieces) and pieces[-1].position + pieces[-1].count >= length)

    def pieces(self, session: bytes, start: int, stop: int, most_rows: int, row_bytes: int) -> Iterator[Kept]:
        """Positions start … stop - 1, in pieces of `most_rows` rows, of which the last may have fewer."""
        joined: list[Kept] = []
        rows = 0
        for piece in self._pieces.get(session, ()):
            part = _within(piece, start, stop, row_bytes)
            while part is not None:
                after = part.position + most_rows - rows
                fitting = cast(Kept, _within(part, part.position, after, row_bytes))
                part = _within(part, after, stop, row_bytes)
                joined.append(fitting)
                rows += fitting.count
                if rows == most_rows:
                    yield _join(joined)
                    joined, rows = [], 0
        if joined:
            yield _join(joined)

    def close(self, session: bytes) -> None:
        for piece in self._pieces.pop(session, ()):
            self._used_bytes -= len(piece.body)


def _within(piece: Kept, start: int, stop: int, row_bytes: int) -> Kept | None:
    first, last = max(piece.position, start), min(piece.position + piece.count, stop)
    if first >= last:
        return None
    if last - first == piece.count:
        return piece
    offset = (first - piece.position) * row_bytes
    return Kept(first, last - first, piece.body[offset : offset + (last - first) * row_bytes])


def _join(parts: list[Kept]) -> Kept:
    if len(parts) == 1:
        return parts[0]
    return Kept(parts[0].position, sum(part.count for part in parts), b"".join(part.body for part in parts))
