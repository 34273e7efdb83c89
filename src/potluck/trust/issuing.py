"""New records, as one member may issue them, so that nobody is lost by accident. No I/O; what is returned is to be taken and spread.

The roster would ignore what its issuer has no right to; here that is an error, NotEntitled, before anything is signed.
"""

from typing import Literal

import msgspec

from potluck.core.errors import NotEntitled
from potluck.identity.keys import NodeKey, short_id
from potluck.identity.signed import Signed
from potluck.trust.records import MAX_KEPT, Expulsion, Kept, Membership, ServedModel, Trust, state
from potluck.trust.roster import Member, Roster


def admit(
    key: NodeKey, roster: Roster, node: bytes, trust: Trust, may_invite: bool = False, may_expel: bool = False
) -> list[Signed]:
    """Makes a node a member, or changes what it is. Whom it admitted or expelled so far stays so, in the founder's name."""
    if roster.is_expelled(node):
        raise NotEntitled(f"node {short_id(node)} was expelled, which is final; it needs a new key")
    if key.node_id == roster.founder:
        if node == roster.founder:
            raise NotEntitled("the founder is what it is")
        before = roster.member(node)
        after = Membership(roster.swarm, node, _serial(roster, key, "member", node), trust, may_invite, may_expel)
        return [*_take_over(key, roster, before, after), state(key, after)]
    _check_delegate(roster, key.node_id, node, trust, may_invite or may_expel)
    return [state(key, Membership(roster.swarm, node, _serial(roster, key, "member", node), trust))]


def expel(key: NodeKey, roster: Roster, node: bytes, keeps_admitted: bool = True) -> list[Signed]:
    """Puts a node out for good. `keeps_admitted`: whom it had admitted stays, as they are now; only the founder expels delegates."""
    if node == roster.founder:
        raise NotEntitled("the founder cannot be expelled")
    if not roster.may_expel(key.node_id):
        raise NotEntitled("this node may not expel")
    serial = _serial(roster, key, "expulsion", node)
    if key.node_id != roster.founder:
        if roster.may_manage(node):
            raise NotEntitled(f"node {short_id(node)} is a delegate; only the founder can expel it")
        return [state(key, Expulsion(roster.swarm, node, serial))]
    admitted = _admitted_by(roster, node) if keeps_admitted else []
    keeps = tuple(_kept(roster, each) for each in admitted[:MAX_KEPT])
    beyond = [_in_founders_name(key, roster, each) for each in admitted[MAX_KEPT:]]
    said = [*_uphold(key, roster, node), *_repeat_models(key, roster, node)]
    return [*said, *beyond, state(key, Expulsion(roster.swarm, node, serial, keeps))]


def serve_model(
    key: NodeKey,
    roster: Roster,
    model: str,
    weights_sha256: str,
    objective: Literal["latency", "throughput"] = "latency",
    context_tokens: int = 4096,
    streams: int = 1,
    is_served: bool = True,
) -> Signed:
    """Says that the swarm serves a model, or no longer."""
    if not roster.may_manage(key.node_id):
        raise NotEntitled("only the founder and its delegates say what the swarm serves")
    serial = _serial(roster, key, "model", model)
    word = ServedModel(roster.swarm, model, serial, weights_sha256, objective, context_tokens, streams, is_served)
    return state(key, word)


def check_may_admit(roster: Roster, issuer: bytes, trust: Trust) -> None:
    """Raises NotEntitled unless the issuer may give that much trust to somebody new."""
    own_trust = roster.trust_of(issuer)
    if not roster.may_invite(issuer) or own_trust is None:
        raise NotEntitled("this node may not invite")
    if not own_trust.covers(trust):
        raise NotEntitled(f"a {own_trust} node cannot make others {trust}")


def _check_delegate(roster: Roster, issuer: bytes, node: bytes, trust: Trust, gives_rights: bool) -> None:
    check_may_admit(roster, issuer, trust)
    member = roster.member(node)
    if member is not None and member.admitted_by == roster.founder:
        raise NotEntitled(f"the founder admitted node {short_id(node)}; only the founder changes that")
    if gives_rights:
        raise NotEntitled("only the founder delegates inviting and expelling")


def _take_over(key: NodeKey, roster: Roster, before: Member | None, after: Membership) -> list[Signed]:
    """What a delegate stated and could not state any more after this, stated by the founder."""
    if before is None:
        return []
    taken: list[Signed] = []
    if before.may_invite and not (after.may_invite and after.trust.covers(before.trust)):
        taken += [_in_founders_name(key, roster, each) for each in _admitted_by(roster, before.node)]
    if before.may_expel and not after.may_expel:
        taken += _uphold(key, roster, before.node)
    if not (after.may_invite or after.may_expel):
        taken += _repeat_models(key, roster, before.node)
    return taken


def _uphold(key: NodeKey, roster: Roster, delegate: bytes) -> list[Signed]:
    """A delegate's expulsions in the founder's name."""
    subjects = [node for node in roster.expelled() if roster.expelled_by(node) == delegate]
    return [state(key, Expulsion(roster.swarm, node, _serial(roster, key, "expulsion", node))) for node in subjects]


def _repeat_models(key: NodeKey, roster: Roster, delegate: bytes) -> list[Signed]:
    """What a delegate said of models, in the founder's name: the swarm goes on serving what it serves."""
    return [
        state(key, msgspec.structs.replace(word, serial=_serial(roster, key, "model", word.subject)))
        for word in roster.models_said_by(delegate)
    ]


def _admitted_by(roster: Roster, node: bytes) -> list[Member]:
    return [member for member in roster.members() if member.admitted_by == node]


def _kept(roster: Roster, member: Member) -> Kept:
    # Higher than anybody's: the trust that is kept is the one that the member has now, whoever gave it.
    return Kept(member.node, roster.next_serial(("member", member.node), b""), member.trust)


def _in_founders_name(key: NodeKey, roster: Roster, member: Member) -> Signed:
    serial = _serial(roster, key, "member", member.node)
    return state(key, Membership(roster.swarm, member.node, serial, member.trust))


def _serial(roster: Roster, key: NodeKey, kind: str, subject: bytes | str) -> int:
    return roster.next_serial((kind, subject), key.node_id)
