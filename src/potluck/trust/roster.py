"""Who belongs to a swarm: an immutable value, made of signed records, the same whatever order they came in. No I/O, no clock.

There are two ranks of signers. What the founder states counts, and its latest word on a subject beats everybody's. Delegates hold
rights that the founder gave them; what they state counts while they hold them. They cannot pass rights on, nor touch the founder or one
another, so nothing ever depends on who of two was faster. A record whose signer holds no right (yet) waits, within bounds.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from potluck.core.errors import RecordRefused
from potluck.identity.keys import short_id
from potluck.identity.signed import Signed
from potluck.trust.records import (
    MAX_SERIAL,
    SMALL_BYTES,
    Expulsion,
    Founding,
    Kept,
    Membership,
    Record,
    RefusalReason,
    ServedModel,
    SubjectStatement,
    Trust,
    read_record,
    swarm_id,
)

MAX_FOUNDERS_RECORDS = 16384
MAX_DELEGATES_RECORDS = 4096  # by each
MAX_WAITING_SIGNERS = 64
MAX_WAITING_RECORDS = 32  # by each

Slot = tuple[str, bytes | str]
"""What a record is about: its kind and subject. Each signer has one record for each, its latest."""
_Slots = Mapping[Slot, Record]


class Member(NamedTuple):
    node: bytes
    trust: Trust
    may_invite: bool
    may_expel: bool
    admitted_by: bytes


_NOBODY = Membership(bytes(16), bytes(32), 1, Trust.INVITED)


@dataclass(frozen=True, repr=False)
class Roster:
    """`founding` None: a node that was invited knows the swarm's id only, until it has heard more."""

    swarm: bytes
    founding: Record | None = None
    minimum_to_serve: Trust = Trust.TRUSTED
    _founders: _Slots = field(default_factory=dict)
    _others: Mapping[bytes, _Slots] = field(default_factory=dict)  # by signer

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Roster of {self.swarm.hex()[:8]}, {len(self._founders)} records, {len(self._others)} other signers>"

    @classmethod
    def founded(cls, founding: Signed, minimum_to_serve: Trust = Trust.TRUSTED) -> "Roster":
        """A new swarm's roster. Raises RecordRefused."""
        record = read_record(founding)
        if not isinstance(record.statement, Founding):
            raise RecordRefused(RefusalReason.MALFORMED)
        return cls(record.statement.swarm, minimum_to_serve=minimum_to_serve).with_record(founding)

    # ------------------------------------------------------------ questions

    @property
    def founder(self) -> bytes | None:
        return self.founding.signed.signer if self.founding else None

    @property
    def name(self) -> str:
        return cast(Founding, self.founding.statement).name if self.founding else ""

    def trust_of(self, node: bytes) -> Trust | None:
        """None: not one of us."""
        member = self.member(node)
        return member.trust if member else None

    def is_member(self, node: bytes) -> bool:
        """Of any trust."""
        return self.member(node) is not None

    def is_expelled(self, node: bytes) -> bool:
        return self.expelled_by(node) is not None

    def expelled_by(self, node: bytes) -> bytes | None:
        """Whose word it is that a node is out: the founder's, else some delegate's."""
        if ("expulsion", node) in self._founders:
            return self.founder
        if node == self.founder or self._delegation(node).is_delegate:
            return None
        signers = (signer for signer, _ in self._stated(("expulsion", node)) if self._delegation(signer).may_expel)
        return min(signers, default=None)

    def expulsion_record(self, node: bytes) -> Signed | None:
        """By which a node is out."""
        signer = self.expelled_by(node)
        if signer is None:
            return None
        slots = self._founders if signer == self.founder else self._others[signer]
        return slots["expulsion", node].signed

    def may_invite(self, node: bytes) -> bool:
        return node == self.founder or self._delegation(node).may_invite

    def may_expel(self, node: bytes) -> bool:
        return node == self.founder or self._delegation(node).may_expel

    def may_manage(self, node: bytes) -> bool:
        """Say which models the swarm serves: the founder and every delegate."""
        return node == self.founder or self._delegation(node).is_delegate

    def may_serve(self, node: bytes) -> bool:
        trust = self.trust_of(node)
        return trust is not None and trust.covers(self.minimum_to_serve)

    def may_ask(self, node: bytes) -> bool:
        trust = self.trust_of(node)
        return trust is not None and trust.covers(Trust.MEMBER)

    def member(self, node: bytes) -> Member | None:
        founder = self.founder
        if founder is None or self.is_expelled(node):
            return None
        if node == founder:
            return Member(node, Trust.TRUSTED, True, True, founder)
        stated = self._founders.get(("member", node))
        if stated is not None:
            word = cast(Membership, stated.statement)
            return Member(node, word.trust, word.may_invite, word.may_expel, founder)
        return self._vouched_for(node)

    def members(self) -> tuple[Member, ...]:
        """Everybody who belongs, the founder included, by id."""
        names = {subject for kind, subject in self._founders if kind == "member"} | set(self._kept)
        names |= {subject for slots in self._others.values() for kind, subject in slots if kind == "member"}
        names |= {self.founder} if self.founder else set()
        found = (self.member(name) for name in sorted(cast(set[bytes], names)))
        return tuple(member for member in found if member is not None)

    def expelled(self) -> tuple[bytes, ...]:
        names = {cast(bytes, slot[1]) for slots in self._everything() for slot in slots if slot[0] == "expulsion"}
        return tuple(sorted(name for name in names if self.is_expelled(name)))

    def models(self) -> tuple[ServedModel, ...]:
        """What the swarm serves, by model id; the highest serial of those that count."""
        words = (cast(ServedModel, record.statement) for record in self._latest_on_models())
        return tuple(word for word in words if word.is_served)

    def models_said_by(self, node: bytes) -> tuple[ServedModel, ...]:
        """Where a node has the last word, also that a model is no longer served."""
        mine = (record for record in self._latest_on_models() if record.signed.signer == node)
        return tuple(cast(ServedModel, record.statement) for record in mine)

    def _latest_on_models(self) -> list[Record]:
        latest: dict[str, Record] = {}
        for record in self._counting():
            if isinstance(record.statement, ServedModel):
                known = latest.get(record.statement.subject)
                if known is None or _age(record) > _age(known):
                    latest[record.statement.subject] = record
        return [latest[name] for name in sorted(latest)]

    def records(self) -> tuple[Signed, ...]:
        """Everything that counts, the founding first: what to keep, and what to pass on."""
        first = [self.founding.signed] if self.founding else []
        rest = sorted(self._counting(), key=lambda record: (record.signed.signer != self.founder, record.digest))
        return tuple(first + [record.signed for record in rest])

    @functools.cached_property
    def digest(self) -> bytes:
        """Of `records()`: equal on nodes that agree."""
        return hashlib.sha256(b"".join(sorted(read_record(each).digest for each in self.records()))).digest()

    def waiting(self) -> tuple[tuple[Signed, RefusalReason], ...]:
        """Records that count for nothing as things are, and why."""
        held = [record for slots in self._others.values() for record in slots.values()]
        reasons = ((record.signed, self._doubt(record)) for record in held)
        return tuple((signed, reason) for signed, reason in reasons if reason is not None)

    def doubt(self, signed: Signed) -> RefusalReason | None:
        """Why a record that was taken counts for nothing as things are; None: it counts. Raises RecordRefused as `with_record`."""
        return self._doubt(read_record(signed))

    def holds(self, signed: Signed) -> bool:
        """Whether a record is kept here, for what it says or until more is known; False where it was superseded. Raises RecordRefused."""
        record = read_record(signed)
        if isinstance(record.statement, Founding):
            return self.founding is not None and record.digest == self.founding.digest
        is_founders = signed.signer == self.founder
        slots = self._founders if is_founders else self._others.get(signed.signer, {})
        subject = record.digest if self.founder is None else record.statement.subject
        known = slots.get((record.statement.kind, subject))
        return known is not None and known.digest == record.digest

    def next_serial(self, slot: Slot, signer: bytes) -> int:
        """For a new record that is to beat every known one on its subject. The founder need only beat its own on members."""
        is_final = signer == self.founder and slot[0] != "model"
        rivals = [self._founders] if is_final else self._everything()
        known = [cast(SubjectStatement, slots[slot].statement).serial for slots in rivals if slot in slots]
        kept = [each.serial for each, _ in self._kept.get(cast(bytes, slot[1]), ())] if slot[0] == "member" else []
        return min(1 + max(known + kept, default=0), MAX_SERIAL)

    # ------------------------------------------------------------ records

    def with_record(self, signed: Signed) -> "Roster":
        """The roster that knows this record too; itself where that is nothing new. Raises RecordRefused.

        A record that counts for nothing only because of what is unknown is held back rather than refused: see `waiting`.
        """
        record = read_record(signed)
        if record.statement.swarm != self.swarm:
            raise RecordRefused(RefusalReason.OTHER_SWARM)
        if isinstance(record.statement, Founding):
            return self._begin(record)
        if self.founder is None:
            return self._held(record)
        return self._with_founders(record) if signed.signer == self.founder else self._with_other(record)

    def with_records(self, records: Iterable[Signed]) -> tuple["Roster", list[RecordRefused]]:
        """All of them, the founding first, and what was wrong with those that were refused."""
        roster, refusals = self, []
        for signed in sorted(records, key=lambda signed: signed.kind != "founding"):
            try:
                roster = roster.with_record(signed)
            except RecordRefused as refusal:
                refusals.append(refusal)
        return roster, refusals

    def _begin(self, record: Record) -> "Roster":
        word = cast(Founding, record.statement)
        if swarm_id(record.signed.signer, word.nonce) != word.swarm:
            raise RecordRefused(RefusalReason.NOT_ENTITLED)
        if self.founding is not None and record.digest >= self.founding.digest:
            if record.digest == self.founding.digest:
                return self
            raise RecordRefused(RefusalReason.SUPERSEDED)  # the same founder under another name; the lower digest stays
        if self.founding is not None:
            return replace(self, founding=record)
        held = [each.signed for slots in self._others.values() for each in slots.values()]
        return replace(self, founding=record, _others={}).with_records(held)[0]

    def _held(self, record: Record) -> "Roster":
        """Until the founder is known nothing supersedes anything: who could tell which of two oversteps its signer's rights?"""
        signer = record.signed.signer
        self._check_room(signer, record)
        known = self._others.get(signer, {})
        slots = _with(known, record, (record.statement.kind, record.digest), MAX_WAITING_RECORDS)
        return self if slots is known else replace(self, _others={**self._others, signer: slots})

    def _with_founders(self, record: Record) -> "Roster":
        word = cast(SubjectStatement, record.statement)
        if isinstance(word, Expulsion) and word.subject == self.founder:
            raise RecordRefused(RefusalReason.NOT_ENTITLED)
        if isinstance(word, Membership):
            self._check_subject(word.subject)
        slots = _with(self._founders, record, (word.kind, word.subject), MAX_FOUNDERS_RECORDS)
        if slots is self._founders:
            return self
        if isinstance(word, Expulsion):
            return replace(self, _founders=slots)._without(word.subject)
        return replace(self, _founders=slots)

    def _with_other(self, record: Record) -> "Roster":
        signer, word = record.signed.signer, cast(SubjectStatement, record.statement)
        if ("expulsion", signer) in self._founders:
            raise RecordRefused(RefusalReason.SIGNER_EXPELLED)
        if _oversteps(word, cast(bytes, self.founder)):
            raise RecordRefused(RefusalReason.NOT_ENTITLED)
        if isinstance(word, Membership):
            self._check_subject(word.subject)
        known = self._others.get(signer, {})
        is_waiting = not self._delegation(signer).is_delegate
        if is_waiting:
            self._check_room(signer, record)
        limit = MAX_WAITING_RECORDS if is_waiting else MAX_DELEGATES_RECORDS
        slots = _with(known, record, (word.kind, word.subject), limit)
        return self if slots is known else replace(self, _others={**self._others, signer: slots})

    def _check_subject(self, subject: bytes) -> None:
        if ("expulsion", subject) in self._founders:
            raise RecordRefused(RefusalReason.SUBJECT_EXPELLED)

    def _without(self, node: bytes) -> "Roster":
        """The founder's expulsion is for good, so what the node signed, and who called it a member, need not be kept."""
        slot = ("member", node)
        founders = {each: record for each, record in self._founders.items() if each != slot}
        others = {
            signer: {each: record for each, record in slots.items() if each != slot}
            for signer, slots in self._others.items()
            if signer != node
        }
        return replace(self, _founders=founders, _others={signer: slots for signer, slots in others.items() if slots})

    def _check_room(self, signer: bytes, record: Record) -> None:
        """Strangers' records wait in a small room: few signers, few and small records of each."""
        waiting = sum(not self._delegation(each).is_delegate for each in self._others if each != signer)
        if waiting >= MAX_WAITING_SIGNERS or len(record.signed.payload) > SMALL_BYTES:
            raise RecordRefused(RefusalReason.TOO_MANY)

    # ------------------------------------------------------------ what counts

    def _delegation(self, node: bytes) -> Membership:
        """What the founder said of a node, as far as rights go."""
        record = self._founders.get(("member", node))
        return cast(Membership, record.statement) if record is not None else _NOBODY

    def _stated(self, slot: Slot) -> Iterator[tuple[bytes, Record]]:
        """Who else than the founder said what about something."""
        for signer, slots in self._others.items():
            if slot in slots:
                yield signer, slots[slot]

    def _everything(self) -> Iterator[_Slots]:
        yield self._founders
        yield from self._others.values()

    def _counting(self) -> Iterator[Record]:
        yield from self._founders.values()
        for slots in self._others.values():
            yield from (record for record in slots.values() if self._doubt(record) is None)

    def _doubt(self, record: Record) -> RefusalReason | None:
        signer, word = record.signed.signer, record.statement
        if self.founder is None:
            return None if isinstance(word, Founding) else RefusalReason.NOT_FOUNDED
        if signer == self.founder:
            return None
        rights = self._delegation(signer)
        if isinstance(word, Expulsion):
            is_entitled = rights.may_expel and not self._delegation(word.subject).is_delegate
        else:
            is_entitled = rights.may_invite if isinstance(word, Membership) else rights.is_delegate
        if is_entitled:
            return None
        if self.is_expelled(signer):
            return RefusalReason.SIGNER_EXPELLED
        return RefusalReason.NOT_ENTITLED if self.is_member(signer) else RefusalReason.SIGNER_UNKNOWN

    @functools.cached_property
    def _kept(self) -> Mapping[bytes, tuple[tuple[Kept, bytes], ...]]:
        """Whom the founder vouched for when it expelled their sponsors."""
        kept: dict[bytes, tuple[tuple[Kept, bytes], ...]] = {}
        for (kind, _), record in self._founders.items():
            if kind == "expulsion":
                for each in cast(Expulsion, record.statement).keeps:
                    kept[each.subject] = (*kept.get(each.subject, ()), (each, record.digest))
        return kept

    def _vouched_for(self, node: bytes) -> Member | None:
        """A member whom delegates admitted, or the founder kept. No delegate gives more trust than it has."""
        found: list[tuple[int, bytes, Member]] = []
        for each, digest in self._kept.get(node, ()):
            found.append((each.serial, digest, Member(node, each.trust, False, False, cast(bytes, self.founder))))
        for signer, record in self._stated(("member", node)):
            sponsor = self._delegation(signer)
            if sponsor.may_invite:
                word = cast(Membership, record.statement)
                trust = word.trust if sponsor.trust.covers(word.trust) else sponsor.trust
                found.append((word.serial, record.digest, Member(node, trust, False, False, signer)))
        return max(found)[2] if found else None


def _with(slots: _Slots, record: Record, slot: Slot, limit: int) -> _Slots:
    """With the record in its slot; the same object where it was there. Raises RecordRefused: superseded, too_many."""
    known = slots.get(slot)
    if known is None:
        if len(slots) >= limit:
            raise RecordRefused(RefusalReason.TOO_MANY)
    elif _age(record) < _age(known):
        raise RecordRefused(RefusalReason.SUPERSEDED)
    elif record.digest == known.digest:
        return slots
    return {**slots, slot: record}


def _age(record: Record) -> tuple[int, bytes]:
    return cast(SubjectStatement, record.statement).serial, record.digest


def _oversteps(word: SubjectStatement, founder: bytes) -> bool:
    """Whether no right that a delegate can have covers this."""
    if isinstance(word, Membership):
        return word.is_delegate or word.subject == founder
    return isinstance(word, Expulsion) and (word.subject == founder or bool(word.keeps))


def describe_member(member: Member) -> str:
    """One line, for people."""
    rights = [name for name, has in (("invites", member.may_invite), ("expels", member.may_expel)) if has]
    return f"{short_id(member.node)} {member.trust}{' (' + ', '.join(rights) + ')' if rights else ''}"
