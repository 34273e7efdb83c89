"""Who gets a link: asked once in every handshake, when the dialer's key is proven and before anything else of it is parsed.

Every refusal has its own reason, which the dialer hears, the log names and a counter counts. No content is ever logged.
"""

import enum
import logging
from collections import Counter
from collections.abc import Callable

from potluck.core.errors import BadSwarmFile, NotEntitled
from potluck.identity.keys import short_id
from potluck.trust.keeper import SwarmKeeper
from potluck.wire.handshake import PresentedTicket

_LOG = logging.getLogger(__name__)


class AdmissionRefusal(enum.StrEnum):
    """Beside those of invites."""

    NOT_A_MEMBER = "not a member"
    EXPELLED = "expelled"
    ISSUER_MAY_NOT_INVITE = "the issuer may not invite any more"
    CANNOT_SAVE = "the issuer cannot write its book"


class Admission:
    """An `Admits` for nodes that belong to a swarm; others use `admit_anyone`."""

    def __init__(self, keeper: SwarmKeeper, unix_time_s: Callable[[], float]) -> None:
        """`unix_time_s`: the wall clock, by which this node's invites expire."""
        self.keeper = keeper
        self._unix_time_s = unix_time_s
        self.refusals: Counter[str] = Counter()
        self.redeemed = 0

    def __repr__(self) -> str:
        return f"<Admission {self.redeemed} invites redeemed, refused {dict(self.refusals)}>"

    def __call__(self, node: bytes, ticket: PresentedTicket | None) -> str | None:
        refusal = self._decide(node, ticket)
        if refusal is not None:
            self.refusals[refusal] += 1
            _LOG.warning("node %s was turned away: %s", short_id(node), refusal)
        return refusal

    def _decide(self, node: bytes, ticket: PresentedTicket | None) -> str | None:
        roster = self.keeper.roster
        if roster.is_expelled(node):
            return AdmissionRefusal.EXPELLED
        if self.keeper.may_link(node):
            return None  # and its ticket, if any, stays unused
        return AdmissionRefusal.NOT_A_MEMBER if ticket is None else self._redeem(node, ticket)

    def _redeem(self, node: bytes, ticket: PresentedTicket) -> str | None:
        try:
            refusal = self.keeper.redeem(node, ticket, self._unix_time_s())
        except NotEntitled:
            return AdmissionRefusal.ISSUER_MAY_NOT_INVITE
        except BadSwarmFile as error:
            _LOG.error("%s", error)
            return AdmissionRefusal.CANNOT_SAVE
        if refusal is None:
            self.redeemed += 1
            _LOG.info("node %s redeemed invite %s", short_id(node), ticket.invite_id.hex())
        return refusal
