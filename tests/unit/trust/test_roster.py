"""The roster: the same from any order of records; who may state what; what an expelled key is worth.

150 random sets of records here, 5,000 with POTLUCK_LONG=1.
"""

import os
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import NotEntitled, RecordRefused
from potluck.identity.keys import NodeKey
from potluck.identity.signed import Signed, sign
from potluck.trust import issuing
from potluck.trust.records import (
    KINDS,
    MAX_SERIAL,
    Expulsion,
    Kept,
    Membership,
    RefusalReason,
    ServedModel,
    Statement,
    Trust,
    found,
    state,
    swarm_id,
)
from potluck.trust.roster import MAX_WAITING_RECORDS, MAX_WAITING_SIGNERS, Roster

FOUNDER, ALICE, BOB, CAROL, DAVE, EVE = KEYS = [NodeKey.from_seed(bytes([number]) * 32) for number in range(1, 7)]
NONCE = bytes(range(16))
SWARM = swarm_id(FOUNDER.node_id, NONCE)
FOUNDING = found(FOUNDER, "home", NONCE)
SHA = "a" * 64
IS_LONG = bool(os.environ.get("POTLUCK_LONG"))


def member(
    signer: NodeKey, subject: NodeKey, serial: int = 1, trust: Trust = Trust.MEMBER, invites: bool = False, expels: bool = False
) -> Signed:  # fmt: skip
    return state(signer, Membership(SWARM, subject.node_id, serial, trust, invites, expels))


def expulsion(signer: NodeKey, subject: NodeKey, serial: int = 1, keeps: tuple[Kept, ...] = ()) -> Signed:
    return state(signer, Expulsion(SWARM, subject.node_id, serial, keeps))


def kept(subject: NodeKey, serial: int = 1, trust: Trust = Trust.MEMBER) -> Kept:
    return Kept(subject.node_id, serial, trust)


def roster_of(*records: Signed) -> Roster:
    roster, refusals = Roster(SWARM).with_records([FOUNDING, *records])
    assert not refusals
    return roster


def refusal(roster: Roster, record: Signed) -> str:
    with pytest.raises(RecordRefused) as caught:
        roster.with_record(record)
    return caught.value.reason


DELEGATES = (
    member(FOUNDER, ALICE, trust=Trust.TRUSTED, invites=True),
    member(FOUNDER, BOB, trust=Trust.MEMBER, invites=True, expels=True),
)


# ---------------------------------------------------------------- convergence


def any_statement() -> st.SearchStrategy[Statement]:
    subjects = st.sampled_from([key.node_id for key in KEYS])
    serials = st.integers(1, 4)
    trusts = st.sampled_from(list(Trust))
    keeps = st.lists(st.builds(Kept, subjects, serials, trusts), max_size=3).map(tuple)
    return st.one_of(
        st.builds(Membership, st.just(SWARM), subjects, serials, trusts, st.booleans(), st.booleans()),
        st.builds(Expulsion, st.just(SWARM), subjects, serials, st.just(()) | keeps),
        st.builds(ServedModel, st.just(SWARM), st.sampled_from(["a", "b"]), serials, st.just(SHA)),
    )


def any_record() -> st.SearchStrategy[Signed]:
    signers = st.sampled_from([FOUNDER, FOUNDER, FOUNDER, ALICE, BOB, CAROL, DAVE])
    return st.builds(state, signers, any_statement())


def fold(records: Sequence[Signed]) -> Roster:
    """One by one, as gossip brings them; what is refused is gone."""
    roster = Roster(SWARM)
    for record in records:
        try:
            roster = roster.with_record(record)
        except RecordRefused:
            continue
    return roster


@settings(max_examples=5000 if IS_LONG else 150, deadline=None)
@given(records=st.lists(any_record(), max_size=14), seed=st.integers(0, 2**32))
def test_every_order_and_every_duplicate_gives_the_same_roster(records: list[Signed], seed: int) -> None:
    chance = random.Random(seed)
    everything = [FOUNDING, *records]
    again = everything + chance.choices(everything, k=len(everything))
    chance.shuffle(again)
    first, second = fold(everything), fold(again)
    assert first == second
    assert first.digest == second.digest
    assert (first.members(), first.expelled(), first.models()) == (second.members(), second.expelled(), second.models())


@settings(max_examples=1500 if IS_LONG else 50, deadline=None)
@given(records=st.lists(any_record(), max_size=14))
def test_what_counts_is_enough_to_build_the_same_state_elsewhere(records: list[Signed]) -> None:
    """Gossip and the file pass on `records()` only."""
    here = fold([FOUNDING, *records])
    there, refusals = Roster(SWARM).with_records(here.records())
    assert not refusals
    assert there.members() == here.members()
    assert there.expelled() == here.expelled()
    assert there.models() == here.models()
    assert there.digest == here.digest


@settings(max_examples=1500 if IS_LONG else 50, deadline=None)
@given(records=st.lists(any_record(), max_size=14))
def test_the_founder_stays_and_nobody_else_grants_rights(records: list[Signed]) -> None:
    roster = fold([FOUNDING, *records])
    assert roster.trust_of(FOUNDER.node_id) is Trust.TRUSTED
    by_founder = {
        msgspec.msgpack.decode(record.payload)[1]
        for record in records
        if record.signer == FOUNDER.node_id and record.kind == "member"
    }
    for each in roster.members():
        if each.node != FOUNDER.node_id and (each.may_invite or each.may_expel):
            assert each.node in by_founder


# ---------------------------------------------------------------- who may state what


def test_trust_levels_say_who_may_ask_and_serve() -> None:
    roster = roster_of(
        member(FOUNDER, ALICE, trust=Trust.INVITED), member(FOUNDER, BOB), member(FOUNDER, CAROL, trust=Trust.TRUSTED)
    )
    nodes = [key.node_id for key in (ALICE, BOB, CAROL, DAVE)]
    assert [roster.is_member(node) for node in nodes] == [True, True, True, False]
    assert [roster.may_ask(node) for node in nodes] == [False, True, True, False]
    assert [roster.may_serve(node) for node in nodes] == [False, False, True, False]
    lax = Roster(SWARM, minimum_to_serve=Trust.MEMBER).with_records(roster.records())[0]
    assert [lax.may_serve(node) for node in nodes] == [False, True, True, False]


def test_a_delegate_admits_with_no_more_trust_than_it_has() -> None:
    roster = roster_of(*DELEGATES, member(ALICE, CAROL, trust=Trust.TRUSTED), member(BOB, DAVE, trust=Trust.TRUSTED))
    assert roster.trust_of(CAROL.node_id) is Trust.TRUSTED
    assert roster.trust_of(DAVE.node_id) is Trust.MEMBER
    with pytest.raises(NotEntitled, match="cannot make others trusted"):
        issuing.admit(BOB, roster, EVE.node_id, Trust.TRUSTED)


def test_nobody_but_the_founder_delegates() -> None:
    roster = roster_of(*DELEGATES)
    assert refusal(roster, member(ALICE, CAROL, invites=True)) == RefusalReason.NOT_ENTITLED
    assert refusal(roster, member(ALICE, CAROL, expels=True)) == RefusalReason.NOT_ENTITLED
    with pytest.raises(NotEntitled, match="only the founder delegates"):
        issuing.admit(ALICE, roster, CAROL.node_id, Trust.MEMBER, may_invite=True)
    with pytest.raises(NotEntitled, match="only the founder changes that"):
        issuing.admit(ALICE, roster, BOB.node_id, Trust.MEMBER, may_invite=True)


def test_the_founders_word_beats_a_delegates_whatever_its_serial() -> None:
    roster = roster_of(*DELEGATES, member(FOUNDER, CAROL, trust=Trust.INVITED), member(ALICE, CAROL, serial=MAX_SERIAL))
    assert roster.trust_of(CAROL.node_id) is Trust.INVITED


def test_a_later_word_of_the_same_signer_supersedes() -> None:
    roster = roster_of(member(FOUNDER, ALICE, serial=2, trust=Trust.TRUSTED))
    assert refusal(roster, member(FOUNDER, ALICE, serial=1)) == RefusalReason.SUPERSEDED
    assert roster.with_record(member(FOUNDER, ALICE, serial=3)).trust_of(ALICE.node_id) is Trust.MEMBER


def test_replayed_records_change_nothing() -> None:
    roster = roster_of(*DELEGATES, member(ALICE, CAROL))
    for record in roster.records():
        assert roster.with_record(record) is roster


def test_a_record_waits_for_the_one_that_entitles_its_signer() -> None:
    early = member(ALICE, CAROL)
    roster = roster_of(early)
    assert not roster.is_member(CAROL.node_id)
    assert roster.waiting() == ((early, RefusalReason.SIGNER_UNKNOWN),)
    assert early not in roster.records()
    roster = roster.with_record(DELEGATES[0])
    assert roster.is_member(CAROL.node_id)
    assert roster.waiting() == ()


def test_a_members_record_without_the_right_does_not_count() -> None:
    roster = roster_of(member(FOUNDER, CAROL), member(CAROL, EVE), expulsion(CAROL, DAVE))
    assert not roster.is_member(EVE.node_id)
    assert {reason for _, reason in roster.waiting()} == {RefusalReason.NOT_ENTITLED}


def test_records_that_wait_are_few() -> None:
    roster = roster_of()
    strangers = [NodeKey.from_seed(number.to_bytes(32)) for number in range(100, 101 + MAX_WAITING_SIGNERS)]
    for stranger in strangers[:-1]:
        roster = roster.with_record(member(stranger, EVE))
    assert refusal(roster, member(strangers[-1], EVE)) == RefusalReason.TOO_MANY
    subjects = [NodeKey.from_seed(number.to_bytes(32)) for number in range(500, 500 + MAX_WAITING_RECORDS)]
    for subject in subjects[:-1]:
        roster = roster.with_record(member(strangers[0], subject))
    assert refusal(roster, member(strangers[0], subjects[-1])) == RefusalReason.TOO_MANY
    assert roster.with_records(DELEGATES)[0].may_invite(ALICE.node_id)  # those who count get in all the same


def test_a_newcomer_knows_only_the_swarms_id_and_takes_records_in_any_order() -> None:
    records = [*DELEGATES, member(ALICE, CAROL), FOUNDING]
    roster = Roster(SWARM)
    for record in records[:-1]:
        roster = roster.with_record(record)
        assert roster.members() == ()
    assert roster.with_record(FOUNDING) == roster_of(*records[:-1])
    assert {reason for _, reason in roster.waiting()} == {RefusalReason.NOT_FOUNDED}


# ---------------------------------------------------------------- liars


def test_forged_and_foreign_records_have_reasons_of_their_own() -> None:
    roster = roster_of(*DELEGATES)
    good = member(FOUNDER, EVE)
    forged = msgspec.structs.replace(member(EVE, EVE), signer=FOUNDER.node_id)
    altered = msgspec.structs.replace(good, payload=good.payload[:-1] + b"\xc3")
    other = state(FOUNDER, Membership(bytes(16), EVE.node_id, 1, Trust.MEMBER))
    assert refusal(roster, forged) == RefusalReason.NOT_AUTHENTIC
    assert refusal(roster, altered) == RefusalReason.NOT_AUTHENTIC
    assert refusal(roster, other) == RefusalReason.OTHER_SWARM
    assert refusal(roster, sign(FOUNDER, "member", b"\x93rubbish")) == RefusalReason.MALFORMED
    assert refusal(roster, sign(FOUNDER, "advert", good.payload)) == RefusalReason.MALFORMED
    assert refusal(roster, sign(FOUNDER, "expulsion", good.payload)) == RefusalReason.MALFORMED
    assert refusal(roster, state(FOUNDER, Membership(SWARM, b"short", 1, Trust.MEMBER))) == RefusalReason.MALFORMED


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.binary(max_size=80), seed=st.integers(0, 2**32))
def test_rubbish_that_is_signed_properly_is_refused_and_breaks_nothing(kind: str, data: bytes, seed: int) -> None:
    chance = random.Random(seed)
    mutated = bytearray(chance.choice([*DELEGATES, expulsion(FOUNDER, ALICE, keeps=(kept(CAROL),))]).payload)
    mutated[chance.randrange(len(mutated))] = chance.randrange(256)
    for payload in (data, bytes(mutated)):
        try:
            roster = roster_of(*DELEGATES).with_record(sign(FOUNDER, kind, payload))
        except RecordRefused:
            continue
        assert roster.is_member(FOUNDER.node_id)
        assert Roster(SWARM).with_records(roster.records())[0].digest == roster.digest


def test_a_founding_is_believed_only_from_the_key_that_the_id_is_made_of() -> None:
    stolen = sign(EVE, "founding", FOUNDING.payload)
    assert refusal(Roster(SWARM), stolen) == RefusalReason.NOT_ENTITLED
    assert refusal(roster_of(), stolen) == RefusalReason.NOT_ENTITLED
    assert refusal(Roster(SWARM), found(FOUNDER, "home", bytes(16))) == RefusalReason.OTHER_SWARM
    with pytest.raises(RecordRefused):
        Roster.founded(member(FOUNDER, ALICE))
    assert Roster.founded(FOUNDING).name == "home"


# ---------------------------------------------------------------- expulsion


@pytest.mark.parametrize("expelled_first", [True, False])
def test_what_an_expelled_inviter_signed_counts_for_nothing_in_either_order(expelled_first: bool) -> None:
    out = expulsion(FOUNDER, ALICE, keeps=(kept(CAROL),))
    stated = [member(ALICE, CAROL, trust=Trust.TRUSTED), member(ALICE, EVE)]
    records = [FOUNDING, DELEGATES[0], *([out, *stated] if expelled_first else [*stated, out])]
    roster = fold(records)
    assert roster.is_expelled(ALICE.node_id)
    assert not roster.is_member(ALICE.node_id)
    assert not roster.is_member(EVE.node_id)
    assert roster.trust_of(CAROL.node_id) is Trust.MEMBER  # as the founder kept her
    assert refusal(roster, member(ALICE, DAVE)) == RefusalReason.SIGNER_EXPELLED
    assert refusal(roster, member(FOUNDER, ALICE, serial=9)) == RefusalReason.SUBJECT_EXPELLED
    assert roster.with_record(member(BOB, CAROL, serial=MAX_SERIAL)).is_member(CAROL.node_id)


def test_expelling_is_final_and_needs_the_right() -> None:
    roster = roster_of(*DELEGATES, member(FOUNDER, CAROL))
    with pytest.raises(NotEntitled, match="may not expel"):
        issuing.expel(ALICE, roster, CAROL.node_id)
    with pytest.raises(NotEntitled, match="founder cannot be expelled"):
        issuing.expel(BOB, roster, FOUNDER.node_id)
    with pytest.raises(NotEntitled, match="only the founder can expel it"):
        issuing.expel(BOB, roster, ALICE.node_id)
    assert refusal(roster, expulsion(FOUNDER, FOUNDER)) == RefusalReason.NOT_ENTITLED
    assert refusal(roster, expulsion(BOB, FOUNDER)) == RefusalReason.NOT_ENTITLED
    assert refusal(roster, expulsion(BOB, CAROL, keeps=(kept(EVE),))) == RefusalReason.NOT_ENTITLED
    roster, _ = roster.with_records(issuing.expel(BOB, roster, CAROL.node_id))
    assert roster.expelled() == (CAROL.node_id,)
    with pytest.raises(NotEntitled, match="final"):
        issuing.admit(FOUNDER, roster, CAROL.node_id, Trust.MEMBER)
    said_later = member(CAROL, EVE)
    assert roster.with_record(said_later).doubt(said_later) is RefusalReason.SIGNER_EXPELLED


def test_a_delegate_cannot_expel_another() -> None:
    roster = roster_of(*DELEGATES, expulsion(BOB, ALICE))
    assert not roster.is_expelled(ALICE.node_id)
    assert roster.waiting()[0][1] is RefusalReason.NOT_ENTITLED


def test_expelling_a_delegate_keeps_its_guests_and_its_expulsions() -> None:
    roster = roster_of(*DELEGATES, member(BOB, CAROL, serial=3), member(FOUNDER, DAVE), expulsion(BOB, DAVE))
    after, refusals = roster.with_records(issuing.expel(FOUNDER, roster, BOB.node_id))
    assert not refusals
    assert set(after.expelled()) == {BOB.node_id, DAVE.node_id}
    assert after.trust_of(CAROL.node_id) is Trust.MEMBER
    strict, _ = roster.with_records(issuing.expel(FOUNDER, roster, BOB.node_id, keeps_admitted=False))
    assert not strict.is_member(CAROL.node_id)


def test_taking_rights_away_loses_nobody() -> None:
    roster = roster_of(*DELEGATES, member(BOB, CAROL), member(FOUNDER, DAVE), expulsion(BOB, DAVE))
    after, refusals = roster.with_records(issuing.admit(FOUNDER, roster, BOB.node_id, Trust.INVITED))
    assert not refusals
    assert not after.may_invite(BOB.node_id)
    assert not after.may_expel(BOB.node_id)
    assert after.trust_of(BOB.node_id) is Trust.INVITED
    assert after.trust_of(CAROL.node_id) is Trust.MEMBER
    assert after.expelled() == (DAVE.node_id,)


# ---------------------------------------------------------------- models


def test_the_founder_and_delegates_say_what_the_swarm_serves() -> None:
    roster = roster_of(*DELEGATES, member(FOUNDER, CAROL))
    with pytest.raises(NotEntitled):
        issuing.serve_model(CAROL, roster, "m", SHA)
    roster = roster.with_record(issuing.serve_model(FOUNDER, roster, "m", SHA, context_tokens=2048))
    roster = roster.with_record(issuing.serve_model(ALICE, roster, "m", SHA, "throughput", 1024, 8))
    (model,) = roster.models()
    assert (model.subject, model.objective, model.context_tokens, model.streams) == ("m", "throughput", 1024, 8)
    roster = roster.with_record(issuing.serve_model(FOUNDER, roster, "m", SHA, is_served=False))
    assert roster.models() == ()


def _models_after_a_delegates_words() -> Roster:
    """The founder's "a" and "b"; then Bob has other weights for "a", no longer serves "b", and adds "c"."""
    roster = roster_of(*DELEGATES)
    for key, model, weights, is_served in (
        (FOUNDER, "a", SHA, True), (FOUNDER, "b", SHA, True), (FOUNDER, "d", SHA, True),
        (BOB, "a", "cd" * 32, True), (BOB, "b", SHA, False), (BOB, "c", SHA, True),
    ):  # fmt: skip
        roster = roster.with_record(issuing.serve_model(key, roster, model, weights, streams=3, is_served=is_served))
    return roster


@pytest.mark.parametrize("is_expelled", [True, False])
def test_what_a_delegate_said_of_models_holds_after_it_is_none(is_expelled: bool) -> None:
    roster = _models_after_a_delegates_words()
    before = [(each.subject, each.weights_sha256, each.streams) for each in roster.models()]
    assert [name for name, _, _ in before] == ["a", "c", "d"]
    records = (
        issuing.expel(FOUNDER, roster, BOB.node_id)
        if is_expelled
        else issuing.admit(FOUNDER, roster, BOB.node_id, Trust.TRUSTED)
    )
    after, refusals = roster.with_records(records)
    assert not refusals
    assert not after.may_manage(BOB.node_id)
    assert [(each.subject, each.weights_sha256, each.streams) for each in after.models()] == before


def test_a_delegate_that_stays_one_keeps_its_word_on_models() -> None:
    roster = _models_after_a_delegates_words()
    assert len(issuing.admit(FOUNDER, roster, BOB.node_id, Trust.TRUSTED, may_expel=True)) == 1


def test_a_roster_holds_the_latest_word_on_everything_and_what_still_waits() -> None:
    words = [state(FOUNDER, ServedModel(SWARM, "model", serial, SHA)) for serial in (1, 2)]
    waiting = state(EVE, Membership(SWARM, DAVE.node_id, 1, Trust.MEMBER))
    roster = Roster(SWARM).with_records([waiting])[0]
    assert roster.holds(waiting)
    assert not roster.holds(FOUNDING)
    member = state(FOUNDER, Membership(SWARM, BOB.node_id, 1, Trust.MEMBER))
    roster = roster.with_records([FOUNDING, *words, member])[0]
    assert [roster.holds(each) for each in (FOUNDING, *words, member, waiting)] == [True, False, True, True, True]
    expulsion = state(FOUNDER, Expulsion(SWARM, BOB.node_id, 1))
    roster = roster.with_record(expulsion)
    assert (roster.holds(member), roster.holds(expulsion)) == (False, True)
    assert roster.expulsion_record(BOB.node_id) == expulsion
    assert roster.expulsion_record(ALICE.node_id) is None


@pytest.mark.parametrize("seed", range(20))
def test_two_rosters_that_agree_hold_the_same_records(seed: int) -> None:
    words = [state(FOUNDER, ServedModel(SWARM, f"m{number % 3}", 1 + number, SHA)) for number in range(6)]
    words += [state(FOUNDER, Membership(SWARM, key.node_id, 1, Trust.MEMBER, may_invite=True)) for key in (ALICE, BOB)]
    words += [state(ALICE, Membership(SWARM, CAROL.node_id, serial, Trust.MEMBER)) for serial in (1, 2)]
    words += [state(FOUNDER, Expulsion(SWARM, BOB.node_id, 1)), FOUNDING]
    shuffled = random.Random(seed).sample(words, len(words))
    held = [{each for each in words if Roster(SWARM).with_records(order)[0].holds(each)} for order in (words, shuffled)]
    assert held[0] == held[1]
    assert len(held[0]) == 3 + 1 + 1 + 1 + 1  # models, Alice, Carol, the expulsion, the founding
