"""`potluck bench pipeline` on real nodes, with everything short: that both sides are measured, launch by launch, not how fast."""

from pathlib import Path

import pytest

from potluck.bench.growth import bench_growth
from potluck.bench.own_engine import ModelFile
from potluck.bench.pipeline import PipelineBenchSettings, bench_pipeline
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.store import ModelStore


def test_every_launch_counts_and_more_shards_cost_more_hops(models_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(models_home))
    store = ModelStore(models_home / "models")
    entry = store.find(DEFAULT_MODEL_ID)
    file = ModelFile(store.path(entry.id), entry.weights_sha256, store.packed_folder(entry.id))
    settings = PipelineBenchSettings(
        model=entry.id, file=file, layer_count=entry.layer_count, launches=2, rounds=1, decode_tokens=8,
        prefill_tokens=16, batch=2, shard_counts=(2, 3), growth_launches=2,
    )  # fmt: skip
    said: list[str] = []
    report = bench_pipeline(settings, said.append)
    assert [line for line in said if "unsplit" in line] == [
        "2 shards against the unsplit model, launch 1 of 2",
        "2 shards against the unsplit model, launch 2 of 2",
    ]
    assert (report.hop_p50_ms, report.hop_p95_ms) == (report.hop.hop_p50_ms, report.hop.hop_p95_ms)
    ratios = (report.split_ratio, report.prefill_ratio, report.batch_ratio)
    assert all(ratio > 0 for ratio in ratios)
    said.clear()
    growth = bench_growth(settings, said.append)
    assert said == [f"{shards} shards, launch {launch} of 2" for launch in (1, 2) for shards in (2, 3)]
    assert [hop.shards for hop in growth.hops] == [2, 3]
    hops = (report.hop, *growth.hops)
    assert all(hop.compute_ms > 0 and hop.tokens_per_s > 0 and 0 < hop.hop_p50_ms <= hop.hop_p95_ms for hop in hops)
    assert [(each.from_shards, each.to_shards) for each in growth.added] == [(2, 3)]
