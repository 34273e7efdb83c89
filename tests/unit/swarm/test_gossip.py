"""One node's gossip, told what arrives and what time it is."""

import dataclasses

import msgspec
import pytest

from potluck.identity.signed import Signed, sign
from potluck.swarm.adverts import advert_key
from potluck.swarm.duplicates import FORGET_S
from potluck.swarm.events import Dial, Drop
from potluck.swarm.liveness import PING_ATTEMPTS
from potluck.swarm.records import entry_of
from potluck.wire.messages import (
    Buckets,
    Digests,
    Ping,
    Pong,
    Records,
    Summary,
    Suspicion,
    Wanted,
)
from tests.support.swarm_records import KEYS, People, advert, gossip, kinds, member_record, records, sent, signed

ME, ONE, TWO, THREE = KEYS[0], KEYS[1], KEYS[2], KEYS[3]
NOW = 100.0


def hearing(*heard: Signed, members: tuple[object, ...] = (ME, ONE, TWO)) -> tuple[object, People]:
    people = People(*members)  # type: ignore[arg-type]
    node = gossip(ME, people, NOW)
    node.link_up(ONE.node_id, NOW)
    node.on_message(ONE.node_id, records(*heard), NOW)
    return node, people


# ---------------------------------------------------------------- records


def test_a_new_member_is_in_the_view_and_is_announced() -> None:
    node, _ = hearing()
    outcome = node.on_message(ONE.node_id, records(signed(TWO)), NOW)
    assert kinds(outcome) == ["joined"]
    assert TWO.node_id in node.view(NOW)
    assert [len(each.entries) for each in sent(outcome, Digests)] == [28]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (signed(THREE), "not_a_member"),
        (msgspec.structs.replace(signed(TWO), signature=bytes(64)), "forged"),
        (signed(TWO, 1, 4), "replayed"),
        (signed(TWO, 1, 6, lifetime_s=10**6), "future_dated"),
        (signed(TWO, 1, 5 + (1 << 21)), "future_dated"),
    ],
)
def test_a_bad_record_is_refused_with_its_own_reason(record: Signed, reason: str) -> None:
    node, _ = hearing(signed(TWO, 1, 5))
    later = NOW + 10.0
    outcome = node.on_message(ONE.node_id, records(record), later)
    assert [(event.kind, event.reason, event.node) for event in outcome.events] == [("refused", reason, record.signer)]
    assert node.counters[reason] == 1
    assert node.advert(TWO.node_id).version == 5
    assert THREE.node_id not in node.view(later)


def test_a_record_past_its_lifetime_is_expired_however_it_comes() -> None:
    node, _ = hearing()
    node.on_message(ONE.node_id, records(signed(TWO), age_s=130.0), NOW)
    assert node.counters["expired"] == 1
    node.on_message(ONE.node_id, records(signed(TWO)), NOW)
    for second in range(1, 122):
        node.tick(NOW + second)
    assert TWO.node_id not in node.view(NOW + 122)
    node.on_message(ONE.node_id, records(signed(TWO)), NOW + 130)
    assert node.counters["expired"] == 2
    assert TWO.node_id not in node.view(NOW + 130)


def test_an_advert_of_an_expelled_member_is_refused_as_such() -> None:
    node, _ = hearing(signed(TWO))
    outcome = node.on_message(ONE.node_id, records(member_record(TWO, "expulsion")), NOW)
    assert kinds(outcome) == ["expelled"]
    assert TWO.node_id not in node.view(NOW)
    outcome = node.on_message(ONE.node_id, records(signed(TWO, 1, 2)), NOW)
    assert [event.reason for event in outcome.events] == ["expelled"]


def test_the_link_to_an_expelled_member_is_cut() -> None:
    node, _ = hearing(signed(ONE))
    outcome = node.on_message(ONE.node_id, records(member_record(ONE, "expulsion")), NOW)
    assert Drop(ONE.node_id, "expelled") in outcome.effects


def test_a_membership_record_that_is_refused_counts_under_its_own_reason() -> None:
    node, _ = hearing()
    forged = msgspec.structs.replace(member_record(THREE), signer=TWO.node_id)
    outcome = node.on_message(ONE.node_id, records(forged), NOW)
    assert [event.reason for event in outcome.events] == ["unauthorised"]
    assert len(node.store) == 0


def test_records_may_come_in_the_wrong_order() -> None:
    node, people = hearing()
    outcome = node.on_message(ONE.node_id, records(member_record(THREE, "delegated"), member_record(THREE)), NOW)
    assert kinds(outcome) == []
    assert len(node.membership_records()) == 2
    assert THREE.node_id in people.members


def test_an_advert_that_comes_before_its_member_is_asked_for_again() -> None:
    node, _ = hearing(signed(THREE))
    assert node.counters["not_a_member"] == 1
    outcome = node.on_message(ONE.node_id, records(member_record(THREE)), NOW)
    assert Wanted(advert_key(THREE.node_id)) in sent(outcome, Wanted, ONE.node_id)
    node.on_message(ONE.node_id, records(signed(THREE)), NOW)
    assert THREE.node_id in node.view(NOW)


def test_age_shortens_a_life_and_never_extends_it() -> None:
    node, _ = hearing(signed(TWO))
    node.on_message(ONE.node_id, records(signed(TWO), age_s=100.0), NOW)
    node.on_message(ONE.node_id, records(signed(TWO), age_s=0.0), NOW + 10)
    assert node.view(NOW).nodes[TWO.node_id].expires_s == NOW + 20
    for second in range(1, 21):
        node.tick(NOW + second)
    assert TWO.node_id not in node.view(NOW + 20)


def test_who_leaves_is_gone_at_once() -> None:
    node, _ = hearing(signed(TWO))
    outcome = node.on_message(ONE.node_id, records(signed(TWO, 1, 2, is_leaving=True)), NOW)
    assert kinds(outcome) == ["left"]
    assert TWO.node_id not in node.view(NOW)


# ---------------------------------------------------------------- what this node says of itself


def test_a_node_with_its_switch_off_advertises_nothing() -> None:
    node = gossip(ME, People(ME, ONE), NOW)
    node.link_up(ONE.node_id, NOW)
    told = [node.publish(None, NOW), *(node.tick(NOW + second) for second in range(1, 100))]
    assert not [message for outcome in told for message in sent(outcome, Digests)]
    assert len(node.store) == 0


def test_switching_off_says_goodbye() -> None:
    node = gossip(ME, People(ME, ONE), NOW)
    node.publish(advert(ME), NOW)
    node.publish(None, NOW + 0.1)
    assert node.advert(ME.node_id).is_leaving
    assert node.advert(ME.node_id).shards == ()
    assert ME.node_id not in node.view(NOW + 0.1)


def test_an_unchanged_advert_is_renewed_after_two_thirds_of_its_life_and_not_before() -> None:
    node = gossip(ME, People(ME, ONE), NOW)
    node.publish(advert(ME), NOW)
    versions = []
    for second in range(1, 82):
        node.tick(NOW + second)
        versions.append(node.advert(ME.node_id).version)
    assert versions[70] == 1
    assert versions[-1] == 2


def test_a_node_that_forgot_its_count_goes_beyond_what_it_said_before() -> None:
    node = gossip(ME, People(ME, ONE), NOW, incarnation=1)
    node.publish(advert(ME), NOW)
    node.link_up(ONE.node_id, NOW)
    outcome = node.on_message(ONE.node_id, records(signed(ME, 7, 3), age_s=30.0), NOW + 1)
    assert node.advert(ME.node_id).stamp == (8, 1)
    assert "duplicate" not in kinds(outcome)


def test_a_second_machine_with_this_nodes_key_is_reported() -> None:
    node = gossip(ME, People(ME, ONE), NOW)
    node.publish(advert(ME), NOW)
    node.link_up(ONE.node_id, NOW)
    outcome = node.on_message(ONE.node_id, records(signed(ME, 1, 9, addresses=("elsewhere:1",))), NOW + 10)
    assert [(event.kind, "elsewhere:1" in event.reason) for event in outcome.events] == [("duplicate", True)]
    assert [twin.node for twin in node.view(NOW + 10).duplicates] == [ME.node_id]


def twins_seen(node: object, now_s: float) -> list[bytes]:
    node.tick(now_s)  # type: ignore[attr-defined]
    return [twin.node for twin in node.view(now_s).duplicates]  # type: ignore[attr-defined]


def test_a_clone_that_is_gone_is_forgotten_by_the_original_when_others_forget_it() -> None:
    node = gossip(ME, People(ME, ONE), NOW)
    node.publish(advert(ME), NOW)
    node.link_up(ONE.node_id, NOW)
    for version, heard_s in ((9, NOW + 10), (90, NOW + 100)):
        node.on_message(ONE.node_id, records(signed(ME, 1, version, addresses=("elsewhere:1",))), heard_s)
    node.on_message(ONE.node_id, records(signed(ME, 1, 9, addresses=("elsewhere:1",)), age_s=50.0), NOW + 110)
    for second in range(120, int(100 + FORGET_S)):  # until nothing else changes any more
        assert twins_seen(node, NOW + second) == [ME.node_id]
    assert twins_seen(node, NOW + 100 + FORGET_S) == []
    node.on_message(ONE.node_id, records(signed(ME, 1, 900, addresses=("elsewhere:1",))), NOW + 800)
    assert twins_seen(node, NOW + 801) == [ME.node_id]


def test_two_machines_with_one_key_are_noticed_by_others_and_a_restart_is_not() -> None:
    first, second = b"instance", b"another!"
    node, _ = hearing(signed(TWO, 1, 1, instance=first))
    restarted = node.on_message(ONE.node_id, records(signed(TWO, 2, 1, instance=second)), NOW + 30)
    assert kinds(restarted) == []
    node.on_message(ONE.node_id, records(signed(TWO, 2, 2, instance=first, addresses=("elsewhere:1",))), NOW + 60)
    outcome = node.on_message(ONE.node_id, records(signed(TWO, 2, 3, instance=second)), NOW + 65)
    assert kinds(outcome) == ["duplicate"]
    assert [twin.node for twin in node.view(NOW + 65).duplicates] == [TWO.node_id]
    for version in range(1, 20):  # one of the two goes on, and nothing else happens
        node.on_message(ONE.node_id, records(signed(TWO, 2, 3 + version, instance=second)), NOW + 65 + 30 * version)
    assert twins_seen(node, NOW + 60 + FORGET_S - 1) == [TWO.node_id]
    assert twins_seen(node, NOW + 60 + FORGET_S) == []


# ---------------------------------------------------------------- who is there


def answer_pings(node: object, outcome: object, but: bytes, now_s: float) -> None:
    for effect in outcome.effects:  # type: ignore[attr-defined]
        if isinstance(getattr(effect, "message", None), Ping) and effect.node != but:
            node.on_message(effect.node, Pong(effect.message.nonce), now_s)  # type: ignore[attr-defined]


def test_a_silent_node_is_lost_after_several_pings_and_its_link_is_cut() -> None:
    node, _ = hearing(signed(ONE), signed(TWO))
    node.link_up(TWO.node_id, NOW)
    told, now_s = [], NOW
    while "lost" not in told and now_s < NOW + 20:
        now_s += 0.25
        outcome = node.tick(now_s)
        answer_pings(node, outcome, TWO.node_id, now_s)
        told += kinds(outcome)
    assert NOW + 2 < now_s < NOW + 6
    assert Drop(TWO.node_id, "it does not answer") in outcome.effects
    assert TWO.node_id not in node.view(now_s)
    assert ONE.node_id in node.view(now_s)
    assert PING_ATTEMPTS > 1


def test_a_broken_link_is_dialled_again_before_anybody_is_called_lost() -> None:
    node, _ = hearing(signed(ONE), signed(TWO))
    node.link_up(TWO.node_id, NOW)
    outcome = node.link_lost(TWO.node_id, NOW + 1)
    assert Dial(TWO.node_id, advert(TWO).addresses) in outcome.effects
    seen = node.view(NOW + 1).nodes[TWO.node_id]
    assert (seen.is_connected, seen.is_suspect) == (False, True)
    outcome = node.unreachable(TWO.node_id, NOW + 1, NOW + 1.1, "refused")
    assert kinds(outcome) == ["lost"]
    assert [message.node for message in sent(outcome, Suspicion)] == [TWO.node_id]
    assert kinds(node.link_up(TWO.node_id, NOW + 5)) == ["returned"]
    assert node.view(NOW + 5).nodes[TWO.node_id].is_connected


def test_nobody_is_lost_by_anothers_word() -> None:
    node, _ = hearing(signed(ONE), signed(TWO))
    node.link_up(TWO.node_id, NOW)
    outcome = node.on_message(ONE.node_id, Suspicion(TWO.node_id, 1, 1), NOW + 1)
    assert kinds(outcome) == []
    told = []
    for quarter in range(1, 40):
        outcome = node.tick(NOW + 1 + quarter / 4)
        answer_pings(node, outcome, b"", NOW + 1 + quarter / 4)
        told += kinds(outcome)
    assert told == []
    assert TWO.node_id in node.view(NOW + 11)


def test_a_report_is_passed_on_once_and_not_to_whom_it_came_from() -> None:
    node, _ = hearing(signed(ONE), signed(TWO), members=(ME, ONE, TWO, THREE))
    node.link_up(THREE.node_id, NOW)
    first = node.on_message(ONE.node_id, Suspicion(TWO.node_id, 1, 1), NOW + 1)
    again = node.on_message(ONE.node_id, Suspicion(TWO.node_id, 1, 1), NOW + 2)
    assert (len(sent(first, Suspicion, THREE.node_id)), len(sent(first, Suspicion))) == (1, 1)
    assert not sent(again, Suspicion)


def test_two_reports_of_one_loss_do_not_go_round_for_ever() -> None:
    """Those who know the older statement heed both."""
    node, _ = hearing(signed(ONE), signed(TWO), signed(THREE), members=(ME, ONE, TWO, THREE))
    node.link_up(THREE.node_id, NOW)
    older, newer, newest = (Suspicion(TWO.node_id, 1, version) for version in (1, 2, 3))
    told = [sent(node.on_message(ONE.node_id, each, NOW + 1), Suspicion) for each in (older, newer) * 5]
    assert [bool(each) for each in told[:3]] == [True, True, True]
    assert not any(told[6:])
    assert sent(node.on_message(ONE.node_id, newest, NOW + 2), Suspicion)


def test_who_finds_a_report_true_tells_those_who_may_not_know_it() -> None:
    node, _ = hearing(signed(TWO), members=(ME, ONE, TWO, *KEYS[3:]))
    others = [key.node_id for key in (ONE, *KEYS[3:])]
    for other in others:
        node.link_up(other, NOW)
    heard = node.on_message(ONE.node_id, Suspicion(TWO.node_id, 1, 1), NOW + 1)
    found = node.unreachable(TWO.node_id, NOW + 2, NOW + 2, "refused")
    told = [effect.node for outcome in (heard, found) for effect in outcome.effects if effect.node != TWO.node_id]
    assert sorted(told) == sorted(set(others) - {ONE.node_id})


def test_a_report_of_a_later_statement_than_the_one_that_is_known_is_looked_into() -> None:
    """Its advert may come a moment later, from somebody who has not heard the report."""
    node, _ = hearing(signed(ONE), signed(TWO, 1, 1))
    node.on_message(ONE.node_id, Suspicion(TWO.node_id, 1, 2), NOW + 1)
    node.on_message(ONE.node_id, records(signed(TWO, 1, 2)), NOW + 1.01)
    told = [effect for quarter in range(1, 9) for effect in node.tick(NOW + 1 + quarter / 4).effects]
    assert Dial(TWO.node_id, advert(TWO).addresses) in told


def test_an_advert_of_a_node_that_was_reported_before_it_was_known_is_looked_into() -> None:
    node, _ = hearing(signed(ONE))
    node.on_message(ONE.node_id, Suspicion(TWO.node_id, 1, 2), NOW + 1)
    node.on_message(ONE.node_id, records(signed(TWO, 1, 2)), NOW + 1.01)
    told = [effect for quarter in range(1, 9) for effect in node.tick(NOW + 1 + quarter / 4).effects]
    assert Dial(TWO.node_id, advert(TWO).addresses) in told


def test_a_node_that_hears_of_its_own_death_speaks_up() -> None:
    node = gossip(ME, People(ME, ONE), NOW)
    node.publish(advert(ME), NOW)
    node.link_up(ONE.node_id, NOW)
    outcome = node.on_message(ONE.node_id, Suspicion(ME.node_id, 1, 1), NOW + 5)
    assert node.advert(ME.node_id).version == 2
    assert len(sent(outcome, Digests)) == 1


def test_a_node_that_spoke_just_before_it_hears_of_its_own_death_speaks_up_a_moment_later() -> None:
    """Whoever missed its last word would otherwise go without until the next one is due."""
    node = gossip(ME, People(ME, ONE), NOW)
    node.publish(advert(ME), NOW)
    node.link_up(ONE.node_id, NOW)
    node.on_message(ONE.node_id, Suspicion(ME.node_id, 1, 1), NOW + 0.1)
    assert node.advert(ME.node_id).version == 1
    node.tick(NOW + 0.25)
    assert node.advert(ME.node_id).version == 1
    node.tick(NOW + 0.6)
    assert node.advert(ME.node_id).version == 2
    node.tick(NOW + 1.2)
    assert node.advert(ME.node_id).version == 2


def test_a_goodbye_goes_to_every_link() -> None:
    others = [key.node_id for key in KEYS[1:]]
    node = gossip(ME, People(*KEYS), NOW)
    node.publish(advert(ME), NOW)
    for other in others:
        node.link_up(other, NOW)
    outcome = node.publish(None, NOW + 5)
    assert all(sent(outcome, Digests, other) for other in others)


def test_nobody_is_reported_who_said_goodbye_before_the_loss_was_noticed() -> None:
    node, _ = hearing(signed(ONE), signed(TWO))
    assert sent(node.unreachable(TWO.node_id, NOW + 2, NOW + 2, "refused"), Suspicion)
    outcome = node.on_message(ONE.node_id, records(signed(TWO, 1, 2, is_leaving=True), age_s=1.0), NOW + 2.5)
    assert not sent(outcome, Suspicion)


def test_a_machine_that_slept_blames_nobody() -> None:
    node, _ = hearing(signed(ONE, lifetime_s=7200), signed(TWO, lifetime_s=7200))
    node.link_up(TWO.node_id, NOW)
    node.tick(NOW + 1.5)
    outcome = node.tick(NOW + 3600)
    assert kinds(outcome) == []
    assert {ONE.node_id, TWO.node_id} <= set(node.view(NOW + 3600).nodes)


# ---------------------------------------------------------------- comparing


def test_equal_nodes_say_nothing_more() -> None:
    node, _ = hearing(signed(TWO))
    other, _ = hearing(signed(TWO))
    assert node.store.root_bytes() == other.store.root_bytes()
    outcome = node.on_message(ONE.node_id, Summary(other.store.root_bytes(), 1), NOW)
    assert not sent(outcome, Buckets)


def test_what_is_missing_on_either_side_is_exchanged() -> None:
    people = People(ME, ONE, TWO, THREE)
    left, right = gossip(ME, people, NOW), gossip(ONE, people, NOW, seed=1)
    left.link_up(ONE.node_id, NOW)
    right.link_up(ME.node_id, NOW)
    left.on_message(ONE.node_id, records(signed(TWO, 1, 2)), NOW)
    right.on_message(ME.node_id, records(signed(THREE), signed(TWO, 1, 1)), NOW)
    waiting = [(left, ME, message) for message in sent(right.tick(NOW + 9), Summary)]
    waiting += [(right, ONE, message) for message in sent(left.tick(NOW + 9), Summary)]
    while waiting:
        node, _, message = waiting.pop(0)
        other, sender = (right, ONE) if node is left else (left, ME)
        waiting += [(other, None, each) for each in sent(node.on_message(sender.node_id, message, NOW + 9))]
    assert left.store.root == right.store.root
    assert left.advert(TWO.node_id).version == right.advert(TWO.node_id).version == 2


def test_a_stranger_is_given_no_records() -> None:
    node, _ = hearing(signed(TWO))
    outcome = node.on_message(THREE.node_id, Wanted(advert_key(TWO.node_id)), NOW)
    assert not sent(outcome, Records)
    assert node.counters["asked_by_stranger"] == 1


@pytest.mark.parametrize("message", [Digests(b"", b"x" * 27), Wanted(b"x" * 7), Buckets(bytes(17 * 8))])
def test_odd_lengths_are_counted_and_dropped(message: object) -> None:
    node, _ = hearing(signed(TWO))
    outcome = node.on_message(ONE.node_id, message, NOW)
    assert not sent(outcome)
    assert node.counters["malformed"] == 1


def test_who_announces_and_does_not_deliver_keeps_nobody_from_delivering() -> None:
    node, _ = hearing(members=(ME, ONE, TWO, THREE))
    news = Digests(b"", advert_key(THREE.node_id) + (1).to_bytes(8, "big") + (9).to_bytes(8, "big") + bytes(4))
    assert len(sent(node.on_message(ONE.node_id, news, NOW), Wanted)) == 1
    assert len(sent(node.on_message(TWO.node_id, news, NOW + 0.5), Wanted)) == 0
    assert len(sent(node.on_message(TWO.node_id, news, NOW + 1.5), Wanted)) == 1
    assert len(sent(node.on_message(ONE.node_id, news, NOW + 3), Wanted)) == 1
    assert len(sent(node.on_message(TWO.node_id, news, NOW + 3.1), Wanted)) == 1


# ---------------------------------------------------------------- bounds


def test_what_was_superseded_makes_room_and_is_not_asked_for_again() -> None:
    people = People(ME, ONE, TWO)
    latest: list[Signed] = []
    trust = people.trust()
    node = gossip(ME, people, NOW)
    node.intake._trust = dataclasses.replace(trust, holds=lambda record: record in latest)
    node.link_up(ONE.node_id, NOW)
    for serial in range(50):
        latest[:] = [sign(ME, "model", str(serial).encode())]
        node.on_message(ONE.node_id, records(*latest), NOW)
    assert node.membership_records() == latest
    old = entry_of(sign(ME, "model", b"3"), NOW, None)
    assert not sent(node.on_message(ONE.node_id, Digests(b"", old.digest), NOW), Wanted)


def test_a_member_that_speaks_without_end_fills_no_memory() -> None:
    node, _ = hearing()
    for version in range(1, 6000):
        node.on_message(ONE.node_id, records(signed(TWO, 1, version, lifetime_s=14_400)), NOW + version / 1000)
    assert len(node.store._expiries) < 2048
    assert len(node.store) == 1
