"""The store of records: hashes that depend on its content only, and comparisons that find every difference."""

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.identity.signed import Signed
from potluck.swarm import exchange
from potluck.swarm.adverts import Advert, ReadAdvert, advert_key
from potluck.swarm.records import Entry, RecordStore, entry_of, parse_digests
from potluck.wire.messages import Buckets, Digests, Summary

STATEMENTS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), max_size=60)


def entry(number: int, version: int) -> Entry:
    """Unsigned: the store does not ask."""
    told = Advert(node=number.to_bytes(32, "big"), incarnation=1, version=version)
    record = Signed("advert", bytes([version]), told.node, bytes(64))
    return entry_of(
        record,
        0.0,
        ReadAdvert(told, advert_key(told.node), told.stamp, hash((number, version)) & (1 << 64) - 1, number),
    )


def store_of(statements: list[tuple[int, int]]) -> RecordStore:
    store = RecordStore()
    for number, version in statements:
        fresh = entry(number, version)
        held = store.get(fresh.key)
        if held is None or held.stamp < fresh.stamp:
            store.put(fresh)
    return store


@settings(max_examples=40, deadline=None)
@given(STATEMENTS, st.randoms())
def test_the_order_of_arrival_does_not_matter(statements: list[tuple[int, int]], draw: object) -> None:
    shuffled = list(statements)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    assert store_of(statements).root == store_of(shuffled).root
    assert store_of(statements).bucket_hashes(0) == store_of(shuffled).bucket_hashes(0)


@settings(max_examples=40, deadline=None)
@given(STATEMENTS)
def test_what_is_taken_out_leaves_no_trace(statements: list[tuple[int, int]]) -> None:
    store = store_of(statements)
    for held in list(store):
        store.remove(held.key)
    assert (store.root, len(store)) == (0, 0)
    assert not any(store.bucket_hashes(1000))


def synchronise(left: RecordStore, right: RecordStore) -> int:
    """One comparison as gossip does it; returns the bytes of digests that it took."""
    answer = exchange.answer_summary(right, Summary(left.root_bytes(), len(left)))
    if answer is None:
        return 0
    assert isinstance(answer, Buckets)
    digests, _ = exchange.answer_buckets(left, answer)
    assert isinstance(digests, Digests)
    listed = list(parse_digests(digests.entries))
    wanted = [each.key for each in listed if exchange.is_news(right.get(each.key), each.stamp, each.check, None)]
    for given_ in exchange.lacking(right, digests.buckets, listed):
        held = left.get(given_.key)
        if held is None or held.stamp < given_.stamp:
            left.put(given_)
    for key in wanted:
        told = left.get(key)
        assert told is not None
        right.put(told)
    return len(digests.entries)


@settings(max_examples=60, deadline=None)
@given(STATEMENTS, STATEMENTS)
def test_one_comparison_makes_two_stores_equal(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    left, right = store_of(one), store_of(other)
    synchronise(left, right)
    assert left.root == right.root
    assert {held.key: held.stamp for held in left} == {held.key: held.stamp for held in store_of(one + other)}


def test_a_small_difference_between_large_stores_costs_little() -> None:
    statements = [(number, 1) for number in range(1000)]
    left, right = store_of(statements), store_of([*statements, (7, 2)])
    assert synchronise(left, right) < 20 * 28
    assert left.root == right.root


def test_only_what_is_due_expires() -> None:
    store = RecordStore()
    told = Advert(node=bytes(32), lifetime_s=10)
    record = Signed("advert", b"", told.node, bytes(64))
    store.put(entry_of(record, 5.0, ReadAdvert(told, advert_key(told.node), told.stamp, 1, 1)))
    store.put(entry_of(Signed("member", b"", bytes(32), bytes(64)), 5.0, None))
    assert store.expire(14.9) == []
    assert [gone.key for gone in store.expire(15.0)] == [advert_key(bytes(32))]
    assert store.expire(1e9) == []
    assert len(store) == 1
