"""Two nodes compare what they hold: hashes, then digests, then records. Pure functions over a RecordStore."""

from collections.abc import Iterable, Iterator, Sequence

from potluck.swarm.adverts import Stamp
from potluck.swarm.records import Digest, Entry, RecordStore
from potluck.wire.messages import (
    MAX_DIGESTS,
    MAX_RECORD_AGE_MS,
    MAX_RECORDS,
    AgedRecord,
    Buckets,
    Digests,
    Records,
    Summary,
    Wanted,
)

_MESSAGE_BYTES = 48 << 10  # of records in one message, so that it travels as one urgent frame
MAX_REPLY_BYTES = 1 << 20  # to one question; the next exchange goes on from there
_OVERHEAD_BYTES = 160  # of a record beside its payload: signer, signature, kind, age


def summary(store: RecordStore) -> Summary:
    return Summary(store.root_bytes(), len(store))


def answer_summary(store: RecordStore, message: Summary) -> Buckets | None:
    """Nothing where both hold the same."""
    return None if message.root == store.root_bytes() else Buckets(store.bucket_hashes(message.count))


def answer_buckets(store: RecordStore, message: Buckets) -> tuple[Digests | None, bool]:
    """Our digests of the buckets that differ, as many as fit; and whether that is all. Raises ValueError for other hashes."""
    differing = store.differing(message.hashes)
    if differing is None:
        raise ValueError("hashes of neither 16 nor 256 buckets")
    chosen: list[int] = []
    count = 0
    for number in differing:
        size = store.bucket_size(number)
        if chosen and count + size > MAX_DIGESTS:
            break
        chosen.append(number)
        count += size
    if not chosen:
        return None, True
    entries = [entry.digest for number in chosen for entry in store.bucket(number)][:MAX_DIGESTS]
    return Digests(bytes(chosen), b"".join(entries)), len(chosen) == len(differing)


def is_news(held: Entry | None, stamp: Stamp, check: int, forgotten: Stamp | None) -> bool:
    """Whether a record announced with this stamp and check is another than what is held, or came to its end here."""
    if held is None:
        return forgotten is None or stamp > forgotten
    return stamp > held.stamp or (stamp == held.stamp and check != held.check)


def lacking(store: RecordStore, buckets: bytes, digests: Sequence[Digest]) -> list[Entry]:
    """What the other side should get: of its buckets, what it does not list, or lists in an older version."""
    theirs = {digest.key: digest for digest in digests}
    found = []
    for number in set(buckets):
        for entry in store.bucket(number):
            listed = theirs.get(entry.key)
            if (
                listed is None
                or listed.stamp < entry.stamp
                or (listed.stamp == entry.stamp and listed.check != entry.check)
            ):
                found.append(entry)
    return found


def announcements(entries: Iterable[Entry]) -> Iterator[Digests]:
    digests = [entry.digest for entry in entries]
    for place in range(0, len(digests), MAX_DIGESTS):
        yield Digests(b"", b"".join(digests[place : place + MAX_DIGESTS]))


def requests(keys: Sequence[bytes]) -> Iterator[Wanted]:
    for place in range(0, len(keys), MAX_DIGESTS):
        yield Wanted(b"".join(keys[place : place + MAX_DIGESTS]))


def replies(entries: Iterable[Entry], now_s: float) -> Iterator[Records]:
    """Membership records first, because adverts count only for members. Stops at MAX_REPLY_BYTES."""
    batch: list[AgedRecord] = []
    batch_bytes = sent_bytes = 0
    for entry in sorted(entries, key=lambda entry: entry.advert is not None):
        size = len(entry.record.payload) + _OVERHEAD_BYTES
        if batch and (batch_bytes + size > _MESSAGE_BYTES or len(batch) >= MAX_RECORDS):
            yield Records(tuple(batch))
            batch, batch_bytes = [], 0
        if sent_bytes + size > MAX_REPLY_BYTES:
            break
        age_ms = min(max(0, int((now_s - entry.born_s) * 1000)), MAX_RECORD_AGE_MS)
        batch.append(AgedRecord(entry.record, age_ms))
        batch_bytes += size
        sent_bytes += size
    if batch:
        yield Records(tuple(batch))
