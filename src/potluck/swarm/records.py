"""The records that a node holds, with hashes over them that two nodes can compare in few bytes. No I/O, no clock, no trust.

Hashes of records are combined by exclusive or, so that a change costs one operation. A record falls into one of 256 buckets, after
the first byte of its key.
"""

import heapq
import math
import struct
from collections.abc import Callable, Iterable, Iterator

from potluck.identity.signed import Signed
from potluck.swarm.adverts import Advert, ReadAdvert, Stamp, record_hash
from potluck.wire.messages import BUCKET_HASH_BYTES, DIGEST_BYTES, MAX_BUCKETS, RECORD_KEY_BYTES

COARSE_BUCKETS = 16
_COARSE_UP_TO = 128  # records; with fewer, 16 buckets tell enough
_DIGEST = struct.Struct(">8sQQI")
_EXPIRIES_PER_ADVERT, _SPARE_EXPIRIES = 8, 1024
_UNSTAMPED = Stamp(0, 0)
assert _DIGEST.size == DIGEST_BYTES


class Digest:
    """What one node tells another about a record."""

    __slots__ = ("check", "key", "stamp")

    def __init__(self, key: bytes, stamp: Stamp, check: int) -> None:
        self.key, self.stamp, self.check = key, stamp, check


class Entry:
    """A record held. `born_s`: when it was first heard of, by anybody, on this node's clock."""

    __slots__ = (
        "advert",
        "born_s",
        "check",
        "content",
        "digest",
        "expires_s",
        "hash",
        "key",
        "record",
        "stamp",
        "taken_s",
    )

    def __init__(self, key: bytes, record: Signed, hash_: int, born_s: float, read: ReadAdvert | None) -> None:
        self.key, self.record, self.hash, self.check, self.born_s = key, record, hash_, hash_ & 0xFFFFFFFF, born_s
        self.taken_s = born_s  # when it came here
        self.advert: Advert | None = None
        if read is None:
            self.content, self.stamp, self.expires_s = 0, _UNSTAMPED, math.inf
        else:
            self.advert, self.content, self.stamp = read.advert, read.content, read.stamp
            self.expires_s = born_s + read.advert.lifetime_s
        self.digest = _DIGEST.pack(key, self.stamp[0], self.stamp[1], self.check)

    def __repr__(self) -> str:
        return f"<Entry {self.record.kind} {self.key.hex()} {tuple(self.stamp)}>"


def entry_of(record: Signed, born_s: float, read: ReadAdvert | None) -> Entry:
    """An advert replaces its node's last one; any other record stands for itself."""
    if read is not None:
        return Entry(read.key, record, read.hash, born_s, read)
    hash_ = record_hash(record)
    return Entry(hash_.to_bytes(RECORD_KEY_BYTES, "big"), record, hash_, born_s, None)


def parse_digests(data: bytes) -> Iterator[Digest]:
    """Raises ValueError where the length is not that of whole entries."""
    return (Digest(key, Stamp(*stamp), check) for key, *stamp, check in unpacked_digests(data))


def unpacked_digests(data: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """Key, incarnation, version and check of each, for the many that say nothing new. Raises ValueError as above."""
    if len(data) % DIGEST_BYTES:
        raise ValueError("digests cut short")
    return _DIGEST.iter_unpack(data)


def parse_keys(data: bytes) -> list[bytes]:
    if len(data) % RECORD_KEY_BYTES:
        raise ValueError("keys cut short")
    return [data[place : place + RECORD_KEY_BYTES] for place in range(0, len(data), RECORD_KEY_BYTES)]


class RecordStore:
    """Entries by key, the hashes over them, and which of them expire when. A key is an advert's or another record's for ever."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self.get: Callable[[bytes], Entry | None] = self._entries.get  # asked for every digest that anybody sends
        self._buckets: list[dict[bytes, Entry]] = [{} for _ in range(MAX_BUCKETS)]
        self._hashes = [0] * MAX_BUCKETS
        self._expiries: list[tuple[float, bytes, Stamp]] = []
        self.root = 0
        self._adverts: dict[bytes, Entry] = {}  # by node
        self.advert_of: Callable[[bytes], Entry | None] = self._adverts.get

    def __repr__(self) -> str:
        return f"<RecordStore {len(self._entries)} records, {self.root:016x}>"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def advert_count(self) -> int:
        return len(self._adverts)

    def adverts(self) -> Iterable[Entry]:
        return self._adverts.values()

    def put(self, entry: Entry) -> None:
        key, held = entry.key, self._entries.get(entry.key)
        if held is not None and held.record.signer != entry.record.signer:
            self.remove(key)  # no advert, then, but two records with one hash
            held = None
        self._entries[key] = self._buckets[key[0]][key] = entry
        change = entry.hash if held is None else entry.hash ^ held.hash
        self._hashes[key[0]] ^= change
        self.root ^= change
        if entry.advert is not None:
            self._adverts[entry.record.signer] = entry
        self.will_expire(entry)

    def will_expire(self, entry: Entry) -> None:
        """The entry's end is known, or has moved."""
        if entry.expires_s == math.inf:
            return
        heapq.heappush(self._expiries, (entry.expires_s, entry.key, entry.stamp))
        if len(self._expiries) > _EXPIRIES_PER_ADVERT * len(self._adverts) + _SPARE_EXPIRIES:
            # Somebody says new things all the time: the ends of what it replaced are let go before they come.
            self._expiries = [(each.expires_s, each.key, each.stamp) for each in self._adverts.values()]
            heapq.heapify(self._expiries)

    def remove(self, key: bytes) -> Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._buckets[key[0]][key]
            self._hashes[key[0]] ^= entry.hash
            self.root ^= entry.hash
            if entry.advert is not None:
                del self._adverts[entry.record.signer]
        return entry

    def expire(self, now_s: float) -> list[Entry]:
        """Removes and returns what has come to its end."""
        gone: list[Entry] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key, stamp = heapq.heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and entry.stamp == stamp and entry.expires_s <= now_s:
                self.remove(key)
                gone.append(entry)
        return gone

    # ------------------------------------------------------------ comparing with another node

    def root_bytes(self) -> bytes:
        return self.root.to_bytes(BUCKET_HASH_BYTES, "big")

    def bucket_hashes(self, other_count: int) -> bytes:
        """For 16 buckets where both sides hold little, otherwise for 256."""
        if max(len(self), other_count) > _COARSE_UP_TO:
            return _packed(self._hashes)
        return _packed(_fold(self._hashes))

    def differing(self, hashes: bytes) -> list[int] | None:
        """Which of our 256 buckets the other side's hashes say are different; None where they are no such hashes."""
        if len(hashes) == MAX_BUCKETS * BUCKET_HASH_BYTES:
            ours, width = self._hashes, 1
        elif len(hashes) == COARSE_BUCKETS * BUCKET_HASH_BYTES:
            ours, width = _fold(self._hashes), MAX_BUCKETS // COARSE_BUCKETS
        else:
            return None
        theirs = struct.unpack(f">{len(ours)}Q", hashes)
        different = [place for place, own in enumerate(ours) if own != theirs[place]]
        return [place * width + each for place in different for each in range(width)]

    def bucket(self, number: int) -> Iterable[Entry]:
        return self._buckets[number].values()

    def bucket_size(self, number: int) -> int:
        return len(self._buckets[number])


def _fold(hashes: list[int]) -> list[int]:
    folded = [0] * COARSE_BUCKETS
    for place, each in enumerate(hashes):
        folded[place * COARSE_BUCKETS // MAX_BUCKETS] ^= each
    return folded


def _packed(hashes: list[int]) -> bytes:
    return struct.pack(f">{len(hashes)}Q", *hashes)
