"""The growth curve has every row that was asked for, and its figures are of real plans."""

from potluck.bench.planner import PlannerBenchSettings, bench_planner, made_up_swarm
from potluck.planner.placement import plan


def test_a_small_curve_has_its_rows_in_order_and_positive_figures() -> None:
    said: list[str] = []
    settings = PlannerBenchSettings(node_counts=(10, 30), layer_counts=(8,), plan_rounds=1, route_rounds=1)
    report = bench_planner(settings, said.append)
    assert [(row.nodes, row.layers) for row in report.rows] == [(10, 8), (30, 8)]
    assert said == ["10 nodes, 8 layers", "30 nodes, 8 layers"]
    for row in report.rows:
        assert min(row.plan_latency_ms, row.plan_throughput_ms, row.replan_ms, row.route_ms, row.standbys_ms) > 0
        assert row.chain >= 1


def test_made_up_swarms_are_the_same_for_the_same_seed_and_need_more_than_one_node() -> None:
    assert made_up_swarm(10, 8, 3) == made_up_swarm(10, 8, 3)
    assert made_up_swarm(10, 8, 3) != made_up_swarm(10, 8, 4)
    assert len(plan(*made_up_swarm(10, 8, 3)).chain) > 1
