"""Which records are believed: the checks on an advert that arrives, and the hand-over of membership records. No I/O; time is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from potluck.core.errors import PotluckError, RecordRefused
from potluck.identity.signed import Signed
from potluck.swarm.adverts import MAX_LEAP, AdvertReader, Stamp
from potluck.swarm.records import Entry, entry_of

EXPULSION = "expulsion"
SUPERSEDED = "superseded"  # said by whoever has not heard the latest yet
OVERTAKEN_S = (
    5.0  # for so long an advert that ended or was replaced may be on its way, sent by somebody who knew no better
)


def _nobody(_: bytes) -> bool:
    return False


def _everything(_: Signed) -> bool:
    return True


@dataclass(frozen=True)
class Trust:
    """What membership means; `accept` takes a membership record or raises an error with a `reason`.

    `holds`: whether a record that was accepted still is of use. What was superseded is not passed on, and makes room.
    """

    accept: Callable[[Signed], None]
    is_member: Callable[[bytes], bool]
    is_expelled: Callable[[bytes], bool] = _nobody
    holds: Callable[[Signed], bool] = _everything


class Ended(NamedTuple):
    """A record that came to its end here."""

    stamp: Stamp
    at_s: float


class Known(NamedTuple):
    """What this node knows about a key already."""

    entry: Entry | None
    ended: Ended | None
    announced: Stamp | None  # what the sender promised when we asked for it


def check_signer(record: Signed, trust: Trust) -> None:
    """Before the signature is computed, which is what costs. Raises RecordRefused."""
    if not trust.is_member(record.signer):
        reason = "expelled" if trust.is_expelled(record.signer) else "not_a_member"
        raise RecordRefused(reason, "an advert of somebody who does not belong to the swarm")


def new_advert(entry: Entry, known: Known, now_s: float) -> bool:
    """Whether an authentic advert is news. Raises RecordRefused: replayed, expired, future_dated."""
    held, ended = known.entry, known.ended
    if held is not None and (entry.stamp, entry.hash) <= (held.stamp, held.hash):
        was_announced = known.announced is not None and entry.stamp >= known.announced
        if entry.hash == held.hash or was_announced or now_s - held.taken_s < OVERTAKEN_S:
            return False
        raise RecordRefused("replayed", "an advert older than one that is known")
    if held is None and ended is not None and entry.stamp <= ended.stamp:
        if now_s - ended.at_s < OVERTAKEN_S:
            return False
        raise RecordRefused("expired", "an advert that came to its end here before")
    if entry.expires_s <= now_s:
        if now_s - entry.expires_s < OVERTAKEN_S:
            return False
        raise RecordRefused("expired", "an advert past its lifetime")
    latest = held.stamp if held is not None else ended.stamp if ended is not None else None
    if latest is not None and _leaps(entry.stamp, latest):
        raise RecordRefused("future_dated", "an advert that is ahead of any that its node can have made")
    return True


def _leaps(stamp: Stamp, latest: Stamp) -> bool:
    first = latest.version if stamp.incarnation == latest.incarnation else 0
    return stamp.incarnation - latest.incarnation > MAX_LEAP or stamp.version - first > MAX_LEAP


def read_entry(record: Signed, reader: AdvertReader, born_s: float) -> Entry:
    """Raises RecordRefused, see read_advert."""
    return entry_of(record, born_s, reader.read(record))


def accept_all(records: list[Signed], trust: Trust) -> tuple[list[Signed], list[tuple[Signed, str]]]:
    """Membership records in whatever order they came: one may rest on another. Returns those taken, and the others with reasons."""
    taken: list[Signed] = []
    while True:
        refused: list[tuple[Signed, str]] = []
        count = len(taken)
        for record in records:
            try:
                trust.accept(record)
            except PotluckError as error:
                refused.append((record, str(getattr(error, "reason", error.code))))
            else:
                taken.append(record)
        if not refused or len(taken) == count:
            return taken, refused
        records = [record for record, _ in refused]
