"""What `potluck bench … --json` prints has the keys that were promised; scripts read them. Nothing is measured."""

import json

import pytest

from potluck.bench.chaos import ChaosSettings, summary
from potluck.bench.pipeline import HopFigures, PipelineReport
from potluck.bench.report import as_json
from potluck.cli.console import print_json
from tests.support.bench_reports import report

PIPELINE = PipelineReport(
    model="m",
    split_ratio=0.9,
    hop_p50_ms=0.3,
    hop_p95_ms=0.6,
    prefill_ratio=1.7,
    batch_ratio=3.6,
    unsplit_tokens_per_s=160.0,
    split_tokens_per_s=144.0,
    unsplit_prefill_tokens_per_s=400.0,
    split_prefill_tokens_per_s=680.0,
    hop=HopFigures(2, 0.3, 0.6, 5.0, 0.2, 0.2, 144.0),
)
PROMISED = {
    "pipeline": (PIPELINE, {"split_ratio", "hop_p50_ms", "hop_p95_ms", "prefill_ratio", "batch_ratio"}),
    "chaos": (
        summary(ChaosSettings(model="m", layer_count=8), []),
        {"kills", "identical", "pause_p50_ms", "pause_p95_ms", "pause_max_ms"},
    ),
    "engine": (as_json(report()), {"decode_ratio", "prefill_ratio"}),
}


@pytest.mark.parametrize("command", PROMISED)
def test_the_keys_are_those_that_were_promised_and_hold_numbers(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, keys = PROMISED[command]
    print_json(found)  # as the command does
    printed = json.loads(capsys.readouterr().out)
    assert {key for key in keys if isinstance(printed.get(key), int | float)} == keys
