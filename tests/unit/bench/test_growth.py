"""What an added hop costs, from tokens that were timed; nothing is measured."""

import pytest

from potluck.bench.growth import Launch, added_hop
from potluck.orchestrator.generation import StepTiming


def launch(own_ms: float) -> Launch:
    """Of three tokens, one of which something was in the way of."""
    timings = [StepTiming(own / 1000 + 0.005, ((0.002, 0.0), (0.003, 0.0))) for own in (own_ms, own_ms, 50.0)]
    return Launch(timings, [100.0])


def test_only_what_is_not_computing_is_shared_out_among_the_hops_that_were_added() -> None:
    added = added_hop(2, 4, [launch(0.4), launch(0.5)], [launch(0.8), launch(1.1)])
    assert (added.from_shards, added.to_shards) == (2, 4)
    assert added.mean_ms == pytest.approx((0.2 + 0.3) / 2)
    assert added.error_ms == pytest.approx(0.05)


def test_one_launch_says_nothing_of_its_error() -> None:
    assert added_hop(4, 8, [launch(1.0)], [launch(2.0)]).error_ms == float("inf")
