"""What is told to whom in a swarm too large for a link to everybody."""

import random

from potluck.identity.keys import NodeKey
from potluck.swarm.adverts import AdvertReader
from potluck.swarm.dialling import MESH_UP_TO
from potluck.swarm.findings import Findings
from potluck.swarm.records import RecordStore, entry_of
from potluck.swarm.spreading import REPORT_FAN_OUT, ROUND_FAN_OUT, ROUND_GAP_S, Spreading
from potluck.wire.effects import SendTo
from potluck.wire.messages import Digests, Message, Suspicion
from tests.support.swarm_records import signed

PEOPLE = [NodeKey.from_seed(number.to_bytes(32, "big")) for number in range(1, MESH_UP_TO + 8)]
ME, LINKED = PEOPLE[0].node_id, [key.node_id for key in PEOPLE[1:17]]
NOW = 100.0


def spreading() -> tuple[Spreading, Findings, list[bytes]]:
    """A large swarm, and the keys of its adverts. Sixteen links; eight carry news."""
    store, findings, reader = RecordStore(), Findings(), AdvertReader()
    for key in PEOPLE:
        record = signed(key)
        store.put(entry_of(record, NOW, reader.read(record)))
    linked = dict.fromkeys(LINKED)
    part = Spreading(ME, store, linked, random.Random(0), findings, NOW)
    for node in LINKED:
        part.backbone.link_up(node)
    for node in [node for node in LINKED if node not in part.backbone.carriers][:4]:
        part.backbone.is_chosen_by(node, True)
    return part, findings, [entry.key for entry in store.adverts()]


def sent(findings: Findings) -> list[tuple[bytes, Message]]:
    return [(effect.node, effect.message) for effect in findings.take().effects if isinstance(effect, SendTo)]


def rounds(part: Spreading, findings: Findings, count: int = 8) -> list[list[tuple[bytes, Message]]]:
    told = []
    for number in range(count):
        part.end_of_input(NOW + number * ROUND_GAP_S * 1.01)
        told.append(sent(findings))
    return told


def test_news_goes_over_the_backbone_in_rounds_once_to_each() -> None:
    part, findings, keys = spreading()
    part.news(keys[5], sender=b"somebody")
    told = rounds(part, findings)
    assert [len(each) for each in told] == [ROUND_FAN_OUT, ROUND_FAN_OUT, 8 - 2 * ROUND_FAN_OUT, 0, 0, 0, 0, 0]
    assert sorted(node for each in told for node, _ in each) == sorted(part.backbone.carriers)


def test_who_announced_it_is_not_told() -> None:
    part, findings, keys = spreading()
    first, second = part.backbone.carriers[0], part.backbone.carriers[-1]
    part.news(keys[5], sender=first)
    part.is_known_around(keys[5], second)
    reached = {node for each in rounds(part, findings) for node, _ in each}
    assert reached == set(part.backbone.carriers) - {first, second}


def test_two_pieces_of_news_travel_together() -> None:
    part, findings, keys = spreading()
    part.news(keys[5], sender=b"somebody")
    part.news(keys[6], sender=b"somebody")
    told = [message for each in rounds(part, findings) for _, message in each]
    assert len(told) == 8
    assert all(isinstance(message, Digests) and len(message.entries) == 2 * 28 for message in told)


def test_a_second_piece_waits_for_the_next_round_and_goes_to_all() -> None:
    part, findings, keys = spreading()
    part.news(keys[5], sender=b"somebody")
    part.end_of_input(NOW)
    assert len(sent(findings)) == ROUND_FAN_OUT
    part.news(keys[6], sender=b"somebody")
    part.end_of_input(NOW + ROUND_GAP_S / 2)
    assert sent(findings) == []
    entries = [
        message.entries[place : place + 8]
        for number in range(1, 8)
        for _, message in (part.end_of_input(NOW + number * ROUND_GAP_S * 1.01), sent(findings))[1]
        if isinstance(message, Digests)
        for place in range(0, len(message.entries), 28)
    ]
    assert entries.count(keys[6]) == 8
    assert entries.count(keys[5]) == 8 - ROUND_FAN_OUT


def test_this_nodes_own_word_goes_to_the_whole_backbone_at_once() -> None:
    part, findings, keys = spreading()
    part.at_once(keys[0])
    part.end_of_input(NOW)
    assert set(part.backbone.carriers) <= {node for node, _ in sent(findings)}


def test_a_report_goes_to_a_few_and_then_to_whoever_may_not_know_it() -> None:
    part, findings, _ = spreading()
    message, informed = Suspicion(PEOPLE[20].node_id, 1, 1), {part.backbone.carriers[0]}
    part.tell_some(message, informed)
    some = {node for node, _ in sent(findings)}
    part.tell_others(message, informed)
    others = {node for node, _ in sent(findings)}
    assert len(some) == REPORT_FAN_OUT
    assert some | others == set(part.backbone.carriers) - {part.backbone.carriers[0]}
    assert not some & others
