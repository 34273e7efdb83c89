"""Which links carry news."""

from potluck.swarm.backbone import CHOSEN, Backbone
from potluck.swarm.dialling import rank
from potluck.swarm.findings import Findings
from potluck.wire.effects import SendTo
from potluck.wire.messages import TellMe

ME = b"\x80" * 32
OTHERS = [number.to_bytes(32, "big") for number in range(1, 13)]
BY_RANK = sorted(OTHERS, key=lambda node: rank(ME, node))


def backbone(*linked: bytes) -> tuple[Backbone, Findings]:
    findings = Findings()
    part = Backbone(ME, findings)
    for node in linked:
        part.link_up(node)
    return part, findings


def told(part: Backbone, findings: Findings) -> dict[bytes, bool]:
    part.tell_choice()
    sent = [effect for effect in findings.take().effects if isinstance(effect, SendTo)]
    return {effect.node: effect.message.is_wanted for effect in sent if isinstance(effect.message, TellMe)}


def test_a_few_links_are_chosen_whatever_order_they_came_in() -> None:
    for order in (OTHERS, OTHERS[::-1]):
        part, findings = backbone(*order)
        assert sorted(part.carriers) == sorted(BY_RANK[:CHOSEN])
        assert told(part, findings) == dict.fromkeys(BY_RANK[:CHOSEN], True)


def test_a_choice_is_told_once() -> None:
    part, findings = backbone(*OTHERS)
    assert told(part, findings)
    assert told(part, findings) == {}


def test_who_chose_this_node_is_told_everything_too_until_it_thinks_otherwise() -> None:
    part, _ = backbone(*OTHERS)
    part.is_chosen_by(BY_RANK[-1], True)
    assert sorted(part.carriers) == sorted([*BY_RANK[:CHOSEN], BY_RANK[-1]])
    part.is_chosen_by(BY_RANK[-1], False)
    assert sorted(part.carriers) == sorted(BY_RANK[:CHOSEN])


def test_who_chose_this_node_and_is_chosen_by_it_stays_when_it_thinks_otherwise() -> None:
    part, _ = backbone(*OTHERS)
    part.is_chosen_by(BY_RANK[0], True)
    part.is_chosen_by(BY_RANK[0], False)
    assert BY_RANK[0] in part.carriers


def test_a_better_link_takes_the_place_of_the_worst_and_both_are_told() -> None:
    part, findings = backbone(*BY_RANK[1 : CHOSEN + 1])
    told(part, findings)
    part.link_up(BY_RANK[0])
    assert told(part, findings) == {BY_RANK[0]: True, BY_RANK[CHOSEN]: False}


def test_a_lost_link_is_replaced_and_nothing_is_sent_to_it() -> None:
    part, findings = backbone(*OTHERS)
    part.is_chosen_by(BY_RANK[0], True)
    told(part, findings)
    part.link_lost(BY_RANK[0])
    assert sorted(part.carriers) == sorted(BY_RANK[1 : CHOSEN + 1])
    assert told(part, findings) == {BY_RANK[CHOSEN]: True}


def test_who_is_not_linked_cannot_choose_this_node() -> None:
    part, _ = backbone(*OTHERS[:2])
    part.is_chosen_by(OTHERS[5], True)
    assert sorted(part.carriers) == sorted(OTHERS[:2])


def test_who_was_told_of_the_choice_and_comes_back_is_told_again() -> None:
    part, findings = backbone(BY_RANK[0])
    told(part, findings)
    part.link_lost(BY_RANK[0])
    part.link_up(BY_RANK[0])
    assert told(part, findings) == {BY_RANK[0]: True}
