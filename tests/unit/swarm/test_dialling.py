"""Whom a node dials, and when."""

import itertools
import random

from potluck.swarm.dialling import LAST_RETRY_S, MESH_UP_TO, SPARSE_LINKS, Dialler
from potluck.swarm.events import Dial

LOW, ME, HIGH = bytes(32), b"\x80" * 32, b"\xff" * 32


def dialler() -> Dialler:
    return Dialler(ME, random.Random(0))


def node(number: int) -> bytes:
    return number.to_bytes(32, "big")


def dialled(part: Dialler, now_s: float, linked: tuple[bytes, ...] = ()) -> list[bytes | None]:
    return [dial.node for dial in part.decide(linked, now_s)]


def test_the_lower_id_dials_and_the_higher_one_waits_a_moment() -> None:
    part = dialler()
    part.is_there(LOW, ("low:1",), 10.0)
    part.is_there(HIGH, ("high:1",), 10.0)
    assert dialled(part, 10.0) == [HIGH]
    assert dialled(part, 11.5) == [LOW]


def test_who_is_linked_or_under_way_is_not_dialled() -> None:
    part = dialler()
    part.is_there(HIGH, ("high:1",), 10.0)
    assert dialled(part, 10.0, (HIGH,)) == []
    assert dialled(part, 11.0) == [HIGH]
    assert dialled(part, 12.0) == []


def test_retries_grow_rarer_and_never_stop() -> None:
    part, times, now_s = dialler(), [], 10.0
    part.is_there(HIGH, ("high:1",), now_s)
    while now_s < 1000.0:
        for dial in part.decide((), now_s):
            times.append(now_s)
            part.failed(dial, now_s)
        now_s += 0.25
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] <= 1.0
    assert max(gaps) <= LAST_RETRY_S * 1.25 + 0.5
    assert len(times) > 15


def test_a_changed_address_is_tried_at_once() -> None:
    part = dialler()
    part.is_there(HIGH, ("old:1",), 10.0)
    for now_s in range(10, 40):
        for dial in part.decide((), float(now_s)):
            part.failed(dial, float(now_s))
    part.is_there(HIGH, ("new:1",), 40.0)
    assert part.decide((), 40.0) == [Dial(HIGH, ("new:1",))]


def test_one_that_went_is_tried_again_and_one_that_left_is_not() -> None:
    part = dialler()
    for each, address in ((LOW, "low:1"), (HIGH, "high:1")):
        part.is_there(each, (address,), 10.0)
    part.is_gone(LOW)
    part.forget(HIGH)
    tried = []
    for now_s in range(20, 30):
        dials = part.decide((), float(now_s))
        tried += [dial.node for dial in dials]
        for dial in dials:
            part.failed(dial, float(now_s))
    assert set(tried) == {LOW}
    assert len(tried) >= 5


def test_a_small_swarm_is_a_full_mesh_and_a_large_one_is_not() -> None:
    part = dialler()
    for number in range(1, MESH_UP_TO):
        part.is_there(node(number), (f"{number}:1",), 10.0)
    assert len(dialled(part, 20.0)) == 16
    assert len(part._wanted()) == MESH_UP_TO - 1
    for number in range(MESH_UP_TO, 1000):
        part.is_there(node(number), (f"{number}:1",), 30.0)
    before = set(part._wanted())
    assert len(before) == SPARSE_LINKS
    part.is_there(node(5000), ("5000:1",), 40.0)
    gone = next(iter(before))
    part.is_gone(gone)
    assert len(before & set(part._wanted())) >= SPARSE_LINKS - 2
    assert gone not in part._wanted()


def test_loose_addresses_are_dialled_bounded_and_forgotten_when_they_answer() -> None:
    part = dialler()
    for number in range(200):
        part.found(f"10.0.0.{number}:1", 10.0)
    dials = part.decide((), 10.0)
    assert len(dials) == 16
    assert all(dial.node is None for dial in dials)
    part.succeeded(dials[0], HIGH)
    assert dials[0].addresses[0] not in part._loose
    assert len(part._loose) == 63


def test_addresses_that_led_nowhere_give_way_to_new_ones() -> None:
    part = dialler()
    for number in range(64):
        part.found(f"10.0.0.{number}:1", 10.0)
    part.found("10.1.0.1:1", 10.0)
    assert "10.1.0.1:1" not in part._loose
    dial = part.decide((), 10.0)[0]
    part.failed(dial, 11.0)
    part.found("10.1.0.1:1", 12.0)
    assert "10.1.0.1:1" in part._loose
    assert dial.addresses[0] not in part._loose


def test_after_a_return_all_that_are_away_are_tried_at_once() -> None:
    part = dialler()
    for number in range(1, 11):
        part.is_there(node(number), (f"{number}:1",), 10.0)
        part.is_gone(node(number))
    assert len(dialled(part, 20.0)) == 1
    part.somebody_returned()
    assert len(dialled(part, 20.1)) == 9


def test_who_was_turned_away_by_everybody_dials_nobody_for_a_while() -> None:
    dialler = Dialler(bytes(32), random.Random(0))
    dialler.remember(b"\1" * 32, ("host:1",))
    dialler.found("other:1", 0.0)
    dialler.pause(60.0)
    assert not dialler.decide((), 59.0)
    assert not dialler.begin(Dial(b"\1" * 32, ("host:1",)), 59.0)
    assert dialler.decide((), 61.0)
