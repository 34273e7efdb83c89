"""`potluck bench engine --against llama.cpp` from end to end, with everything short: that it runs and what it reports, not how fast."""

from pathlib import Path

import pytest

from potluck.bench import engine
from potluck.bench.engine import EngineBenchSettings, bench_engine
from potluck.bench.own_engine import ModelFile
from potluck.bench.random_model import RandomShape
from potluck.bench.report import as_json


def test_both_sides_are_measured(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEPTH", 48)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 16)
    small = RandomShape(
        name="small",
        hidden_size=512,
        layer_count=2,
        head_count=8,
        head_size=64,
        feed_forward_size=512,
        vocabulary_size=512,
    )
    settings = EngineBenchSettings(
        name="smollm2", model=ModelFile(smollm2_path, "test", tmp_path / "packed"), cache_folder=tmp_path, threads=(1,),
        is_against_llama_cpp=True, rounds=1, decode_tokens=4, deep_tokens=2, large_tokens=2, step_repeats=2, large_shape=small,
    )  # fmt: skip
    said: list[str] = []
    report = as_json(bench_engine(settings, said.append))
    assert "AVX2" in str(report["llama_cpp_system_info"])
    ratios = {key: value for key, value in report.items() if key.endswith("_ratio")}
    # A busy core is compared on two threads.
    assert [key for key, value in ratios.items() if not isinstance(value, float) or value <= 0] == ["busy_core_ratio"]
    assert said
