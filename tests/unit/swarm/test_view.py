"""What a view answers."""

from potluck.core.layers import LayerRange
from potluck.orchestrator.routing import ShardStore
from potluck.swarm.adverts import Advert, HeldWeights
from potluck.swarm.view import Seen, Served, View
from tests.support.swarm_records import KEYS, MODEL, WEIGHTS, advert, shard

OWN, ONE, TWO, THREE = (key.node_id for key in KEYS[:4])


def seen(told: Advert, **fields: bool) -> Seen:
    return Seen(told, 0.0, 120.0, **{"is_connected": True, **fields})  # type: ignore[arg-type]


def view(*nodes: Seen, is_sparse: bool = False) -> View:
    return View(OWN, 0.0, 1, {each.advert.node: each for each in nodes}, is_sparse)


HALVES = (seen(advert(KEYS[1], shards=(shard(0, 4),))), seen(advert(KEYS[2], shards=(shard(4, 8),))))


def test_holders_and_gaps() -> None:
    assert [holder.node for holder in view(*HALVES).holders(MODEL, WEIGHTS)] == [ONE, TWO]
    assert [holder.node for holder in view(*HALVES).holders(MODEL, WEIGHTS, layer=5)] == [TWO]
    assert view(*HALVES).gaps(MODEL, WEIGHTS, 8) == []
    assert view(HALVES[1]).gaps(MODEL, WEIGHTS, 10) == [LayerRange(0, 4), LayerRange(8, 10)]
    assert view(HALVES[0]).has_ends(MODEL, WEIGHTS) == (True, False)
    assert view(*HALVES).models() == {(MODEL, WEIGHTS): 8}


def test_a_holder_that_is_not_connected_is_left_out() -> None:
    away = seen(HALVES[0].advert, is_connected=False)
    assert view(away, HALVES[1]).gaps(MODEL, WEIGHTS, 8) == [LayerRange(0, 4)]
    assert [offer.node for offer in view(away, HALVES[1]).offers()] == [TWO]


def test_where_nobody_has_links_to_all_only_the_doubtful_are_left_out() -> None:
    away, doubtful = (
        seen(HALVES[0].advert, is_connected=False),
        seen(HALVES[1].advert, is_connected=False, is_suspect=True),
    )
    assert [offer.node for offer in view(away, doubtful, is_sparse=True).offers()] == [ONE]


def test_who_drains_offers_what_it_still_names_and_gives_weights() -> None:
    told = advert(KEYS[1], shards=(shard(0, 4),), is_draining=True, held=(HeldWeights(WEIGHTS, ((0, 2), (3, 4))),))
    assert [offer.node for offer in view(seen(told)).offers()] == [ONE]
    assert view(seen(advert(KEYS[1], is_draining=True))).offers() == []
    assert view(seen(told)).givers(WEIGHTS, 1) == [ONE]
    assert view(seen(told)).givers(WEIGHTS, 2) == []


def test_offers_are_what_the_shard_store_takes() -> None:
    store = ShardStore()
    for offer in view(*HALVES, seen(advert(KEYS[0], shards=(shard(),)), is_own=True)).offers():
        store.put(offer.node, offer.address, offer.described, is_own=offer.is_own)
    assert store.holders(WEIGHTS) == [ONE, TWO, OWN]
    found = store.candidates(WEIGHTS, 1, allows_own=False)
    assert [(each.node, each.address) for each in found] == [
        (node, advert(KEYS[at]).addresses[0]) for at, node in ((1, ONE), (2, TWO))
    ]


def test_what_a_node_that_may_not_serve_says_it_serves_counts_for_nothing() -> None:
    told = advert(
        KEYS[1], shards=(shard(0, 8),), allows_serving=True, held=(HeldWeights(WEIGHTS, ((0, 8),)),),
        intended=(HeldWeights(WEIGHTS, ((0, 8),)),),
    )  # fmt: skip
    served = frozenset({Served(MODEL, WEIGHTS, 1)})
    trusting = view(seen(told), HALVES[1]).trusting(lambda node: node == TWO, served)
    assert [offer.node for offer in trusting.offers()] == [TWO]
    assert trusting.givers(WEIGHTS, 1) == []
    assert not trusting.nodes[ONE].advert.allows_serving
    assert trusting.nodes[ONE].advert.intended == ()
    assert trusting.gaps(MODEL, WEIGHTS, 8) == [LayerRange(0, 4)]


def test_shards_of_other_weights_or_arithmetic_than_the_swarms_are_left_out() -> None:
    served = frozenset({Served(MODEL, WEIGHTS, 2)})
    assert view(*HALVES).trusting(lambda node: True, served).offers() == []
    others = frozenset({Served(MODEL, "6" * 64, 1)})
    assert view(*HALVES).trusting(lambda node: True, others).offers() == []
    right = frozenset({Served(MODEL, WEIGHTS, 1)})
    assert len(view(*HALVES).trusting(lambda node: True, right).offers()) == 2
