"""A node's place in its swarm: the roster and the invites that count now, kept in the swarm's file. The only part of trust that changes.

What this node itself states is on disk before anybody is told. What others state is saved a little later, by `save_if_changed`,
because it can be heard again.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from potluck.core.errors import BadRequest, BadSwarmFile, NotEntitled, RecordRefused
from potluck.identity.keys import NodeKey, short_id
from potluck.identity.signed import Signed
from potluck.trust import issuing
from potluck.trust.invites import (
    MAX_EXPIRY_S,
    MAX_USES,
    SECRET_BYTES,
    Invite,
    InviteBook,
    InviteRefusal,
    IssuedInvite,
    encode_invite,
)
from potluck.trust.records import MAX_NAME_CHARACTERS, NONCE_BYTES, RefusalReason, Trust, found
from potluck.trust.roster import Roster
from potluck.trust.swarm_file import SwarmFile, SwarmState
from potluck.wire.handshake import INVITE_ID_BYTES, PresentedTicket

_LOG = logging.getLogger(__name__)
_LOGGED = 8  # refusals of one reason; afterwards they are only counted
OnChange = Callable[[Roster, Roster], None]
_Change = Callable[[Roster, InviteBook], tuple[Roster, InviteBook]]


class SwarmKeeper:
    """Whoever acts for a node in its swarm, daemon or command; several may at once. Callbacks in `on_change` get old and new roster."""

    def __init__(self, key: NodeKey, file: SwarmFile, minimum_to_serve: Trust = Trust.TRUSTED) -> None:
        """Raises BadSwarmFile: there is none, or it is damaged, or another node's."""
        stored = file.read()
        if stored is None:
            raise BadSwarmFile(f"{file.path}: there is no such file; this node belongs to no swarm")
        if stored.owner != key.node_id:
            raise BadSwarmFile(f"{file.path}: is node {short_id(stored.owner)}'s, and this is {short_id(key.node_id)}")
        self._key, self._file = key, file
        self.introducer, self.introducer_addresses = stored.introducer, stored.introducer_addresses
        self.refusals: Counter[str] = Counter()  # records that count for nothing, by reason
        self.on_change: list[OnChange] = []
        self.book = InviteBook(stored.invites)
        self.roster = self._read_roster(stored, minimum_to_serve)
        self._is_changed = False
        self._stamp = file.stamp

    def __repr__(self) -> str:
        return f"<SwarmKeeper {short_id(self._key.node_id)} {self.roster!r} {len(self.book.invites())} invites>"

    @classmethod
    def found(
        cls, key: NodeKey, file: SwarmFile, name: str = "", minimum_to_serve: Trust = Trust.TRUSTED
    ) -> "SwarmKeeper":
        """A new swarm, of which this node is the founder. Raises BadSwarmFile where it belongs to one, BadRequest."""
        if len(name) > MAX_NAME_CHARACTERS:
            raise BadRequest(f"a swarm's name has {MAX_NAME_CHARACTERS} characters at most")
        founding = found(key, name, os.urandom(NONCE_BYTES))
        file.create(SwarmState(Roster.founded(founding).swarm, key.node_id, (founding,)))
        return cls(key, file, minimum_to_serve)

    @classmethod
    def join(
        cls, key: NodeKey, file: SwarmFile, invite: Invite, minimum_to_serve: Trust = Trust.TRUSTED
    ) -> "SwarmKeeper":
        """The swarm of an invite that its issuer has honoured; the records are still to come."""
        state = SwarmState(invite.swarm, key.node_id, introducer=invite.issuer, introducer_addresses=invite.addresses)
        file.create(state)
        return cls(key, file, minimum_to_serve)

    def _read_roster(self, stored: SwarmState, minimum_to_serve: Trust) -> Roster:
        roster, refusals = Roster(stored.swarm, minimum_to_serve=minimum_to_serve).with_records(stored.records)
        if refusals:
            raise BadSwarmFile(f"{self._file.path}: holds a record that does not count ({refusals[0].reason})")
        return roster

    # ------------------------------------------------------------ what others state

    def may_link(self, node: bytes) -> bool:
        """Whether a link with a node is all right. Before a newcomer has heard of anybody, only with whoever invited it."""
        if self.roster.founding is None:
            return node == self.introducer
        return self.roster.is_member(node)

    def take(self, signed: Signed) -> bool:
        """Takes a record that somebody passed on; whether that changed anything. Raises RecordRefused, counted.

        A record that must wait for another is taken too; as long as it counts for nothing it is counted under its reason.
        """
        try:
            roster = self.roster.with_record(signed)
        except RecordRefused as refusal:
            self._count_refusal(signed, refusal.reason)
            raise
        return self._taken(roster, [signed])

    def take_all(self, records: Iterable[Signed]) -> bool:
        """As `take`, for many, without raising."""
        roster, taken = self.roster, []
        for signed in sorted(records, key=lambda signed: signed.kind != "founding"):
            try:
                roster = roster.with_record(signed)
                taken.append(signed)
            except RecordRefused as refusal:
                self._count_refusal(signed, refusal.reason)
        return self._taken(roster, taken)

    def _taken(self, roster: Roster, records: list[Signed]) -> bool:
        for signed in records:
            doubt = roster.doubt(signed)
            if doubt is not None:
                self._count_refusal(signed, doubt)
        is_changed = roster is not self.roster
        self._set(roster, self.book)
        return is_changed

    def _count_refusal(self, signed: Signed, reason: str) -> None:
        self.refusals[reason] += 1
        if reason not in (
            RefusalReason.SUPERSEDED,
            RefusalReason.NOT_FOUNDED,
        ):  # gossip's daily bread; a newcomer's first minute
            if self.refusals[reason] > _LOGGED:
                return
            _LOG.warning("a %s record by node %s counts for nothing: %s", signed.kind, short_id(signed.signer), reason)

    def _set(self, roster: Roster, book: InviteBook) -> None:
        before, self.roster, self.book = self.roster, roster, book
        if roster is not before:
            self._is_changed = True
            for callback in self.on_change:
                callback(before, roster)

    # ------------------------------------------------------------ what this node states

    def admit(self, node: bytes, trust: Trust, may_invite: bool = False, may_expel: bool = False) -> list[Signed]:
        """Raises NotEntitled."""
        return self._issue(lambda roster: issuing.admit(self._key, roster, node, trust, may_invite, may_expel))

    def expel(self, node: bytes, keeps_admitted: bool = True) -> list[Signed]:
        """Raises NotEntitled."""
        return self._issue(lambda roster: issuing.expel(self._key, roster, node, keeps_admitted))

    def serve_model(
        self, model: str, weights_sha256: str, objective: Literal["latency", "throughput"] = "latency",
        context_tokens: int = 4096, streams: int = 1, is_served: bool = True,
    ) -> list[Signed]:  # fmt: skip
        """Raises NotEntitled."""
        return self._issue(
            lambda roster: [
                issuing.serve_model(
                    self._key, roster, model, weights_sha256, objective, context_tokens, streams, is_served
                )
            ]
        )

    def invite(self, trust: Trust, uses: int, expires_at_s: int, addresses: tuple[str, ...], now_s: float) -> Invite:
        """An invite for as many nodes, good until a time on this node's wall clock. Raises NotEntitled, BadRequest."""
        swarm, invite_id, secret = self.roster.swarm, _fresh_id(), os.urandom(SECRET_BYTES)
        invite = Invite(swarm, self._key.node_id, invite_id, secret, expires_at_s, addresses)
        if not (1 <= uses <= MAX_USES and now_s < expires_at_s < MAX_EXPIRY_S):
            raise BadRequest(f"an invite is for 1 to {MAX_USES} nodes, and expires in the future")
        encode_invite(invite)  # raises before anything is promised
        issued = IssuedInvite(swarm, invite_id, secret, trust, uses, expires_at_s)

        def change(roster: Roster, book: InviteBook) -> tuple[Roster, InviteBook]:
            issuing.check_may_admit(roster, self._key.node_id, trust)
            return roster, book.with_invite(issued, now_s)

        self._update(change)
        return invite

    def withdraw(self, invite_id: bytes) -> None:
        """Nobody can use that invite any more."""
        self._update(lambda roster, book: (roster, book.with_withdrawal(invite_id) if book.find(invite_id) else book))

    def redeem(self, node: bytes, ticket: PresentedTicket, now_s: float) -> InviteRefusal | None:
        """Makes a node a member for its ticket; None: done, and on disk. Raises NotEntitled, BadSwarmFile."""
        if self.book.find(ticket.invite_id) is None:
            self.refresh()  # perhaps a command has just written it
        refusal = self.book.refusal(ticket, now_s)
        if refusal is not None:
            return refusal

        def change(roster: Roster, book: InviteBook) -> tuple[Roster, InviteBook]:
            nonlocal refusal
            refusal = book.refusal(ticket, now_s)  # as everybody who writes the file knows it
            issued = book.find(ticket.invite_id)
            if refusal is not None or issued is None:
                return roster, book
            records = issuing.admit(self._key, roster, node, issued.trust)
            return roster.with_records(records)[0], book.with_use(ticket.invite_id, node)

        self._update(change)
        return refusal

    def _issue(self, make: Callable[[Roster], list[Signed]]) -> list[Signed]:
        records: list[Signed] = []

        def change(roster: Roster, book: InviteBook) -> tuple[Roster, InviteBook]:
            records[:] = make(roster)
            for signed in records:
                roster = roster.with_record(signed)
                if roster.doubt(signed) is not None:
                    raise NotEntitled(f"this node may not state that: {roster.doubt(signed)}")
            return roster, book

        self._update(change)
        return records

    # ------------------------------------------------------------ the file

    def refresh(self) -> None:
        """Takes in what another process of this node has written since. Raises BadSwarmFile."""
        stamp = self._file.stamp
        if stamp == self._stamp:
            return
        stored = self._file.read()
        self._stamp = stamp
        if stored is not None:
            was_changed = self._is_changed
            self._set(*self._merge(stored))
            self._is_changed = was_changed or set(self.roster.records()) != set(stored.records)

    def save_if_changed(self) -> None:
        """Writes what was taken since the last time. Raises BadSwarmFile; then it is tried again next time."""
        if self._is_changed:
            self._update(lambda roster, book: (roster, book))

    def _update(self, change: _Change) -> None:
        after: list[tuple[Roster, InviteBook]] = []

        def merged(stored: SwarmState) -> SwarmState:
            roster, book = change(*self._merge(stored))
            after.append((roster, book))
            return msgspec.structs.replace(stored, records=roster.records(), invites=book.invites())

        self._file.update(merged)
        self._stamp = self._file.stamp
        self._set(*after[-1])
        self._is_changed = False

    def _merge(self, stored: SwarmState) -> tuple[Roster, InviteBook]:
        if stored.swarm != self.roster.swarm:
            raise BadSwarmFile(f"{self._file.path}: is another swarm's by now; start again")
        return self.roster.with_records(stored.records)[0], self.book.merged(InviteBook(stored.invites))


def _fresh_id() -> bytes:
    """Never the one that means none."""
    while True:
        invite_id = os.urandom(INVITE_ID_BYTES)
        if any(invite_id):
            return invite_id
